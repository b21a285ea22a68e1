"""A server of ``hotbunk serve`` as a backend, and as a replica of a manager.

:class:`~hotbunk.rollout.backends.hotbunk_http.handle.HttpHandle` is the replica's verbs over HTTP; a
manager takes it like any other handle, one a server, and weights go by reference. The backend
``hotbunk_http`` is the contract over such a handle, for whoever drives engines: what it is given to
transfer is offered on to the server by a transport. Needs the extra ``http``.
"""

from __future__ import annotations

from typing import Any

from hotbunk.rollout.contract import Engine


def create(**options: Any) -> Engine:
    """Build (not start) a backend over a server.

    :raises ConfigError: an unknown option, or a bad value.
    """
    from hotbunk.rollout.backends.hotbunk_http.engine import HttpEngine
    from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
    from hotbunk.rollout.options import convert

    return HttpEngine(convert(options, HttpOptions, "backend hotbunk_http"))
