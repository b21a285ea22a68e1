"""``hotbunk conformance``: exit codes, the table, the matrix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotbunk.conformance.backends import DESCRIBED, under_test
from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.case import Level, all_cases
from hotbunk.conformance.clauses import CONTRACT
from hotbunk.conformance.command import main
from hotbunk.conformance.mutants.show import FEWEST
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import BackendNotFound, ConfigError
from hotbunk.rollout.options import parse_settings


def hotbunk(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotbunk", "conformance", *arguments],
        check=False,
        text=True,
        capture_output=True,
        timeout=60,
    )


def test_the_oracle_passes_and_the_matrix_says_so(tmp_path: Path) -> None:
    done = hotbunk("--backend", "oracle", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "goldens_of_two_versions" in done.stdout
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "badge.json",
        "badge.svg",
        "junit.xml",
        "matrix.json",
        "matrix.md",
        "report.html",
    }
    matrix = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert matrix["backend"] == "oracle"
    assert [c["case"] for c in matrix["cases"]] == [one.name for one in all_cases()]
    assert {c["status"] for c in matrix["cases"]} == {"pass", "unsupported-verified", "not-run"}


def test_a_failure_is_exit_code_1_and_is_in_the_matrix(tmp_path: Path) -> None:
    # An oracle that makes no token within a moment is one that does not keep its promises.
    done = hotbunk("--backend", "oracle", "--set", "step_time=100.0", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout
    matrix = json.loads((tmp_path / "matrix.json").read_text())
    failed = [c for c in matrix["cases"] if c["status"] == "fail"]
    assert failed
    assert all(c["detail"] for c in failed)


def test_one_case_alone(tmp_path: Path) -> None:
    """By the very command that its report tells."""
    chosen = ["--case", "pause_keep", "--seed", "3"]
    done = hotbunk("--backend", "oracle", *chosen, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    matrix = json.loads((tmp_path / "matrix.json").read_text())
    assert [one["case"] for one in matrix["cases"]] == ["pause_keep"]
    assert matrix["simulated"]
    words = f"{matrix['command']} --case pause_keep".split()
    assert hotbunk(*words[2:]).returncode == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--backend", "orcale"], "did you mean 'oracle'"),
        (["--backend", "oracle", "--set", "stp_time=1"], "step_time"),
        (["--backend", "oracle", "--set", "step_time"], "key=value"),
        (["--backend", "oracle", "--level", "cor"], "did you mean 'core'"),
        (["--level", "core"], "which backend"),
        (["--backend", "oracle", "--case", "pause_kept"], "did you mean 'pause_keep'"),
        (["compare", "a"], "compare A B"),
    ],
    ids=lambda it: it[-1] if isinstance(it, list) else "",
)
def test_what_cannot_be_meant_is_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = hotbunk(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_settings_are_yaml() -> None:
    assert parse_settings(["a=1", "b=x", "c={d: [1, true]}"]) == {
        "a": 1,
        "b": "x",
        "c": {"d": [1, True]},
    }
    for bad in (["a"], ["=1"], ["a b=1"], ["a=1", "a=2"], ["a=[1"]):
        with pytest.raises(ConfigError):
            parse_settings(bad)


def test_names_are_known() -> None:
    shipped = {"hotbunk_http", "oracle", "reference", "reference_process", "served", "url"}
    shipped |= {"vllm", "vllm_http", "vllm_process"}
    assert set(DESCRIBED) == shipped
    with pytest.raises(BackendNotFound, match="reference"):
        under_test("referense")


@pytest.mark.parametrize("name", ["sglang", "trtllm", "vllm_ascend"])
def test_an_engine_without_an_adapter_is_said_to_be_one(name: str) -> None:
    with pytest.raises(BackendNotFound, match=f"'{name}': this hotbunk has no adapter") as error:
        under_test(name)
    assert "did you mean" not in str(error.value)


def test_every_mutant_is_killed_and_the_table_says_by_whom(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", "conformance", "--mutants", "--out", str(tmp_path)],
        check=False,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = re.fullmatch(r"(\d+) of (\d+) killed", done.stdout.splitlines()[-1])
    assert last is not None
    assert int(last[1]) == int(last[2]) >= FEWEST >= 25
    kills = json.loads((tmp_path / "mutants.json").read_text())["mutants"]
    assert len(kills) == int(last[2])
    rows = {tuple(line.split()[:2]) for line in done.stdout.splitlines()}
    assert {(kill["mutant"], kill["case"]) for kill in kills} <= rows


class Untold(OracleUnderTest):
    """Did not say beforehand what would not be run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.expected_not_run = {}


class Unbrought(OracleUnderTest):
    """Declares adapters, and does not bring what they would say."""

    adapter_golden = BackendUnderTest.adapter_golden


@pytest.mark.parametrize(
    "made, case, code, status",
    [
        (Unbrought, "adapters_serve_who_asks", 1, "suite-error"),
        (Untold, "groups_that_take_no_update", 1, "not-run"),
        (OracleUnderTest, "groups_that_take_no_update", 0, "not-run"),
    ],
)
def test_what_proves_nothing_is_no_success(
    made: type, case: str, code: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error of the suite, and what was not run and nobody had said so, are exit code 1."""
    monkeypatch.setitem(DESCRIBED, "tried", f"{__name__}:{made.__name__}")
    arguments = ["--backend", "tried", "--case", case, "--seed", "7", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["hotbunk.conformance", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    matrix = json.loads((tmp_path / "matrix.json").read_text())
    assert [one["status"] for one in matrix["cases"]] == [status]
    assert (matrix["contract"], matrix["seed"]) == (CONTRACT, "7")


def elsewhere(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", *command, "--backend", "oracle", "--level", "smoke"]
    return subprocess.run(
        arguments, check=False, text=True, capture_output=True, timeout=60, cwd=folder
    )


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    done = elsewhere(tmp_path, "hotbunk.conformance")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(all_cases(Level.SMOKE))} pass" in done.stdout


def test_it_runs_under_pytest(tmp_path: Path) -> None:
    """On an engine that keeps some promises and not others, so that both are seen."""
    plugin = ["-p", "hotbunk.conformance.plugin", "--pyargs", "hotbunk.conformance"]
    done = elsewhere(tmp_path, "pytest", "-rA", *plugin, "--set", "step_time=100.0")
    assert done.returncode == 1, done.stdout + done.stderr
    found = set(re.findall(r"^(?:PASSED|FAILED) \S+::(\w+)", done.stdout, re.MULTILINE))
    assert found == {one.name for one in all_cases(Level.SMOKE)}
    assert re.search(r"^PASSED \S+::emulations_say_how", done.stdout, re.MULTILINE)
    assert re.search(r"^FAILED \S+::pause_keep", done.stdout, re.MULTILINE)
