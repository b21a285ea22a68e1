"""docs/cases.md: every row is there, and every test it names is, and says which row it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "cases.md"
ROWS = {
    "C": (1, 2, 3, 4, 6, 7, 9),
    "H": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 19, 20, 21, 22),
    "V": (1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16),
}
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[str, list[str]]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| [CHV]\d", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def text_of(file: str, name: str) -> str:
    """A test's name and everything that is said about it: its docstring, and its module's."""
    inside = file.startswith(("unit/", "conformance/"))
    tree = ast.parse((TESTS / ("" if inside else "integration") / file).read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return f"{name} {ast.get_docstring(node) or ''} {ast.get_docstring(tree) or ''}"
    raise AssertionError(f"{file} has no {name}")


def test_every_row_is_there() -> None:
    assert list(rows()) == [f"{kind}{n}" for kind, numbers in ROWS.items() for n in numbers]


@pytest.mark.parametrize("case", list(rows()))
def test_its_tests_are_there_and_name_it(case: str) -> None:
    _, wire, elsewhere = rows()[case]
    assert wire, "neither a test over the wire nor a reason"
    named = NAMED.findall(wire) + NAMED.findall(elsewhere)
    assert named
    for file, name in named:
        said = text_of(file, name)
        assert re.search(rf"(?i)(?<![a-z0-9]){case}(?![0-9])", said), f"{name} is not for {case}"
