"""The suite under pytest: ``pytest -p hotbunk.conformance.plugin --pyargs hotbunk.conformance``.

Not registered as an entry point: it would load into every pytest run of the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbunk.conformance.case import Case, CaseResult, Level, Status, all_cases
from hotbunk.conformance.command import described, level_of
from hotbunk.conformance.runner import Session, accepted
from hotbunk.conformance.under_test import BackendUnderTest
from hotbunk.rollout.errors import UsageError
from hotbunk.rollout.options import parse_settings

_HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """The same words as on the command line."""
    group = parser.getgroup("hotbunk conformance")
    group.addoption("--backend", help="what to try: oracle, reference, vllm, or a package's")
    group.addoption("--level", default="all", help=f"one of {', '.join(Level)}")
    group.addoption("--seed", type=int, default=0, help="of what the cases draw")
    group.addoption("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")


def pytest_configure(config: pytest.Config) -> None:
    """:raises UsageError: no backend was named, or it cannot be described."""
    if not config.getoption("--backend"):
        raise pytest.UsageError("which backend? --backend NAME")
    try:
        level_of(config.getoption("--level"))
        options = parse_settings(config.getoption("settings"))
        config.stash[_DESCRIBED] = described(config.getoption("--backend"), options)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last case is over."""
    if (found := config.stash.get(_DESCRIBED, None)) is not None:
        found.close()


_DESCRIBED = pytest.StashKey[BackendUnderTest]()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The cases stand in this file's place; the other modules here hold no tests."""
    if file_path.parent.resolve() == _HERE.resolve() and file_path.name == Path(__file__).name:
        made: pytest.Collector = Cases.from_parent(parent, path=file_path)
        return made
    return None


class Cases(pytest.File):
    """All cases of the level, run one after another in one session."""

    session_of_cases: Session

    def collect(self) -> Iterator[pytest.Item]:
        """In the registry's order."""
        for one in all_cases(level_of(self.config.getoption("--level"))):
            yield CaseItem.from_parent(self, name=one.name, one=one)

    def setup(self) -> None:
        self.session_of_cases = Session(self.config.stash[_DESCRIBED])
        self.session_of_cases.__enter__()

    def teardown(self) -> None:
        self.session_of_cases.__exit__(None, None, None)


class NotConformant(Exception):
    """A case failed; its result says how."""

    def __init__(self, result: CaseResult) -> None:
        super().__init__(f"{result.status.value}: {result.detail}")


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, one: Case, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self._one = one

    def runtest(self) -> None:
        parent = self.parent
        assert isinstance(parent, Cases)
        result = parent.session_of_cases.run(self._one, self.config.getoption("--seed"))
        self.user_properties.append(("status", result.status.value))
        described_as = self.config.stash[_DESCRIBED]
        if not accepted(result, described_as):
            raise NotConformant(result)
        if result.status is Status.NOT_RUN:
            pytest.skip(described_as.expected_not_run[result.case])

    def repr_failure(
        self,
        excinfo: pytest.ExceptionInfo[BaseException],
        style: object = None,
    ) -> str:
        if isinstance(excinfo.value, NotConformant):
            return f"{self._one.doc}\n{excinfo.value}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self._one.name
