"""Results for other programs and other people: everything that ``--out`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from hotbunk.conformance.badge import write_badges
from hotbunk.conformance.case import REGISTRY, CaseResult, Level, Status
from hotbunk.conformance.clauses import clause_of
from hotbunk.conformance.html import write_html
from hotbunk.conformance.matrix import Matrix
from hotbunk.conformance.runner import accepted, write_matrix
from hotbunk.conformance.under_test import BackendUnderTest

JUNIT, MARKDOWN = "junit.xml", "matrix.md"


def write_all(described: BackendUnderTest, matrix: Matrix, directory: Path) -> Path:
    """Into a folder, which is made; the path of ``matrix.json``."""
    path = write_matrix(matrix.cases, directory, **_about(matrix))
    write_junit(matrix.cases, described, directory)
    write_markdown(matrix, directory)
    write_html(matrix, directory)
    write_badges(matrix, directory)
    return path


def _about(matrix: Matrix) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(matrix)
    del said["cases"]
    return said


def write_junit(
    results: Sequence[CaseResult], described: BackendUnderTest, directory: Path
) -> Path:
    """A test case a case, as CI systems read them: what is not accepted is a failure."""
    suite = ET.Element(
        "testsuite",
        name=f"hotbunk.conformance.{described.name}",
        tests=str(len(results)),
        failures=str(sum(_bad(r, described) and r.status is not Status.ERROR for r in results)),
        errors=str(sum(r.status is Status.ERROR for r in results)),
        skipped=str(sum(_skipped(r, described) for r in results)),
        time=f"{sum(r.seconds for r in results):.3f}",
    )
    for result in results:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"{described.name}.{result.level.value}",
            name=result.case,
            time=f"{result.seconds:.3f}",
        )
        detail = _printable(f"{result.status.value}: {result.detail}")
        if result.status is Status.ERROR:
            ET.SubElement(case, "error", message=detail)
        elif _bad(result, described):
            ET.SubElement(case, "failure", message=detail)
        elif _skipped(result, described):
            ET.SubElement(case, "skipped", message=described.expected_not_run[result.case])
    path = directory / JUNIT
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
    return path


def write_markdown(matrix: Matrix, directory: Path) -> Path:
    """A table a level. What is not accepted comes first: seen, promised, and how to see it again."""
    lines = [f"# Conformance of {matrix.title}", ""]
    results = matrix.cases
    for result in matrix.bad():
        lines.append(f"- **{result.case}**: {result.status.value}. {_one_line(result.detail)}")
        if result.case in REGISTRY:
            lines.append(f"  ({_one_line(REGISTRY[result.case].doc)})")
        clause = clause_of(result.case)
        if clause is not None:
            lines.append(f"  The contract ({clause.section}): {_one_line(clause.text)}")
        lines.append(f"  Again: `{matrix.again(result.case)}`")
    for level in Level:
        rows = [result for result in results if result.level is level]
        if not rows:
            continue
        passed = sum(result.status is Status.PASS for result in rows)
        lines += ["", f"## {level.value}: {passed} of {len(rows)} passed", ""]
        lines += ["| case | status | needs | seconds |", "|---|---|---|---:|"]
        lines += [
            f"| `{r.case}` | {r.status.value} | {r.capability} | {r.seconds:.2f} |" for r in rows
        ]
    path = directory / MARKDOWN
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _bad(result: CaseResult, described: BackendUnderTest) -> bool:
    return not accepted(result, described)


def _skipped(result: CaseResult, described: BackendUnderTest) -> bool:
    return result.status is Status.NOT_RUN and accepted(result, described)


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _printable(text: str) -> str:
    """What XML may hold: an engine's error may say anything."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
