"""Doing something when a module has been loaded, without loading it.

verl's registries live in modules that take seconds to import. A plugin that imported them would
make every ``import verl`` pay; so it waits until verl does.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Looks for a module where everybody does, and adds what is to be done after it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Act]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        acts = self.waiting.pop(name)  # the search below comes by here again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.waiting[name] = acts
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, and what is to be done when it has loaded it."""

    def __init__(self, inner: Any, finder: _Finder) -> None:
        self._inner = inner
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        for act in self._finder.waiting.pop(module.__name__, ()):
            act()


_finder = _Finder()


def when_loaded(module: str, act: Act) -> None:
    """Call ``act`` once ``module`` has been imported: now, if it has been.

    Nothing is imported, and no import of anything else is touched. A module that fails to import
    keeps its acts for the next try.
    """
    if module in sys.modules:
        act()
        return
    _finder.waiting.setdefault(module, []).append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
