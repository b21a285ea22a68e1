"""The trainer's ranks around a sync: one leads, the others gather with it and let go with it.

A sync is driven by one rank (0). Gathering sharded weights takes part of all, and no KV cache may
be mapped before all have let go. The leader *tells*, the others *hear*; both are bounded in time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hotbunk.rollout.contract import TensorSpec
from hotbunk.rollout.errors import DeadlineExceeded, HotbunkError, TrainerFailed, UsageError

log = logging.getLogger(__name__)
_HERE = "here"
_WALK = "walk "
_LET_GO = "let go"
LetGo = Callable[[], Awaitable[None]]

if TYPE_CHECKING:
    import torch

    from hotbunk.checkpoint_engine.source import WeightSource


class TrainerRanks(ABC):
    """What the ranks of one trainer need of each other. Calls block; use them off an event loop."""

    rank: int
    world: int

    @property
    def leads(self) -> bool:
        """Whether this rank drives the sync."""
        return self.rank == 0

    @abstractmethod
    def tell(self, word: str) -> None:
        """The leader's next word to all others."""

    @abstractmethod
    def hear(self) -> str:
        """The leader's next word.

        :raises DeadlineExceeded: it said nothing in time.
        """

    @abstractmethod
    def barrier(self, name: str) -> None:
        """Return when all ranks are here.

        :raises DeadlineExceeded: some did not come in time; says which.
        :raises TrainerFailed: some came only to say that they failed.
        """

    @abstractmethod
    def fail(self, why: str) -> None:
        """Tell the others, at their next barrier, that this rank takes no further part."""


class OneRank(TrainerRanks):
    """A trainer of one process."""

    rank, world = 0, 1

    def tell(self, word: str) -> None:
        """Nobody listens."""

    def hear(self) -> str:
        raise UsageError("a trainer of one rank has no leader but itself")

    def barrier(self, name: str) -> None:
        """All are here."""

    def fail(self, why: str) -> None:
        """Nobody is waiting."""


class StoreRanks(TrainerRanks):
    """Ranks that share a ``torch.distributed`` store (``TCPStore``, ``FileStore``, ``HashStore``).

    A store holds nobody up and needs no process group, so a trainer's own collectives are never in
    the way of a sync's control.

    :param deadline: seconds that any wait may take.
    """

    def __init__(
        self, store: Any, rank: int, world: int, *, deadline: float = 600.0, prefix: str = "hotbunk"
    ) -> None:
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} of {world} ranks")
        self.rank, self.world = rank, world
        self._store = store
        self._deadline = deadline
        self._prefix = prefix
        self._words = itertools.count()
        self._barriers = itertools.count()

    def tell(self, word: str) -> None:
        self._store.set(f"{self._prefix}/word/{next(self._words)}", word)

    def hear(self) -> str:
        key = f"{self._prefix}/word/{next(self._words)}"
        self._wait([key], "the word of trainer rank 0")
        return bytes(self._store.get(key)).decode()

    def barrier(self, name: str) -> None:
        here = self._arrive(_HERE)
        for rank in range(self.world):
            key = f"{here}/{rank}"
            self._wait([key], f"trainer rank {rank} at {name!r}")
            said = bytes(self._store.get(key)).decode()
            if said != _HERE:
                raise TrainerFailed(said, where=f"trainer rank {rank} before {name!r}")

    def fail(self, why: str) -> None:
        self._arrive(why or "it failed")

    def _arrive(self, word: str) -> str:
        here = f"{self._prefix}/barrier/{next(self._barriers)}"
        self._store.set(f"{here}/{self.rank}", word)
        return here

    def _wait(self, keys: list[str], what: str) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._deadline))
        except RuntimeError as error:  # torch's DistStoreError and timeouts
            raise DeadlineExceeded(
                what, self._deadline, remedy="that rank is hung, dead or another way in its loop"
            ) from error


class Led:
    """The leader's walks over its sources: each is announced, and walked to its end with the others.

    Sharded tensors are gathered together; a walk that one rank left half-way would leave the others
    in a collective for ever.
    """

    def __init__(self, ranks: TrainerRanks) -> None:
        self.ranks = ranks
        self.walks: list[Iterator[torch.Tensor]] = []

    def source(self, number: int, inner: WeightSource) -> WeightSource:
        """``inner``, whose walks the followers hear of as the sync's source ``number``."""
        return _LedSource(self, number, inner)

    def finish(self) -> None:
        """Walk what is left of every walk; nothing is left of one that raised."""
        walks, self.walks = self.walks, []
        for walk in walks:
            try:
                for _ in walk:
                    pass
            except ValueError:  # a thread still is inside it: the source hangs
                log.exception("the source of a sync still hangs; other trainer ranks may, too")


class _LedSource:
    def __init__(self, led: Led, number: int, inner: WeightSource) -> None:
        self._led = led
        self._number = number
        self._inner = inner

    def specs(self) -> tuple[TensorSpec, ...]:
        return self._inner.specs()

    def tensors(self) -> Iterator[torch.Tensor]:
        self._led.ranks.tell(f"{_WALK}{self._number}")
        walk = self._inner.tensors()
        self._led.walks.append(walk)
        return walk


def trainer_failed(error: Exception) -> TrainerFailed:
    """A trainer's own exception as ours, with its traceback."""
    return TrainerFailed(
        f"{type(error).__name__}: {error}",
        remote_traceback="".join(traceback.format_exception(error)),
    )


async def meet(ranks: TrainerRanks, name: str) -> None:
    """Every rank is here. See :meth:`TrainerRanks.barrier`."""
    if ranks.world > 1:
        await asyncio.to_thread(ranks.barrier, name)


def together(led: Led, let_go: LetGo | None) -> LetGo:
    """The trainer's letting go, on all its ranks, as the leader does it."""

    async def all_of_them() -> None:
        await asyncio.to_thread(led.finish)
        await asyncio.to_thread(led.ranks.tell, _LET_GO)
        if let_go is not None:
            await let_go()
        await meet(led.ranks, _LET_GO)

    return all_of_them


async def follow(
    sources: Sequence[WeightSource], ranks: TrainerRanks, let_go: LetGo | None
) -> None:
    """A follower's part of a sync: gather with the leader, let go with it.

    :raises TrainerFailed: this rank could not gather or let go, or the leader's sync was stopped.
    """
    try:
        word = await asyncio.to_thread(_gather, sources, ranks)
        if word == _LET_GO and let_go is not None:
            await let_go()
    except HotbunkError as error:
        ranks.fail(str(error))
        raise
    # A boundary: trainers raise what their own libraries raise.
    except Exception as error:
        ranks.fail(f"{type(error).__name__}: {error}")
        raise trainer_failed(error) from error
    if word == _LET_GO:
        await meet(ranks, _LET_GO)
        word = await asyncio.to_thread(_gather, sources, ranks)
    if word != "ended":
        raise TrainerFailed(f"the sync led by trainer rank 0 {word}")


def _gather(sources: Sequence[WeightSource], ranks: TrainerRanks) -> str:
    """Gather whenever the leader does; its first other word."""
    while (word := ranks.hear()).startswith(_WALK):
        for _ in sources[int(word.removeprefix(_WALK))].tensors():
            pass
    return word
