"""The shm transport, with a plan of what goes wrong: found by its entry point, selected by its name.

``checkpoint_engine.backend=hotbunk_faulty`` and, under ``engine_kwargs.hotbunk_faulty``, lists of the
steps whose first offer fails: ``cut`` (the source raises after two tensors), ``scale`` (the first
tensor arrives times 1.05), ``kill`` (the receiving engine dies at its first bucket).
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from hotbunk.checkpoint_engine.transports.base import Offer
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.checkpoint_engine.transports.shm.receiver import ShmTransfer
from hotbunk.rollout.contract import Bucket, Manifest, Ticket, Transfer


class CutSource:
    """A source that fails in the middle of a walk."""

    def __init__(self, inner: Any) -> None:
        self.specs = inner.specs
        self._inner = inner

    def tensors(self) -> Iterator[torch.Tensor]:
        for n, tensor in enumerate(self._inner.tensors()):
            if n == 2:
                raise RuntimeError("the trainer failed in the middle of a sync")
            yield tensor


class HarmedTransfer(Transfer):
    """A receiver whose first bucket is not what was sent, or kills it."""

    def __init__(self, inner: Transfer, harm: str) -> None:
        self._inner = inner
        self._harm = harm
        self.manifest = inner.manifest

    async def accept(self, layout: Any, arena: Any = None) -> bool:
        return await self._inner.accept(layout, arena)

    async def fingerprints(self) -> Mapping[str, int]:
        return await self._inner.fingerprints()

    async def commit(self) -> None:
        await self._inner.commit()

    async def decline(self) -> None:
        await self._inner.decline()

    async def abort(self, error: BaseException) -> None:
        await self._inner.abort(error)

    async def buckets(self) -> AsyncIterator[Bucket]:
        harm = self._harm
        async for bucket in self._inner.buckets():
            if harm == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            yield _scaled(bucket) if harm else bucket
            harm = ""


def _scaled(bucket: Bucket) -> Bucket:
    data = torch.frombuffer(bytearray(bucket.data), dtype=torch.uint8)
    entry = bucket.entries[0]
    data[entry.offset : entry.offset + entry.nbytes].view(torch.float32).mul_(1.05)
    return Bucket(memoryview(data.numpy()), bucket.entries)


class FaultyTransport(ShmTransport):
    """See the module."""

    def __init__(
        self,
        *,
        cut: Sequence[int] = (),
        scale: Sequence[int] = (),
        kill: Sequence[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._plan = {"cut": set(cut), "scale": set(scale), "kill": set(kill)}

    async def offer(self, source: Any, manifest: Manifest, **kw: Any) -> Offer:
        step = manifest.version.step
        due = [harm for harm, steps in self._plan.items() if step in steps]
        for harm in due:
            self._plan[harm].remove(step)
        if "cut" in due:
            return await super().offer(CutSource(source), manifest, **kw)
        offer = await super().offer(source, manifest, **kw)
        for harm in due:
            first, *others = offer.tickets
            address = f"{harm}!{first.address}"
            told = msgspec.structs.replace(first, transport="faulty", address=address)
            offer.tickets = (told, *others)
        return offer

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        harm, _, address = ticket.address.partition("!")
        inner = msgspec.structs.replace(ticket, transport="shm", address=address)
        return HarmedTransfer(await ShmTransfer.open(inner), harm)
