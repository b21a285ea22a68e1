"""Backends that the suite ships a description of, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import BackendNotFound, closest
from hotbunk.rollout.registry import missing

# Where each is described; imported only when it is asked for.
DESCRIBED = {
    "hotbunk_http": ("hotbunk.conformance.backends.hotbunk_http", "HttpUnderTest"),
    "oracle": ("hotbunk.conformance.backends.oracle", "OracleUnderTest"),
    "reference": ("hotbunk.conformance.backends.reference", "ReferenceUnderTest"),
    "vllm": ("hotbunk.conformance.backends.vllm", "VllmUnderTest"),
}


def under_test(name: str, **options: Any) -> BackendUnderTest:
    """The description of that backend, with its options.

    :raises BackendNotFound: no such name, with the closest one.
    :raises MissingExtra: a package it needs is not installed.
    :raises ConfigError: an option it does not know.
    """
    if name not in DESCRIBED:
        raise BackendNotFound(
            f"no backend named {name!r}{closest(name, DESCRIBED)}",
            remedy=f"the suite knows {', '.join(DESCRIBED)}",
        )
    module, attribute = DESCRIBED[name]
    try:
        made = getattr(import_module(module), attribute)(**options)
    except ModuleNotFoundError as error:
        raise missing(name, error) from error
    return cast(BackendUnderTest, made)
