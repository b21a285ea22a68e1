"""``--url``: whatever answers there is looked at, and described as what it is."""

from __future__ import annotations

from typing import Any

from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.options import convert


def at_url(*, url: str, model: str | None = None, **options: Any) -> BackendUnderTest:
    """``hotbunk serve`` through our client; vLLM and SGLang as they stand. Other options: the connection's.

    :raises ReplicaLost: nobody answers. :raises ConfigError: what answers cannot be tried.
    """
    from hotbunk.conformance.backends.stock.described import StockUnderTest
    from hotbunk.conformance.backends.stock.surface import surface_of

    connection = convert({"url": url, **options}, HttpOptions, "backend url")
    surface = surface_of(connection.url, connection.key())
    if surface.kind == "hotbunk":
        from hotbunk.conformance.backends.served import ServedUnderTest

        return ServedUnderTest(url=url, model=model, **options)
    if options.keys() - {"api_key_file"}:
        raise ConfigError(f"a server without hotbunk takes no {sorted(options)}")
    return StockUnderTest(url=url, surface=surface, model=model, key=connection.key())
