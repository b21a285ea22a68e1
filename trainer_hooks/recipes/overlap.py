"""How much generation and training overlap, and how long syncs held generation still."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import msgspec

from hotbunk.trainer_hooks.recipes.recorder import RunRecorder

TRACK = "sync"  # of the timeline: syncs run beside the trainer's own phases


class Shares(msgspec.Struct, frozen=True):
    """Seconds since the last look. ``stalled``: syncs held engines still, as a mean over them."""

    generating: float
    training: float
    both: float
    stalled: float

    @property
    def overlap(self) -> float:
        """The share of the training time during which generation ran; 0 where nothing trained."""
        return self.both / self.training if self.training else 0.0


class Overlap:
    """Adds up seconds as states change. Used on one event loop, and blind to what lies between.

    Generation runs while a request is in flight and some engine may step. That is wall-clock time:
    on few cores both go on, each more slowly.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._requests = 0
        self._still = 0.0  # share of the engines that stand still for a sync
        self._training = False
        self._generated = self._trained = self._both = self._stalled = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """A request is in flight."""
        self._add()
        self._requests += 1
        try:
            yield
        finally:
            self._add()
            self._requests -= 1

    @contextmanager
    def training(self) -> Iterator[None]:
        """The trainer computes."""
        self._add()
        self._training = True
        try:
            yield
        finally:
            self._add()
            self._training = False

    def still(self, share: float) -> None:
        """From now on this share of the engines stands still."""
        self._add()
        self._still = share

    def take(self) -> Shares:
        """Seconds since the last call."""
        self._add()
        shares = Shares(self._generated, self._trained, self._both, self._stalled)
        self._generated = self._trained = self._both = self._stalled = 0.0
        return shares

    def _add(self) -> None:
        now = self._clock()
        seconds, self._at = now - self._at, now
        generates = self._requests > 0 and self._still < 1
        self._generated += seconds * generates
        self._trained += seconds * self._training
        self._both += seconds * (generates and self._training)
        self._stalled += seconds * self._still


class SyncPhases:
    """A manager's observer: its phases on a track of their own, and engines that stand still.

    :param share: which share of the engines is in a sync's transaction (``rolling``).
    """

    def __init__(self, recorder: RunRecorder, overlap: Overlap, share: Callable[[], float]) -> None:
        self._recorder = recorder
        self._overlap = overlap
        self._share = share

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        try:
            with self._recorder.phase(name, track=TRACK):
                yield
        finally:
            # A pause that waits lets requests finish; from its end on nothing runs.
            if name == "pause":
                self._overlap.still(self._share())
            elif name == "wake_kv":
                self._overlap.still(0.0)
