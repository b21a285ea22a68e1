"""What a backend brings to the suite: an engine, weights, and knowledge from elsewhere.

A third party derives one class and needs nothing else::

    class MyEngine(BackendUnderTest):
        name = "mine"
        prompts = ((1, 2, 3), (4, 5, 6))
        async def start(self): ...

The suite never verifies an engine with itself: goldens, weights and memory figures come from here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from hotbunk.conformance.steps import Steps, StepsHere
from hotbunk.rollout.contract import Engine, Tag, TensorSpec
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines

Tensors = list[tuple[TensorSpec, bytes]]

UPDATE_POINTS = ("accept", "bucket", "post_load", "verify", "commit", "label")
"""Inside an update, in order; from ``bucket`` on the old content is gone."""

MEMORY_POINTS = ("release", "resume")
"""Inside the memory verbs, where something has happened already."""


class BackendUnderTest(ABC):
    """One backend, as the suite needs to see it. Class attributes are hints with defaults.

    Versions are small integers here: the suite labels the weights of ``n`` with ``Version(0, n)``,
    and a fresh engine holds at most version 0.
    """

    name: ClassVar[str]
    """How the backend is called in reports."""

    prompts: ClassVar[tuple[tuple[int, ...], ...]]
    """At least three prompts, of 9 tokens or more, none a prefix of another."""

    tokens: ClassVar[int] = 8
    """Response tokens in a short request."""

    long_tokens: ClassVar[int] = 64
    """Response tokens in a request that is to be caught in the middle."""

    endless_tokens: int = 0
    """Response tokens in a request that a case ends itself; 0: ``long_tokens``.

    So many that the engine cannot be through with them while a call is on its way to it, on a machine
    that does other things, too: how fast it makes tokens is its own.
    """

    bucket_sizes: ClassVar[tuple[int, ...]] = (1 << 20, (64 << 10) + 1)
    """Bucket sizes in bytes to send weights with; the first is used where it does not matter."""

    deadlines: ClassVar[Deadlines] = Deadlines(
        hold=3.0, drain=20.0, memory=20.0, update=20.0, inspect=2.0, grace=2.0
    )
    """Deadlines for the replica, in seconds of the loop's time."""

    moment: ClassVar[float] = 0.2
    """Seconds in which an engine that can make a token has made one."""

    case_deadline: ClassVar[float] = 120.0
    """Seconds one case may take, of the loop's time."""

    loop_factory: ClassVar[type[asyncio.AbstractEventLoop] | None] = None
    """The event loop to run cases on; None is asyncio's own."""

    one_loop: ClassVar[bool] = False
    """Whether all cases share one event loop, because something outlives a case and is bound to it.

    Without it each case has its own, so a case that hangs harms no other.
    """

    declares: ClassVar[bool] = True
    """Whether the engine declares what it can do. What another has no way to be asked is not run."""

    simulated: ClassVar[bool] = False
    """Whether it stands for an engine rather than being one. Reports say so."""

    expected_not_run: Mapping[str, str] = MappingProxyType({})
    """Cases that have nothing to try here, each with the reason. Any other is a gap in the claim."""

    unseen: Mapping[str, str] = MappingProxyType({})
    """What cannot be looked at, each with the reason: ``states`` of weight groups, ``memory``,
    ``bytes`` of weights, version ``spans``, ``cached tokens``, ``stale tokens``. Cases that only brush it leave that out and note it."""

    @abstractmethod
    async def start(self) -> Engine:
        """A fresh engine for one case, ready for :meth:`Engine.start`, which the suite calls.

        Whoever looks at "the engine" below looks at the last one started.
        """

    def front(self, engine: Engine) -> Replica:
        """What the cases speak to: hotbunk's replica, unless another keeps the rules."""
        return Replica(engine, name=self.name, deadlines=self.deadlines)

    async def steps(self, replica: Replica) -> Steps:
        """A new client of the control plane: hotbunk's own, unless another server has one."""
        return await StepsHere.begun(replica)

    async def check_options(self) -> None:
        """Before the first case: build what a case would, and start nothing.

        :raises UsageError: an option that cannot be meant.
        """
        await self.start()
        await self.stop()

    async def settle(self, replica: Replica) -> None:  # noqa: B027 - most do it by themselves
        """After each update that is not itself on trial: what users have to do by hand."""

    async def stop(self) -> None:  # noqa: B027 - most have nothing left to do
        """The case is over and the engine was closed."""

    async def finish(self) -> None:  # noqa: B027 - most have nothing left to do
        """After the last case, where all share one event loop."""

    def close(self) -> None:  # noqa: B027 - most have nothing left to do
        """Let go of what was made for the description itself (a model directory). Idempotent."""

    @abstractmethod
    def weights(self, version: int) -> Tensors:
        """The trainer's weights: every tensor that a full update carries, with its bytes.

        Goldens of any two versions differ on every prompt. Ties are sent once, with ``aliases``.
        """

    @abstractmethod
    def golden(self, prompt: Sequence[int], version: int, n: int) -> list[int]:
        """The ``n`` greedy tokens after ``prompt`` under these weights, found without the engine."""

    @abstractmethod
    def read_weight(self, name: str) -> bytes:
        """The bytes of a tensor as they lie in the engine, read past its verbs."""

    @abstractmethod
    def resident(self, tag: Tag) -> int:
        """Bytes of the tag that the device or the OS counts, read past the engine's verbs."""

    def host_backup(self) -> int | None:
        """Bytes of host memory that backups of weights take; None: cannot be told from outside.

        State that no sync brings back is kept through every release, and is not counted here.
        """
        return None

    # Further hooks, each for the cases that need it; without one those are not run.

    def corrupt_weight(self, name: str) -> bool:
        """Flip one bit of a tensor as it lies in the engine, past its verbs. False: no way to."""
        return False

    def sabotage(self, point: str, how: str) -> bool:
        """Have the engine's own code ``fail`` (raise) or ``hang`` once, the next time it is there.

        ``point`` is one of :data:`UPDATE_POINTS` or :data:`MEMORY_POINTS`. False: it cannot be done.
        """
        return False

    def starve(self, tag: Tag) -> bool:
        """Have the device refuse the tag's memory once, the next time it is mapped. False: no way."""
        return False

    async def kill(self) -> bool:
        """End the engine at once, as an outside power would (SIGKILL). False: it cannot be done."""
        return False

    def text(self, tokens: Sequence[int]) -> str | None:
        """What these tokens say, for stop strings; None: there is no tokenizer."""
        return None

    def adapter(self, name: str, version: int) -> Tensors:
        """Tensors of an adapter; asked for only where ``capabilities.adapter`` says yes."""
        raise NotImplementedError

    def adapter_golden(
        self, prompt: Sequence[int], version: int, name: str, adapter_version: int, n: int
    ) -> list[int]:
        """As :meth:`golden`, with the adapter on."""
        raise NotImplementedError

    def delta(self, base: int, version: int) -> Tensors:
        """What makes the weights of ``version`` of those of ``base``, in the engine's own form.

        Asked for only where ``capabilities.delta`` says yes.
        """
        raise NotImplementedError
