"""All verbs in any order on the oracle, against the plain model."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.machine import machine_for

TestOracle = machine_for(OracleUnderTest).TestCase
TestOracle.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
