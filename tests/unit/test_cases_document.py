"""docs/cases.md: every row is there, and every test it names is, and says which row it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "cases.md"
WIRE = {  # over the wire, or why not
    "C": (1, 2, 3, 4, 6, 7, 9),
    "H": (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 19, 20, 21, 22),
    "V": (1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16),
}
REST = {
    "M": (1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 14, 16, 17, 19),
    "G": (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 23, 24),
    "K": (1, 2, 3, 5, 6, 8),
    "B": (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 16, 17, 19, 20),
    "N": (1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 14),
    "L": (1, 2, 3, 5, 7, 8),
}
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[str, list[str]]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| [A-Z]\d", line)]
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
    both = [*WIRE.items(), *REST.items()]
    assert list(rows()) == [f"{kind}{n}" for kind, numbers in both for n in numbers]


@pytest.mark.parametrize("case", list(rows()))
def test_its_tests_are_there_and_name_it(case: str) -> None:
    told = rows()[case][1:]
    assert len(told) == (2 if case[0] in WIRE else 1)
    assert told[0], "neither a test over the wire nor a reason"
    named = [one for cell in told for one in NAMED.findall(cell)]
    assert named
    for file, name in named:
        said = text_of(file, name)
        assert re.search(rf"(?i)(?<![a-z0-9]){case}(?![0-9])", said), f"{name} is not for {case}"
