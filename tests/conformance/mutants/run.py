"""Each mutant against the case that must notice, and against the others if it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec

from hotbunk.conformance.backends.oracle import OracleUnderTest
from hotbunk.conformance.case import REGISTRY, Case, CaseResult, Status, all_cases
from hotbunk.conformance.mutants import Mutant, Patches
from hotbunk.conformance.runner import run_case


class Kill(msgspec.Struct, frozen=True):
    """What became of a mutant: ``case`` is the one that noticed (empty: none did).

    Only the case that is about its fault kills it. Another that stumbles over it does so by luck.
    """

    mutant: str
    breaks: str
    expected: str
    case: str
    detail: str = ""

    @property
    def killed(self) -> bool:
        """Whether the case that was to notice did."""
        return self.case == self.expected


def hunt(mutants: Iterable[Mutant], *, seed: int = 0) -> Iterator[Kill]:
    """Try each. Blocks; virtual time, so a case costs milliseconds.

    A case kills only what it lets live unbroken: one that fails anyhow proves nothing.
    """
    cases = all_cases()
    sound: dict[str, bool] = {}
    for one in mutants:
        expected = REGISTRY[one.killer]
        found = Kill(one.name, one.breaks, one.killer, "", "no case noticed")
        for case in [expected, *(c for c in cases if c is not expected)]:
            with Patches() as patches:
                one.apply(patches)
                result = _try(case, one, seed)
            if result.status not in (Status.FAIL, Status.ERROR):
                continue
            key = f"{case.name} {sorted(one.options.items())}"
            if key not in sound:
                sound[key] = _try(case, one, seed).status not in (Status.FAIL, Status.ERROR)
            if sound[key]:
                found = Kill(one.name, one.breaks, one.killer, case.name, result.detail)
                break
        yield found


def _try(case: Case, one: Mutant, seed: int) -> CaseResult:
    under_test = OracleUnderTest(**one.options)
    with asyncio.Runner(loop_factory=under_test.loop_factory) as runner:
        return runner.run(run_case(case, under_test, seed))
