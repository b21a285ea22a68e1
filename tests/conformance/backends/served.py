"""A server that already runs (``--url``), seen from outside alone.

It must be ``hotbunk serve`` with the model directory that ``--model`` names, and nobody else may use it
meanwhile. It lives on from case to case: before each it is woken, opened, emptied and given the weights of
version 0, under an incarnation of its own, so that the case finds what a fresh engine would be. Memory is
what the server says of itself; bytes of its weights cannot be seen.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hotbunk.conformance.backends.driven import Relabelled, Relabelling
from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.backends.steps_there import StepsThere
from hotbunk.conformance.rig import NotApplicable
from hotbunk.conformance.steps import Steps
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.rollout.backends.hotbunk_http.engine import HttpEngine
from hotbunk.rollout.backends.hotbunk_http.handle import HttpHandle
from hotbunk.rollout.backends.hotbunk_http.options import HttpOptions
from hotbunk.rollout.contract import (
    Engine,
    MemoryReport,
    Tag,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import ConfigError, ReplicaLost
from hotbunk.rollout.http.relay import relay
from hotbunk.rollout.options import convert
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines, Health

UNSEEN = "bytes of weights cannot be seen from outside"
NEEDS_BYTES = (
    "any_bucket_size",
    "bytes_are_the_ones_sent",
    "golden_after_a_kv_only_release",
    "one_tensor_at_a_time",
    "partial_updates",
    "ties_that_the_engine_does_not_have",
    "verification_reads_memory",
    "versions_only_rise",
)
NEEDS_HANDS = (
    "a_resume_without_room_is_undone",
    "a_planted_corruption_is_found",
    "an_engine_fails_in_a_memory_verb",
    "an_engine_fails_in_each_phase",
    "discard_takes_no_host_memory",
)


class ServedUnderTest(ReferenceUnderTest):
    """Options besides ``url`` and ``model`` go to the connection (``api_key_file``, ``relay``)."""

    name = "served"
    # A drain over a wire, and who is held meanwhile, may take longer than in one process.
    deadlines = Deadlines(hold=10.0, drain=20.0, memory=20.0, update=20.0, inspect=5.0, grace=2.0)

    def __init__(self, *, url: str, model: str | None = None, **options: Any) -> None:
        if model is None:
            raise ConfigError(
                f"which model does {url} serve?", remedy="--model DIR, the directory it was given"
            )
        connection = {"url": url, "deadlines": self.deadlines, **options}
        self._connection = convert(connection, HttpOptions, "backend served")
        super().__init__(model=model)
        self._incarnation = 0
        self.expected_not_run |= dict.fromkeys(NEEDS_BYTES, UNSEEN)
        self.expected_not_run |= dict.fromkeys(NEEDS_HANDS, "nobody has a hand in the server")
        if "tied_tensors" not in self.expected_not_run:
            self.expected_not_run["tied_tensors"] = UNSEEN

    async def check_options(self) -> None:
        """:raises ReplicaLost: nobody is there. :raises Unsupported: it has no control plane."""
        handle = await HttpHandle.connect(self._connection)
        await handle.close()

    async def start(self) -> Engine:
        return _Fresh(self._connection, self)

    async def reset(self, handle: HttpHandle) -> int:
        """Bring the server to where a fresh engine would be; the incarnation it is in now.

        :raises ReplicaLost: there is nobody.
        """
        status = await handle.status()
        if status.health is Health.LOST:
            raise ReplicaLost("the server does not answer", where=self._connection.url)
        said = [*status.versions.values(), *status.backend.versions.values()]
        # A case uses two of its own: the second stands for a trainer that went back.
        known = max((version.incarnation for version in said), default=0)
        self._incarnation = max(self._incarnation, known) + 2
        await handle.abort()
        await handle.wake_up()
        for pause in status.pauses:
            await handle.resume_generation(owner=pause.owner)
        transfer = MemoryTransfer(self.weights(0), version=Version(self._incarnation, 0))
        await relay(handle, transfer, self._connection.relay, self.deadlines.update)
        await handle.reset_caches()
        return self._incarnation

    async def steps(self, replica: Replica) -> Steps:
        made = await _FreshSteps.begun(self._connection)
        made.incarnation = self._incarnation
        return made

    def read_weight(self, name: str) -> bytes:
        raise NotApplicable(UNSEEN)

    def corrupt_weight(self, name: str) -> bool:
        return False

    def sabotage(self, point: str, how: str) -> bool:
        return False

    def starve(self, tag: Tag) -> bool:
        return False

    def resident(self, tag: Tag) -> int:
        """As the server says."""
        import httpx

        key = self._connection.key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self._connection.url.rstrip('/')}/memory"
        body = httpx.get(url, headers=headers, trust_env=False).raise_for_status().content
        return msgspec.json.decode(body, type=MemoryReport).resident(tag)

    def host_backup(self) -> None:
        return None


class _FreshSteps(StepsThere):
    """Steps whose versions here are those there, likewise."""

    incarnation = 0

    async def update(self, transfer: Transfer) -> UpdateReport:
        return await super().update(Relabelled(transfer, self._there))

    async def finish(self, version: Version | None = None) -> Version:
        return self._here(await super().finish(None if version is None else self._there(version)))

    async def label(self) -> Version | None:
        held = await super().label()
        return None if held is None else self._here(held)

    def _there(self, version: Version) -> Version:
        return Version(version.incarnation + self.incarnation, version.step)

    def _here(self, version: Version) -> Version:
        return Version(version.incarnation - self.incarnation, version.step)


class _Fresh(Relabelling, HttpEngine):
    """The server as a fresh engine: versions here are those there, in an incarnation of its own."""

    def __init__(self, options: HttpOptions, owner: ServedUnderTest) -> None:
        super().__init__(options)
        self._owner = owner

    async def start(self) -> None:
        handle = await HttpHandle.connect(self.options)
        try:
            self.incarnation = await self._owner.reset(handle)
        finally:
            await handle.close()
        await super().start()
