"""What has been run: docs/conformance.md holds what its record gives, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotbunk.conformance.backends import under_test
from hotbunk.conformance.case import CaseResult, Level, Status
from hotbunk.conformance.matrix import Matrix, matrix_of, read_matrix
from hotbunk.conformance.recorded import (
    BEGIN,
    BROKEN,
    END,
    NOT_RUN,
    made,
    main,
    read_runs,
    recorded,
    section,
)
from hotbunk.conformance.reports import write_all
from hotbunk.conformance.runner import run

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"


def result(case: str, status: Status, detail: str = "") -> CaseResult:
    return CaseResult(case, Level.CORE, "", status, 1.5, detail)


def test_the_document_holds_what_its_record_gives() -> None:
    """Of any run that changes it: python -m hotbunk.conformance.recorded docs/conformance.md."""
    runs = read_runs(DOCUMENT)
    assert runs
    assert DOCUMENT.read_text(encoding="utf-8") == made(DOCUMENT, runs)


def test_every_result_of_a_run_is_in_its_record(tmp_path: Path) -> None:
    described = under_test("oracle")
    results = run(described, Level.SMOKE, 7)
    matrix = matrix_of(described, results, backend="oracle", level="smoke", seed="7", command="c")
    described.close()
    write_all(described, matrix, tmp_path)
    (tmp_path / "d.md").write_text(f"before\n{BEGIN}{END}after\n", encoding="utf-8")
    assert main([str(tmp_path / "d.md"), f"an oracle={tmp_path}"]) == 0
    [kept] = read_runs(tmp_path / "d.md")
    assert kept == recorded("an oracle", read_matrix(tmp_path))
    assert sorted(kept.cases) == sorted(one.case for one in results)
    assert kept.versions["torch"]
    text = (tmp_path / "d.md").read_text(encoding="utf-8")
    assert text == f"before\n{BEGIN}{section([kept])}{END}after\n"
    assert "| an oracle (simulated) |" in text
    assert all(f"`{one.case}`" in text for one in results)


def test_what_is_not_run_for_no_listed_reason_is_broken() -> None:
    some = (
        result("good", Status.PASS),
        result("listed", Status.NOT_RUN, "x"),
        result("unlisted", Status.NOT_RUN, "nothing to try"),
        result("bad", Status.FAIL, "it\nbroke"),
    )
    matrix = Matrix("b", some, expected_not_run={"listed": "the reason"}, when="2026-01-01")
    one, other = recorded("one", matrix), recorded("other", Matrix("b", some[:1]))
    assert one.not_run == {"listed": "the reason"}
    assert one.broken == {"unlisted": "nothing to try", "bad": "it\nbroke"}
    text = section([one, other])
    assert f"| `listed` | {NOT_RUN} |  |" in text
    assert f"| `bad` | {BROKEN} |  |" in text
    assert "- **fails**: it broke (one): `bad`" in text
    assert "Passed in all of them (1): `good`" in text
    assert "| one |  | 2026-01-01 |  | 6 | 1 | 0 | 1 | 2 |" in text


def test_a_later_run_replaces_the_earlier_of_its_name(tmp_path: Path) -> None:
    described = under_test("oracle")
    described.close()
    document = tmp_path / "d.md"
    document.write_text(BEGIN + END, encoding="utf-8")
    for folder, status in (("a", Status.FAIL), ("b", Status.PASS)):
        matrix = matrix_of(described, [result("one", status)], backend="oracle")
        (tmp_path / folder).mkdir()
        write_all(described, matrix, tmp_path / folder)
        assert main([str(document), f"TP=2={tmp_path / folder}"]) == 0
    assert [(run.name, run.passed) for run in read_runs(document)] == [("TP=2", ("one",))]


@pytest.mark.parametrize(
    "text, arguments, said",
    [
        ("no place", ["it={}"], "no place"),
        (BEGIN + END, ["{}"], "NAME=DIR"),
        (BEGIN + END, ["it={}/nowhere"], "no matrix"),
    ],
)
def test_what_cannot_be_meant_changes_nothing(
    text: str, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = under_test("oracle")
    described.close()
    write_all(described, matrix_of(described, [result("one", Status.PASS)], backend="o"), tmp_path)
    document = tmp_path / "d.md"
    document.write_text(text, encoding="utf-8")
    assert main([str(document), *(one.format(tmp_path) for one in arguments)]) == 2
    assert said in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == text
    assert not document.with_suffix(".json").exists()
