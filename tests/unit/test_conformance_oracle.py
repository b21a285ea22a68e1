"""The oracle passes every case, and refuses what it is told not to have."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.case import REGISTRY, Case, CaseResult, Level, Status, all_cases, case
from hotbunk.conformance.matrix import matrix_of
from hotbunk.conformance.negative import ATTEMPTS, DIRECT
from hotbunk.conformance.reports import write_junit, write_markdown
from hotbunk.conformance.rig import Rig
from hotbunk.conformance.runner import accepted, run, run_case, write_matrix
from hotbunk.conformance.under_test import UPDATE_POINTS, BackendUnderTest
from hotbunk.rollout.backends.oracle import OracleEngine, create
from hotbunk.rollout.backends.oracle.options import ABILITIES
from hotbunk.rollout.contract import Engine, PauseMode, Retention
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.replica import Replica

CASES = all_cases()
PASSED = (Status.PASS, Status.NOT_RUN, Status.UNSUPPORTED)


def name(one: Case) -> str:
    return one.name


@pytest.mark.anyio
@pytest.mark.parametrize("one", CASES, ids=name)
async def test_case(one: Case) -> None:
    under_test = OracleUnderTest()
    result = await run_case(one, under_test)
    assert accepted(result, under_test), result.detail


@pytest.mark.parametrize(
    "options",
    [
        {"loaded": False},
        {"gate": "in_engine"},
        {"gate": "engine_pause"},
        {"fed": ["target"]},
        {"step_time": 0.0},
        {"deltas": True},
    ],
    ids=str,
)
def test_other_oracles(options: dict[str, Any]) -> None:
    failed = [r for r in run(OracleUnderTest(**options)) if r.status not in PASSED]
    assert not failed


@pytest.mark.anyio
@pytest.mark.parametrize("deltas, status", [(True, Status.PASS), (False, Status.UNSUPPORTED)])
async def test_deltas_from_both_sides(deltas: bool, status: Status) -> None:
    result = await run_case(REGISTRY["deltas"], OracleUnderTest(deltas=deltas))
    assert result.status is status, result.detail


@pytest.mark.parametrize("lacking", ABILITIES)
def test_what_is_declared_missing_is_refused(lacking: str) -> None:
    results = run(OracleUnderTest(unsupported=[lacking]))
    assert not [r for r in results if r.status not in PASSED]
    concerned = {r.case for r in results if lacking in r.capability.split()}
    refused = {r.case for r in results if r.status is Status.UNSUPPORTED}
    assert concerned <= refused


@pytest.fixture(scope="module")
def whole() -> list[CaseResult]:
    return run(OracleUnderTest())


def test_almost_nothing_is_left_untried(whole: list[CaseResult]) -> None:
    statuses = {r.case: r.status for r in whole}
    assert Counter(statuses.values())[Status.FAIL] == 0
    untried = {case for case, status in statuses.items() if status is Status.NOT_RUN}
    assert untried == set(OracleUnderTest().expected_not_run)


def test_each_level_has_its_own_cases_and_smoke_some_of_each() -> None:
    levels = [Level.CORE, Level.COLOCATE, Level.SYNC, Level.FAULT]
    parts = {level: [one.name for one in all_cases(level)] for level in levels}
    assert sum(map(len, parts.values())) == len(CASES)
    smoke = {one.level for one in all_cases(Level.SMOKE)}
    assert smoke == set(levels)
    assert len(all_cases(Level.SMOKE)) < len(CASES) / 4
    for level in (Level.SMOKE, Level.ALL):
        with pytest.raises(ValueError, match="selection"):
            case(level=level)


@pytest.mark.anyio
@pytest.mark.parametrize("lacking", sorted(DIRECT.keys() & set(ABILITIES)))
async def test_what_is_undeclared_and_done_all_the_same_is_found(lacking: str) -> None:
    """The engine can do it, declares that it cannot, and does it for whoever asks."""

    class Secretive(OracleUnderTest):
        async def start(self) -> OracleEngine:
            engine = await super().start()
            honest = self.options["unsupported"]
            self.engine = create(**{**self.options, "unsupported": []})
            self.engine.capabilities = engine.capabilities
            self.engine._require = lambda verb, able: None  # type: ignore[method-assign]
            assert honest == [lacking]
            return self.engine

    one = next(c for c in CASES if lacking in c.capabilities)
    result = await run_case(one, Secretive(unsupported=[lacking]))
    assert result.status is Status.FAIL, result
    assert "Unsupported was to be raised" in result.detail, result.detail


VERBS = {
    "abort": "abort",
    "adapter": "adapter",
    "digest": "digest",
    "partial": "partial",
    "release": "release",
    "release_kv_cache": "release_kv_cache",
    **{f"pause.{mode.value}": f"pause mode {mode.value!r}" for mode in PauseMode},
    **{f"retention.{r.value}": f"retention {r.value!r}" for r in Retention},
}
"""Capabilities, and what the oracle calls them where it refuses."""


@pytest.mark.parametrize("lacking", VERBS)
def test_what_is_declared_and_absent_is_found(lacking: str) -> None:
    """The engine declares it, and refuses whoever asks: that is no refusal as declared."""

    class Boastful(OracleUnderTest):
        async def start(self) -> OracleEngine:
            engine = await super().start()

            def refuse(verb: str, able: bool) -> None:
                if verb == VERBS[lacking]:
                    raise Unsupported(verb, "oracle")

            engine._require = refuse  # type: ignore[method-assign]
            return engine

    concerned = [one.name for one in CASES if lacking in one.capabilities]
    results = {r.case: r.status for r in run(Boastful(), only=concerned)}
    assert set(results) == set(concerned)
    assert set(results.values()) <= {
        Status.FAIL,
        Status.PASS,
    }  # one that tries refusals alone holds
    assert Status.FAIL in results.values(), results


@pytest.mark.anyio
@pytest.mark.parametrize("lacking", ["samples", "stop_strings", "top_logprobs"])
async def test_a_request_that_is_undeclared_and_served_all_the_same_is_found(lacking: str) -> None:
    class Secretive(OracleUnderTest):
        async def start(self) -> OracleEngine:
            engine = await super().start()
            engine._require = lambda verb, able: None  # type: ignore[method-assign]
            return engine

    one = next(c for c in CASES if lacking in c.capabilities)
    result = await run_case(one, Secretive())
    assert result.status is Status.FAIL, result
    # Of several responses it makes one, and its rules end the case first.
    found = "Unsupported was to be raised, and tokens|without a finish reason"
    assert re.search(found, result.detail), result.detail


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["fail", "hang"])
async def test_where_nothing_could_be_broken_is_said(how: str) -> None:
    """Some points are a note; none at all is no pass."""

    class Sturdy(OracleUnderTest):
        sturdy: tuple[str, ...] = ("post_load", "verify")

        def sabotage(self, point: str, how: str) -> bool:
            return point not in self.sturdy and super().sabotage(point, how)

    one = REGISTRY[f"an_engine_{how}s_in_each_phase"]
    whole = await run_case(one, OracleUnderTest())
    assert (whole.status, whole.detail) == (Status.PASS, "")
    some = await run_case(one, Sturdy())
    assert some.status is Status.PASS, some.detail
    assert some.detail.endswith(f"made to {how} there: post_load, verify")
    under_test = Sturdy()
    under_test.sturdy = UPDATE_POINTS
    none = await run_case(one, under_test)
    assert none.status is Status.NOT_RUN
    assert not accepted(none, under_test)


@pytest.mark.anyio
async def test_what_is_left_out_is_drawn_by_the_seed() -> None:
    """One seed draws alike, others otherwise, and a part of the fused matrix is always among it."""
    names = {spec.name for spec, _ in OracleUnderTest().weights(2)}

    async def left_out(seed: int) -> tuple[str, ...]:
        found: list[str] = []

        class Noting(Replica):
            async def update_weights(self, transfer: Any, **more: Any) -> Any:
                lost = names - {spec.name for spec in transfer.manifest.tensors}
                found.extend(lost if len(lost) == 1 else ())
                return await super().update_weights(transfer, **more)

        class Noted(OracleUnderTest):
            def front(self, engine: Engine) -> Replica:
                return Noting(engine, name=self.name, deadlines=self.deadlines)

        result = await run_case(REGISTRY["bad_offers_are_refused"], Noted(), seed)
        assert result.status is Status.PASS, result.detail
        return tuple(found)

    drawn = [await left_out(seed) for seed in range(8)]
    assert drawn == [await left_out(seed) for seed in range(8)]
    assert len({some for some, _ in drawn}) > 1
    parts = {part for _, part in drawn}
    assert 1 < len(parts) <= 3
    assert all(re.fullmatch(r"layers\.0\.[qkv]\.weight", part) for part in parts)


@pytest.mark.anyio
async def test_what_was_not_run_must_have_been_said() -> None:
    under_test = OracleUnderTest()
    result = await run_case(REGISTRY["groups_that_take_no_update"], under_test)
    assert result.status is Status.NOT_RUN
    assert accepted(result, under_test)
    del under_test.expected_not_run["groups_that_take_no_update"]
    assert not accepted(result, under_test)


def test_every_capability_used_has_a_negative_run() -> None:
    used = {c for one in CASES for c in one.capabilities}
    assert used <= set(ATTEMPTS)


def test_cases_name_known_reports() -> None:
    ids = {i for one in CASES for i in one.ids}
    assert {"G1", "C1", "K1", "V7", "N7", "H1"} <= ids
    assert all(one.doc for one in CASES)


def test_the_matrix_is_an_object_with_cases(whole: list[CaseResult], tmp_path: Path) -> None:
    path = write_matrix(whole, tmp_path / "out", backend="oracle")
    matrix = json.loads(path.read_text())
    assert matrix["backend"] == "oracle"
    assert [c["case"] for c in matrix["cases"]] == [one.name for one in CASES]
    assert set(matrix["cases"][0]) == {
        "case",
        "level",
        "capability",
        "status",
        "seconds",
        "detail",
        "log",
        "measured",
    }


async def endless(rig: Rig) -> None:
    await rig.replica.pause_generation()
    while True:
        await rig.moment()


async def wrong(rig: Rig) -> None:
    raise AssertionError("it does not hold")


async def crash(rig: Rig) -> None:
    raise RuntimeError("the engine fell over")


@pytest.mark.anyio
@pytest.mark.parametrize("body", [endless, wrong, crash])
async def test_bad_ends_are_failures(body: Any) -> None:
    one = Case("x", Level.CORE, (), body, "", ())
    result = await run_case(one, OracleUnderTest())
    assert result.status is Status.FAIL
    assert result.detail


@pytest.mark.anyio
async def test_a_case_that_hangs_says_where() -> None:
    result = await run_case(Case("x", Level.CORE, (), endless, "", ()), OracleUnderTest())
    here, line = Path(__file__).name, endless.__code__.co_firstlineno + 3
    assert f" in {here}:{line} > rig.py:" in result.detail, result.detail


@pytest.mark.anyio
async def test_what_the_backend_did_not_bring_is_an_error_of_the_suite() -> None:
    class Silent(OracleUnderTest):
        adapter_golden = BackendUnderTest.adapter_golden

    result = await run_case(REGISTRY["adapters_serve_who_asks"], Silent())
    assert result.status is Status.ERROR, result.detail


def test_reports_tell_failures_from_what_was_expected(tmp_path: Path) -> None:
    def result(case: str, status: Status, detail: str = "") -> CaseResult:
        return CaseResult(case, Level.SYNC, "digest", status, 0.5, detail)

    results = [
        result("tied_tensors", Status.PASS),
        result("any_bucket_size", Status.FAIL, "a | b\x00 <c> & d"),
        result("groups_that_take_no_update", Status.NOT_RUN, "nothing"),
        result("deltas", Status.NOT_RUN, "nobody said so"),
        result("updating_many_times", Status.ERROR, "broken"),
    ]
    under_test = OracleUnderTest()
    suite = ET.parse(write_junit(results, under_test, tmp_path)).getroot()
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["5", "2", "1", "1"]
    children = {case.get("name"): [child.tag for child in case] for case in suite}
    assert children == {
        "tied_tensors": [],
        "any_bucket_size": ["failure"],
        "groups_that_take_no_update": ["skipped"],
        "deltas": ["failure"],
        "updating_many_times": ["error"],
    }
    about = {"backend": "oracle", "level": "sync", "seed": "0", "command": "again"}
    matrix = matrix_of(under_test, results, **about)
    text = write_markdown(matrix, tmp_path).read_text()
    assert "## sync: 1 of 5 passed" in text
    assert "- **any_bucket_size**: fail. a \\| b" in text
    assert "Again: `again --case any_bucket_size`" in text
    assert "- **groups" not in text
