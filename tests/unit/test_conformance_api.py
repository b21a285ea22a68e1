"""What third parties build on in the suite: a change of it is seen, and decided."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

SNAPSHOT = Path(__file__).with_name("conformance_api.txt")
MODULES = ("backends", "case", "rig", "runner", "steps", "transfers", "under_test")


def described(module: ModuleType) -> Iterator[str]:
    for name, found in sorted(vars(module).items()):
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(found):
            yield f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
            yield from (f"    {line}" for line in members(found))
        elif callable(found):
            yield f"{name}{signature(found)}"


def members(found: type) -> Iterator[str]:
    for name, annotation in inspect.get_annotations(found).items():
        if not name.startswith("_"):
            yield f"{name}: {annotation}"
    for name, member in vars(found).items():
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            yield f"{name} -> {inspect.signature(member.fget or len).return_annotation}"
        elif inspect.isfunction(member):
            hook = " (abstract)" if getattr(member, "__isabstractmethod__", False) else ""
            kind = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"{kind}{name}{signature(member)}{hook}"


def signature(of: Any) -> str:
    # Defaults that are objects print their addresses: that there is one is what counts.
    made = inspect.signature(of)
    plain = (int, float, str, bool, bytes, tuple, type(None))
    kept = [
        p
        if p.default is p.empty or isinstance(p.default, plain)
        else p.replace(default=type(p.default).__name__)
        for p in made.parameters.values()
    ]
    return str(made.replace(parameters=kept))


def test_the_public_interface_is_the_one_that_was_decided() -> None:
    lines = []
    for name in MODULES:
        module = import_module(f"hotbunk.conformance.{name}")
        lines += [f"# {module.__name__}", *described(module), ""]
    now = "\n".join(lines)
    assert now == SNAPSHOT.read_text(), (
        f"hotbunk.conformance changed for whoever builds on it. If that is meant, say so in the "
        f"changelog and put this into {SNAPSHOT.name}:\n{now}"
    )
