"""The trainer's ranks around a sync: one leads, the others gather with it and let go with it.

A sync is driven by one rank (0). Gathering sharded weights takes part of all, and no KV cache may
be mapped before all have let go. The leader *tells*, the others *hear*; both are bounded in time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from hotbunk.rollout.contract import TensorSpec
from hotbunk.rollout.errors import (
    DeadlineExceeded,
    HotbunkError,
    SessionError,
    TrainerFailed,
    UsageError,
)

_HERE = "here"
_SPECS = "specs"
_NEXT = "next"
_CLOSE = "close"
_MOMENT = 1.0  # seconds; who is in a step that long after the transport's end hangs
_LET_GO = "let go"
log = logging.getLogger(__name__)
T = TypeVar("T")
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
    the way of a sync's control. What all have read is deleted from it.

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
        self._told: list[str] = []  # keys that some may not have read yet
        self._passed = ""  # our key of the last barrier

    def tell(self, word: str) -> None:
        key = f"{self._prefix}/word/{next(self._words)}"
        self._store.set(key, word)
        self._told.append(key)

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
        # All have heard what was said before, and have left the barrier before this one.
        told, self._told = self._told, []
        passed, self._passed = self._passed, f"{here}/{self.rank}"
        for key in (*told, *filter(None, [passed])):
            self._store.delete_key(key)

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
    """The leader's use of its sources: each step is announced, and made by all ranks together.

    Sharded tensors are gathered by all at once. Step by step, nobody is in a gather without the
    leader, however early a walk ends; and two walks at once gather in one order everywhere.
    """

    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks
        self._walks: list[_LedWalk] = []
        self._stepping = threading.Lock()
        self._telling = threading.Lock()  # never held in a gather, which may hang
        self._over = False

    def source(self, number: int, inner: WeightSource) -> LedSource:
        """``inner``, through which all ranks step with the leader as the sync's source ``number``."""
        return LedSource(self, number, inner)

    def walk(self, number: int, inner: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """One more walk, of the source ``number``."""
        self._walks.append(_LedWalk(self, f"{len(self._walks)} {number}", inner))
        return self._walks[-1]

    def step(self, word: str, make: Callable[[], T]) -> T:
        """``make()``, together with the others.

        :raises SessionError: the sync is over, and nobody steps with us.
        """
        with self._stepping:
            self._tell(word)
            return make()

    def let_go(self) -> None:
        """No more walks, and all others let go now."""
        self._close()
        self._tell(_LET_GO)

    def end(self, word: str) -> None:
        """The others' last word of this sync, also where a source still hangs."""
        try:
            self._close()
        finally:
            self._tell(word, last=True)

    def _close(self) -> None:
        """End, on all ranks, the walks that were cut off: they may have to put something back."""
        if not self._stepping.acquire(timeout=_MOMENT):
            log.error("the source of a sync still hangs; other trainer ranks may, too")
            return
        try:
            walks, self._walks = self._walks, []
            for walk in walks:
                if not walk.ended:
                    self._tell(f"{_CLOSE} {walk.name}")
                    _close(walk.inner)
        finally:
            self._stepping.release()

    def _tell(self, word: str, *, last: bool = False) -> None:
        with self._telling:
            if self._over:
                raise SessionError("the sync that this source was walked for is over")
            self._over = last
            self._ranks.tell(word)

    async def meet(self, name: str) -> None:
        """Every rank is here. See :meth:`TrainerRanks.barrier`."""
        await meet(self._ranks, name)


class LedSource:
    """See :meth:`Led.source`. What it has is asked once a sync."""

    def __init__(self, led: Led, number: int, inner: WeightSource) -> None:
        self._led = led
        self._number = number
        self._inner = inner
        self._specs: tuple[TensorSpec, ...] | None = None
        self._failure: Exception | None = None

    async def ask(self, deadline: float) -> None:
        """What it has, asked in a thread: it may have to gather. A failure is raised by ``specs``."""
        try:
            async with asyncio.timeout(deadline):
                self._specs = await asyncio.to_thread(self._ask)
        except TimeoutError:
            self._failure = DeadlineExceeded("what the source has", deadline)
        # A boundary: trainers raise what their own libraries raise.
        except Exception as error:  # noqa: BLE001
            self._failure = error

    def specs(self) -> tuple[TensorSpec, ...]:
        if self._failure is not None:
            raise self._failure
        if self._specs is None:
            self._specs = self._ask()
        return self._specs

    def tensors(self) -> Iterator[torch.Tensor]:
        return self._led.walk(self._number, self._inner.tensors())

    def _ask(self) -> tuple[TensorSpec, ...]:
        return self._led.step(f"{_SPECS} {self._number}", self._inner.specs)


class _LedWalk:
    """A walk whose every step the others make, too."""

    def __init__(self, led: Led, name: str, inner: Iterator[torch.Tensor]) -> None:
        self.name = name
        self.inner = inner
        self.ended = False
        self._led = led

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        try:
            return self._led.step(f"{_NEXT} {self.name}", self.inner.__next__)
        except BaseException:
            self.ended = True
            raise


def _close(walk: Iterator[torch.Tensor]) -> None:
    """End a walk where it is."""
    if isinstance(walk, Generator):
        walk.close()


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
        await asyncio.to_thread(led.let_go)
        if let_go is not None:
            await let_go()
        await led.meet(_LET_GO)

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
    """Step through the sources as the leader does; its first other word."""
    walks: dict[str, Iterator[torch.Tensor]] = {}
    while True:
        word = ranks.hear()
        match word.split():
            case [verb, number] if verb == _SPECS:
                sources[int(number)].specs()
            case [verb, walk, number] if verb == _NEXT:
                if walk not in walks:
                    walks[walk] = sources[int(number)].tensors()
                next(walks[walk], None)
            case [verb, walk, _] if verb == _CLOSE:
                if walk in walks:
                    _close(walks.pop(walk))
            case _:
                return word
