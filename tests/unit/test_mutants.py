"""The suite must notice every broken rule and promise, by the case that is about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotbunk.conformance.case import REGISTRY, Level, Status, all_cases
from hotbunk.conformance.clauses import clause_of
from hotbunk.conformance.mutants import Mutant, Patches, all_mutants, run, show

MUTANTS = all_mutants()


def name(one: Mutant) -> str:
    return one.name


@pytest.mark.parametrize("one", MUTANTS, ids=name)
def test_the_case_that_is_about_it_notices(one: Mutant) -> None:
    [kill] = run.hunt([one])
    assert kill.killed, f"{kill.case or 'nobody'} noticed instead ({kill.detail})"
    # One that crashes by a mistake of its own shows nothing.
    assert not re.search(r"AttributeError|NameError|TypeError|KeyError", kill.detail), kill.detail


def test_each_says_what_is_broken() -> None:
    assert len(MUTANTS) >= show.FEWEST
    assert all(one.breaks for one in MUTANTS)
    assert {one.killer for one in MUTANTS} <= {one.name for one in all_cases()}


@pytest.mark.parametrize("one", MUTANTS, ids=name)
def test_its_killer_names_its_fault(one: Mutant) -> None:
    """The report, or where nobody sent one, the rule of the contract."""
    case = REGISTRY[one.killer]
    if one.ids:
        assert set(one.ids) & set(case.ids), f"{case.name} is about {case.ids}, and not {one.ids}"
        return
    clause = clause_of(case.name)
    assert clause is not None
    assert one.section == clause.section, f"{one.name} names no report, nor {clause.section}"


def test_some_are_noticed_at_each_level() -> None:
    levels = {one.name: one.level for one in all_cases()}
    found = {levels[one.killer] for one in MUTANTS}
    assert found == {Level.CORE, Level.COLOCATE, Level.SYNC, Level.FAULT}


def test_one_that_lives_is_said_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = Mutant("harmless", "Nothing.", "emulations_say_how", lambda patches: None, {})
    broken = next(one for one in MUTANTS if REGISTRY[one.killer].smoke)
    missed = broken._replace(name="missed", killer="emulations_say_how")
    few = [harmless, missed, broken]
    monkeypatch.setattr(show, "all_mutants", lambda: few)
    monkeypatch.setattr(run, "all_cases", lambda: all_cases(Level.SMOKE))
    monkeypatch.setenv("COLUMNS", "200")
    assert show.run_all(tmp_path / "out") == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "1 of 3 killed"
    assert "LIVES: not emulations_say_how" in said
    written = json.loads((tmp_path / "out" / show.FILE).read_text())["mutants"]
    noticed = written[1]["case"]
    assert noticed not in ("", "emulations_say_how")
    assert f"LIVES: not emulations_say_how, but {noticed}" in said
    assert [kill["case"] for kill in written] == ["", noticed, broken.killer]


def test_too_few_are_no_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "all_mutants", lambda: MUTANTS[:1])
    assert show.run_all(None) == 1, f"{show.FEWEST} must be tried"
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 killed"


def test_a_case_that_fails_anyhow_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle without time to make a token fails cases whether or not it is broken."""
    options = {"step_time": 100.0}
    idle = Mutant("idle", "Nothing.", "pause_keep", lambda patches: None, options)
    monkeypatch.setattr(run, "all_cases", list)
    assert run._try(all_cases(Level.CORE)[0], idle, 0).status is Status.FAIL
    [kill] = run.hunt([idle])
    assert not kill.killed


def test_patches_are_taken_back() -> None:
    class Base:
        kept = 1

    class Derived(Base):
        own = 2

    table: dict[str, Any] = {"a": 1}
    with Patches() as patches:
        patches.setattr(Derived, "kept", 5)
        patches.setattr(Derived, "own", 6)
        patches.setattr(Derived, "new", 7)
        patches.setitem(table, "a", 2)
        patches.setitem(table, "b", 3)
        patches.setitem(table, "b", 4)
        assert (Derived.kept, Derived.own, table) == (5, 6, {"a": 2, "b": 4})
    assert "kept" not in vars(Derived)
    assert (Derived.kept, Derived.own, hasattr(Derived, "new"), table) == (1, 2, False, {"a": 1})
