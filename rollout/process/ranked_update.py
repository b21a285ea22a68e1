"""One update of all ranks: opened in each, accepted by all, committed by all, or by none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from hotbunk.rollout.contract import (
    ArenaHandle,
    Bucket,
    Manifest,
    ReceiverLayout,
    Ticket,
    Transfer,
    UpdateReport,
)
from hotbunk.rollout.errors import (
    HotbunkError,
    SessionError,
    TransferFailed,
    UpdateFailed,
    UpdateRefused,
    VerifyFailed,
)
from hotbunk.rollout.process.grid import DIFFERENT, Grid, check_union, union_of, wanted_of
from hotbunk.rollout.process.messages import Ask
from hotbunk.rollout.process.rank import ACCEPT, COMMIT, WRITE, Rank
from hotbunk.rollout.process.verbs import OpenUpdate, RankUpdate, Reason

_numbers = itertools.count(1)


class RankedTransfer(Transfer):
    """What the replica sees of it: a transfer whose bytes the ranks take themselves.

    Its one bucket is empty, and comes when a rank is about to write: the dirty mark is set, and then
    that rank is told to go on. Ranks wait for this mark and not for one another, since one may get
    its first bytes when another has got all of its own. ``reports`` has one entry a rank once it has committed; ``wanted`` how many of the
    offered tensors each takes a part of.
    """

    def __init__(self, ranks: Sequence[Rank], grid: Grid, manifest: Manifest) -> None:
        self.manifest = manifest
        self.reports: list[UpdateReport] = []
        self.wanted = [len(manifest.tensors)] * grid.size
        self._ranks = ranks
        self._grid = grid
        self._updates: list[asyncio.Task[UpdateReport]] = []
        self._asked: dict[int, Ask] = {}  # by rank: who stands at a barrier
        self._begun = self._over = False
        self._writes, self._marked = asyncio.Event(), asyncio.Event()
        self._number = next(_numbers)

    @staticmethod
    async def open(ranks: Sequence[Rank], grid: Grid, ticket: Ticket) -> RankedTransfer:
        """Each rank opens its own end.

        :raises SessionError: the ticket is for another number of ranks.
        :raises TransferFailed: an end cannot be opened, or they do not belong together.
        """
        if ticket.ranks != len(ranks) and not ticket.published:
            raise SessionError(
                f"the offer is for {ticket.ranks} rank(s) and there are {len(ranks)}"
            )
        tickets = [
            # Of what is published each reads alone: the barriers here are what they have in common.
            ticket if ticket.published else msgspec.structs.replace(ticket, rank=number)
            for number in range(len(ranks))
        ]
        opening = [
            asyncio.ensure_future(rank.call("open_update", OpenUpdate(its)))
            for rank, its in zip(ranks, tickets, strict=True)
        ]
        answers = await asyncio.gather(*opening, return_exceptions=True)
        manifests = [answer for answer in answers if isinstance(answer, Manifest)]
        try:
            for number, answer in enumerate(answers):
                if isinstance(answer, BaseException):
                    raise _at(number, answer)
                if answer != manifests[0]:
                    raise TransferFailed(f"rank {number} was offered something else than rank 0")
        except BaseException as error:
            await _given_up(ranks, error)
            raise
        return RankedTransfer(ranks, grid, manifests[0])

    async def accept(self, layout: ReceiverLayout | None, arena: ArenaHandle | None = None) -> bool:
        self._begun = True
        args = RankUpdate(self._number, self.manifest.version, self.manifest.scope)
        self._updates = [
            asyncio.create_task(rank.call("update_weights", args)) for rank in self._ranks
        ]
        await self._all_at(ACCEPT)
        if self._grid.shards > 1:
            layouts = [self._asked[number].layout for number in range(self._grid.size)]
            for copy in self._grid.copies():
                check_union(self.manifest, [layouts[number] for number in copy])
            self.wanted = [wanted_of(self.manifest, layout) for layout in layouts]
        return False

    async def buckets(self) -> AsyncIterator[Bucket]:
        self._go()
        arriving = asyncio.create_task(self._all_at(COMMIT))
        writing = asyncio.create_task(self._writes.wait())
        try:
            await asyncio.wait({arriving, writing}, return_when=asyncio.FIRST_COMPLETED)
            if self._writes.is_set():
                yield Bucket(b"", ())
                self._marked.set()
            await arriving
        finally:
            writing.cancel()
            arriving.cancel()
            await asyncio.gather(arriving, writing, return_exceptions=True)

    async def fingerprints(self) -> Mapping[str, int]:
        """Of whole tensors, of all ranks together.

        :raises VerifyFailed: two ranks, or two copies of the model, were sent different contents.
        """
        expected: dict[str, int] = {}
        for copy in self._grid.copies():
            asked = [self._asked[number] for number in copy]
            found = union_of([a.fingerprints for a in asked], [a.slices for a in asked])
            differing = {
                name
                for name, value in found.items()
                if expected.setdefault(name, value) != value or value == DIFFERENT
            }
            if differing:
                raise VerifyFailed(differing, where="ranks were sent different contents")
        return expected

    async def commit(self) -> None:
        self._go()
        done = await asyncio.gather(*self._updates, return_exceptions=True)
        for number, report in enumerate(done):
            if isinstance(report, BaseException):
                raise _at(number, report)
            self.reports.append(report)
        self._over = True

    async def decline(self) -> None:
        self._over = True
        await asyncio.gather(*(rank.call("decline_update") for rank in self._ranks))

    async def abort(self, error: BaseException) -> None:
        """End it in every rank: a rank at a barrier is told why, another is cancelled."""
        if self._over:
            return
        self._over = True
        if not self._begun:
            await _given_up(self._ranks, error)
            return
        before = UpdateRefused if self._stage(ACCEPT) else UpdateFailed
        for number, update in enumerate(self._updates):
            if number in self._asked:
                told = before(f"another rank ended the update: {error}")
                self._ranks[number].go(self._asked[number], told)
            else:
                update.cancel()
        self._asked.clear()
        await asyncio.gather(*self._updates, return_exceptions=True)

    def _stage(self, step: str) -> bool:
        return any(asked.step == step for asked in self._asked.values())

    def _go(self) -> None:
        asked, self._asked = self._asked, {}
        for number, ask in asked.items():
            self._ranks[number].go(ask)

    async def _all_at(self, step: str) -> None:
        """Until every rank stands at that barrier. :raises HotbunkError: what a rank met first."""
        reaching = {
            asyncio.create_task(self._reach(number, step)): number
            for number in range(len(self._ranks))
        }
        left = set(reaching)
        try:
            while left:
                # A rank that has reached the barrier may still die there.
                await asyncio.wait({*left, *self._updates}, return_when=asyncio.FIRST_COMPLETED)
                for number, update in enumerate(self._updates):
                    if update.done():
                        raise _at(number, update.exception() or _early(step))
                for task in [task for task in left if task.done()]:
                    left.discard(task)
                    if (error := task.exception()) is not None:
                        raise _at(reaching[task], error)
        finally:
            for task in left:
                task.cancel()

    async def _reach(self, number: int, step: str) -> None:
        asked = await self._ranks[number].at_barrier(self._number)
        if asked.step == WRITE and step == COMMIT:
            self._asked[number] = asked
            self._writes.set()
            await self._marked.wait()
            self._ranks[number].go(self._asked.pop(number))
            asked = await self._ranks[number].at_barrier(self._number)
        if asked.step != step:
            raise SessionError(f"the update stands at {asked.step} and not at {step}")
        self._asked[number] = asked


async def _given_up(ranks: Sequence[Rank], error: BaseException) -> None:
    """What was opened and not begun ends in every rank."""
    reason = Reason(f"{type(error).__name__}: {error}")
    ends = [asyncio.ensure_future(rank.call("abort_update", reason)) for rank in ranks]
    await asyncio.gather(*ends, return_exceptions=True)


def _early(step: str) -> HotbunkError:
    return SessionError(f"the update ended before its {step}")


def _at(number: int, error: BaseException) -> BaseException:
    return error.at(f"rank {number}") if isinstance(error, HotbunkError) else error
