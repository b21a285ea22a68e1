"""Whatever is generated from the OpenAPI schema: typed answers, and no change on a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = 3  # of each kind, for each endpoint
KINDS = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A server in a thread, over an oracle."""
    from hotbunk.conformance.backends.hotbunk_http import Served
    from hotbunk.rollout.registry import create_backend
    from hotbunk.rollout.status import Deadlines

    engine = create_backend("oracle", step_time=0.0)
    one = Served(engine, Deadlines(hold=0.2, drain=2.0, memory=2.0, update=2.0, inspect=1.0))
    one.start()
    yield one
    one.stop()


def _on_loop(served: Any, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, served.loop).result(10)


def _state(served: Any) -> tuple[Any, ...]:
    """Everything a refusal must leave alone."""
    status = _on_loop(served, served.replica.status())
    pauses = [(pause.owner, pause.mode) for pause in status.pauses]
    return status.groups, status.versions, status.kv, pauses, status.health


async def _open(replica: Any) -> None:
    """As before any case: awake, and open."""
    for pause in (await replica.status()).pauses:
        await replica.resume_generation(owner=pause.owner)
    await replica.wake_up()


def test_the_schema_is_kept_by_whatever_is_generated_from_it(served: Any) -> None:
    """No 5xx but the stated 503, and a 4xx changes nothing."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    seen: dict[int, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for kind in KINDS:
            try:
                _probe(served, operation, kind, seen)
            except Unsatisfiable:  # nothing that could be asked wrong
                assert kind is not schemathesis.GenerationMode.POSITIVE, operation.label
    assert seen.get(200, 0) > 50
    assert seen.get(422, 0) > 50


def _probe(served: Any, operation: Any, kind: Any, seen: dict[int, int]) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=kind))
    def one(case: Any) -> None:
        before = _state(served)
        answer = case.call(timeout=30, headers=_plain(case.headers))
        status = answer.status_code
        seen[status] = seen.get(status, 0) + 1
        told = f"{operation.label} {case.query} {case.body!r}: {status} {answer.text[:300]}"
        assert status < 500 or status == 503, told
        if status >= 400:
            assert answer.json()["error"]["message"], told
        if 400 <= status < 500:
            assert _state(served) == before, told
        _on_loop(served, _open(served.replica))

    one()


def _plain(headers: Any) -> dict[str, str]:
    """Those of the generated headers that HTTP can carry."""
    return {
        key: value
        for key, value in dict(headers or {}).items()
        if isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and value == value.strip()
    }
