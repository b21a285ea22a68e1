"""Groups of responses between their start and their training: how many there may be, how old.

No torch, no engine, no clock: numbers only, all changed on one event loop, so that what
:meth:`Replay.snapshot` says is true of one moment.

The rule, in groups, for batches of B groups and a limit S (``max_staleness``)::

    room = (1 + S - (step - served)) * B - (running + ready)

``step`` is the number of the batch taken next, and so the version it will train; ``served`` is the
step of the version that engines serve. A group that starts when n others are under way is trained
at step + n // B at the earliest and first in, first out also at the latest; the rule is that it is
then at most S steps old. It is AReaL's capacity rule (Fu et al., 2025) in levels instead of running
totals, so a run that goes on from step 50 counts from 50.

First in, first out does not hold for a group that takes long. If nothing else is said (overdue
``drop``), one with a token too old for the next batch is left out, or cut off while it still runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import SessionError
from hotbunk.rollout.partial import PartialResult
from hotbunk.trainer_hooks.recipes.config import Overdue
from hotbunk.trainer_hooks.recipes.tasks import Sample


def steps_behind(version: Version, now: Version) -> int:
    """How many steps ``version`` is behind ``now``.

    :raises SessionError: it is ahead, or of another incarnation: nobody may train on that.
    """
    if version.incarnation != now.incarnation or version > now:
        raise SessionError(f"a token of version {version} cannot be trained at version {now}")
    return now.step - version.step


@dataclass(eq=False)
class Group:
    """The responses to one prompt; ``versions`` has the oldest version in each that has begun."""

    number: int
    sample: Sample
    prompt: Sequence[int]
    versions: dict[str, Version] = field(default_factory=dict)
    tokens: int = 0  # that engines have made for it
    results: Sequence[PartialResult] = ()
    rewards: Sequence[float] = ()

    @property
    def oldest(self) -> Version | None:
        """The oldest version that has made a token of it."""
        return min(self.versions.values(), default=None)


class Counts(msgspec.Struct):
    """What happened, in numbers that only grow."""

    tokens: int = 0  # made by engines
    tokens_lost: int = 0  # made, and thrown away because a sync or a lost replica came
    tokens_resent: int = 0  # of contexts that a continuation had computed again
    tokens_switched: int = 0  # of contexts under which the weights were switched
    tokens_overdue: int = 0  # of groups left out for their age
    overdue_groups: int = 0  # finished, then left out
    cut_groups: int = 0  # cut off while they ran, because they would be left out
    failed_groups: int = 0  # a response was not finished
    continuations: int = 0
    trained_groups: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """One moment: growth of the counts since the last one, and levels."""

    grown: Mapping[str, int]
    in_flight: int  # groups being generated
    backlog: int  # groups that wait to be trained


@dataclass(eq=False)
class Replay:
    """See the module. ``now`` is the version that the next batch trains.

    :param batch: groups a step.
    :param limit: ``max_staleness``.
    """

    batch: int
    limit: int
    now: Version
    served: Version
    overdue: Overdue = Overdue.DROP
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._running: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._told = Counts()
        self._changed = asyncio.Event()

    # -- how many may start -------------------------------------------------------------------

    def room(self) -> int:
        """How many groups may start now; never below 0."""
        ahead = 1 + self.limit - (self.now.step - self.served.step)
        return max(0, ahead * self.batch - len(self._running) - len(self._ready))

    def sent(self, version: Version) -> None:
        """Engines serve ``version`` from now on."""
        self.served = max(self.served, version)
        self.wake()

    # -- a group's way ------------------------------------------------------------------------

    def start(self, group: Group) -> None:
        """It is being generated. :raises SessionError: there is no room for it."""
        if not self.room():
            raise SessionError(f"group {group.number} was started where no room is")
        self._running[group.number] = group

    def finish(self, group: Group) -> None:
        """Its responses are whole, with rewards."""
        del self._running[group.number]
        self._ready[group.number] = group
        self._drop_overdue()
        self.wake()

    def fail(self, group: Group) -> None:
        """It is given up: a response of it was not finished."""
        del self._running[group.number]
        self.counts.failed_groups += 1
        self.counts.tokens_lost += group.tokens
        self.wake()

    def cut(self, group: Group) -> None:
        """It was cut off, because :meth:`doomed` named it."""
        del self._running[group.number]
        self.counts.cut_groups += 1
        self.counts.tokens_overdue += group.tokens
        self.wake()

    def take(self) -> list[Group] | None:
        """The next batch, oldest groups first; None: there is none yet. ``now`` moves on.

        With overdue ``drop``, no token in it is more than ``limit`` steps behind ``now``.
        """
        if len(self._ready) < self.batch:
            return None
        taken = [self._ready.pop(number) for number in sorted(self._ready)[: self.batch]]
        self.counts.trained_groups += len(taken)
        self.now = Version(self.now.incarnation, self.now.step + 1)
        self._drop_overdue()
        self.wake()
        return taken

    def doomed(self) -> list[Group]:
        """Groups that run and can only be left out: their tokens are too old for the next batch."""
        return [group for group in self._running.values() if self._is_overdue(group)]

    def _is_overdue(self, group: Group) -> bool:
        if self.overdue is not Overdue.DROP or group.oldest is None:
            return False
        return steps_behind(group.oldest, self.now) > self.limit

    def _drop_overdue(self) -> None:
        for group in [group for group in self._ready.values() if self._is_overdue(group)]:
            del self._ready[group.number]
            self.counts.overdue_groups += 1
            self.counts.tokens_overdue += group.tokens

    # -- looking, and waiting -----------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What is true now."""
        now = msgspec.structs.asdict(self.counts)
        before = msgspec.structs.asdict(self._told)
        self._told = msgspec.structs.replace(self.counts)
        grown = {name: count - before[name] for name, count in now.items()}
        return Snapshot(grown, len(self._running), len(self._ready))

    def describe(self) -> str:
        """Where groups are, for an error."""
        unscored = sum(1 for group in self._running.values() if group.results)
        return (
            f"{len(self._running)} groups are in flight ({unscored} of them wait for their rewards), "
            f"{len(self._ready)} are ready, {self.batch} make a batch; {self.counts.failed_groups} "
            f"failed; version {self.served} is served, and {self.now} is trained next"
        )

    def wake(self) -> None:
        """Something changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, seconds: float) -> None:
        """Wait for a change, so long at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def staleness_counts(groups: Sequence[Group], now: Version) -> Counter[int]:
    """Tokens by how many steps their version is behind ``now``.

    :raises SessionError: see :func:`steps_behind`; or spans that do not cover a response.
    """
    found: Counter[int] = Counter()
    for group in groups:
        for result in group.results:
            end = 0
            for span in result.completion.spans:
                if span.start != end:
                    break
                end = span.end
                found[steps_behind(span.version, now)] += span.end - span.start
            if end != len(result.completion.token_ids):
                raise SessionError(
                    f"request {result.completion.request_id!r} does not say which version made "
                    "each of its tokens"
                )
    return found


def percentile(counts: Mapping[int, int], share: float) -> int:
    """The least value that at least ``share`` (0 to 1) of the counted do not exceed."""
    left = share * sum(counts.values())
    for value in sorted(counts):
        left -= counts[value]
        if left <= 1e-9:
            return value
    return max(counts, default=0)
