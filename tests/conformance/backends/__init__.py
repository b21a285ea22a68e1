"""Descriptions of backends, by name: those the suite ships, and those that packages bring.

A package describes its backend by an entry point of the group ``hotbunk.conformance``: the backend's
name, and its class derived from :class:`~hotbunk.conformance.under_test.BackendUnderTest`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import BackendNotFound, closest
from hotbunk.rollout.registry import missing, without_adapter

GROUP = "hotbunk.conformance"

# What the suite ships; imported only when it is asked for.
DESCRIBED = {
    "hotbunk_http": "hotbunk.conformance.backends.hotbunk_http:HttpUnderTest",
    "oracle": "hotbunk.conformance.backends.oracle:OracleUnderTest",
    "reference": "hotbunk.conformance.backends.reference:ReferenceUnderTest",
    "reference_process": (
        "hotbunk.conformance.backends.reference_process:ReferenceProcessUnderTest"
    ),
    "served": "hotbunk.conformance.backends.served:ServedUnderTest",
    "url": "hotbunk.conformance.backends.at_url:at_url",
    "vllm": "hotbunk.conformance.backends.vllm:VllmUnderTest",
    "vllm_http": "hotbunk.conformance.backends.vllm_http:VllmHttpUnderTest",
    "vllm_process": "hotbunk.conformance.backends.vllm_process:VllmProcessUnderTest",
}


def under_test(name: str, **options: Any) -> BackendUnderTest:
    """The description of that backend, with its options.

    :raises BackendNotFound: no such name, with the closest one.
    :raises MissingExtra: a package it needs is not installed.
    :raises ConfigError: an option it does not know.
    """
    known = known_descriptions()
    if name not in known:
        raise BackendNotFound(
            f"no backend named {name!r}{without_adapter(name) or closest(name, known)}",
            remedy=f"the suite knows {', '.join(sorted(known))}",
        )
    try:
        made = known[name].load()(**options)
    except ModuleNotFoundError as error:
        raise missing(name, error) from error
    return cast(BackendUnderTest, made)


def known_descriptions() -> dict[str, EntryPoint]:
    """By the backend's name. One that the suite ships is not replaced by a package's."""
    brought = {point.name: point for point in entry_points(group=GROUP)}
    return brought | {name: EntryPoint(name, where, GROUP) for name, where in DESCRIBED.items()}
