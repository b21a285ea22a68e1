"""All verbs in any order on the reference engine, against the plain model: shorter, and for real."""

from __future__ import annotations

import atexit
from functools import cache

from hypothesis import HealthCheck, settings

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.machine import machine_for


@cache
def under_test() -> ReferenceUnderTest:
    """One for all examples: each starts an engine of its own from the same model."""
    made = ReferenceUnderTest()
    atexit.register(made.close)
    return made


TestReference = machine_for(under_test).TestCase
TestReference.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
