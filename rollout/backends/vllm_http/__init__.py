"""A stock vLLM server as a backend: the contract, spoken to its own control plane.

Needs a server with ``VLLM_SERVER_DEV_MODE=1``, which has that plane; ``--enable-scale-out`` adds the
route that says which weights made a token, and with it pauses that freeze. What can be had is asked
of the server at the start (:mod:`.probe`) and declared. vLLM itself is not needed here; the extra
``http`` is.
"""

from __future__ import annotations

from typing import Any

from hotbunk.rollout.contract import Engine


def create(**options: Any) -> Engine:
    """Build (not start) a backend over a vLLM server.

    :raises ConfigError: an unknown option, or a bad value.
    """
    from hotbunk.rollout.backends.vllm_http.engine import VllmHttpEngine
    from hotbunk.rollout.backends.vllm_http.options import VllmHttpOptions
    from hotbunk.rollout.options import convert

    return VllmHttpEngine(convert(options, VllmHttpOptions, "backend vllm_http"))
