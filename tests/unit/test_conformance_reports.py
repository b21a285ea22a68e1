"""What a run leaves behind for people: the report, the badge, and what changed between two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.badge import message
from hotbunk.conformance.case import REGISTRY, CaseResult, Level, Status, all_cases
from hotbunk.conformance.clauses import CONTRACT, clauses
from hotbunk.conformance.compare import changes, show
from hotbunk.conformance.matrix import Matrix, matrix_of, read_matrix
from hotbunk.conformance.reports import write_all
from hotbunk.rollout.errors import ConfigError


def result(case: str, status: Status, detail: str = "", **more: object) -> CaseResult:
    return CaseResult(case, Level.CORE, "pause.keep", status, 0.5, detail, **more)  # type: ignore[arg-type]


def written(folder: Path, *results: CaseResult) -> Matrix:
    described = OracleUnderTest()
    matrix = matrix_of(
        described,
        results,
        backend="oracle",
        level="core",
        seed="3",
        command="hotbunk conformance X",
    )
    write_all(described, matrix, folder)
    return read_matrix(folder)


class Fetched(HTMLParser):
    """Whatever a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {v}" for k, v in attrs if k in ("src", "href", "srcset", "data")]


def test_every_case_quotes_the_contract() -> None:
    assert set(clauses()) == {one.name for one in all_cases()}


def test_a_report_tells_a_developer_what_to_do(tmp_path: Path) -> None:
    """Seen, promised and how to see it again; whatever an engine said is text and no markup."""
    bad = result("pause_keep", Status.FAIL, "<script>alert(1)</script>", log=("WARNING x: & y",))
    stairs = result("twenty_cycles_are_flat", Status.PASS, measured={"resident bytes": [4, 1, 4]})
    matrix = written(tmp_path, bad, stairs)
    assert (matrix.contract, matrix.seed) == (CONTRACT, "3")
    page = (tmp_path / "report.html").read_text()
    assert "a simulated engine" in page
    assert "keep freezes in-flight requests" in page
    assert f"<p>Expected: {REGISTRY['pause_keep'].doc}</p>" in page
    assert "<p>Seen:</p><pre>&lt;script&gt;alert(1)&lt;/script&gt;</pre>" in page
    assert f"against contract {CONTRACT}" in page
    assert "seed 3" in page
    assert "contract, Verbs: pausing" in page
    assert "hotbunk conformance X --case pause_keep" in page
    assert "WARNING x: &amp; y" in page
    assert "<script" not in page
    assert "<polyline" in page
    parsed = Fetched()
    parsed.feed(page)
    assert parsed.found == []
    assert not re.search(r"url\(|@import", page)


def test_a_badge_counts_what_was_tried(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        result("a", Status.PASS),
        result("b", Status.UNSUPPORTED),
        result("the_engine_itself_refuses", Status.NOT_RUN),
    )
    assert message(matrix) == "2 of 2, simulated"
    said = json.loads((tmp_path / "badge.json").read_text())
    assert (said["message"], said["color"]) == ("2 of 2, simulated", "brightgreen")
    svg = ET.parse(tmp_path / "badge.svg").getroot()
    assert "2 of 2" in "".join(svg.itertext())
    matrix = written(tmp_path, result("a", Status.PASS), result("b", Status.FAIL, "no"))
    assert json.loads((tmp_path / "badge.json").read_text())["color"] == "red"


def test_changes_are_told_regressions_first(tmp_path: Path) -> None:
    a = written(
        tmp_path / "a",
        result("better", Status.FAIL),
        result("same", Status.PASS),
        result("worse", Status.PASS),
        result("gone", Status.PASS),
    )
    b = written(
        tmp_path / "b",
        result("better", Status.PASS),
        result("same", Status.PASS),
        result("worse", Status.FAIL, "it broke"),
        result("new", Status.FAIL),
    )
    found = changes(a, b)
    assert [(c.case, c.worse) for c in found] == [
        ("worse", True),
        ("gone", True),
        ("better", False),
        ("new", False),
    ]
    assert not any(c.worse for c in changes(a, a))


def test_the_table_of_a_comparison_shows_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ended otherwise, as it was and as it is; what is alike is counted."""
    same, went = result("same", Status.PASS), result("went", Status.PASS)
    written(tmp_path / "a", same, went, result("came", Status.NOT_RUN))
    broken = result("went", Status.FAIL, "it broke")
    written(tmp_path / "b", same, broken, result("came", Status.PASS), result("new", Status.PASS))
    assert show(tmp_path / "a", tmp_path / "b") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["oracle", "->", "oracle"]
    rows = [line.split() for line in lines]
    assert ["case", "A", "B"] in rows
    changed = [row for row in rows if row and row[0] in ("went", "came", "new", "same")]
    assert changed == [
        ["went", "pass", "fail"],
        ["came", "not-run", "pass"],
        ["new", "absent", "pass"],
    ]
    assert lines[-2:] == ["went: it broke", "1 alike, 2 changed, 1 worse"]


@pytest.mark.parametrize("how", ["compare", "--compare"])
def test_comparing_exits_with_1_on_a_regression(how: str, tmp_path: Path) -> None:
    written(tmp_path / "a", result("x", Status.PASS))
    written(tmp_path / "b", result("x", Status.FAIL, "it broke"))
    command = [sys.executable, "-m", "hotbunk.conformance", how]
    pair = [str(tmp_path / "a"), str(tmp_path / "b" / "matrix.json")]
    for names, code in ((pair, 1), (pair[::-1], 0), ([pair[0], str(tmp_path)], 2)):
        done = subprocess.run(
            [*command, *names], check=False, text=True, capture_output=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert ("it broke" in done.stdout) == (code == 1)


def test_what_is_no_matrix_is_said(tmp_path: Path) -> None:
    (tmp_path / "matrix.json").write_text("[]")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no matrix"):
            read_matrix(path)
