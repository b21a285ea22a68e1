"""A transfer that arrives here, offered on to a server by a transport.

Nothing is stored: the sender there walks the tensors in a thread of its own, and each is put together
from the buckets that come here meanwhile. What is refused there is refused here, before a bucket is
taken; what is found wrong here keeps the last tensor back, so it cannot be committed there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from hotbunk.rollout.calls import abandoned
from hotbunk.rollout.contract import (
    Bucket,
    Capabilities,
    Scope,
    Ticket,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import HotbunkError, TransferFailed, VerifyFailed
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.registry import load_transport

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
BUCKET_BYTES = 8 << 20


class Taker(Protocol):
    """Who takes the offer there, by its ticket."""

    @property
    def capabilities(self) -> Capabilities:
        """Say how many ranks open the ticket."""

    async def update_weights(
        self, source: Ticket, *, version: Version, scope: Scope
    ) -> UpdateReport:
        """Return when all of them have committed."""


async def relay(handle: Taker, transfer: Transfer, transport: str, deadline: float) -> UpdateReport:
    """Take ``transfer`` for the replica behind ``handle``, within ``deadline`` seconds.

    :raises UpdateRefused: the server's word; no bucket was taken.
    :raises UpdateFailed: it broke on the way, on either side.
    """
    manifest = msgspec.structs.replace(transfer.manifest, bucket_bytes=BUCKET_BYTES)
    way = load_transport(transport)()
    source = _Relayed(transfer)
    try:
        offer = await way.offer(
            source, manifest, ranks=(handle.capabilities.ranks,), deadline=deadline
        )
        serving = asyncio.ensure_future(offer.serve())
        try:
            update = handle.update_weights(
                offer.tickets[0], version=manifest.version, scope=manifest.scope
            )
            try:
                report = await update
            except HotbunkError:
                await offer.drop(0)
                if source.error is not None:
                    raise source.error from None
                raise
            if not report.skipped:
                await serving
                # The relay is one receiver, however many ranks take what it offers.
                return msgspec.structs.replace(report, nbytes=source.nbytes)
            # The server never noticed what went wrong here before: it has this version whole.
            await asyncio.to_thread(lambda: deque(source.tensors(), maxlen=0))
            applied = len(manifest.tensors)
            return msgspec.structs.replace(
                report, skipped=False, applied=applied, nbytes=source.nbytes
            )
        finally:
            source.stop()
            await abandoned(serving)
            await offer.close()
    finally:
        await way.close()


class _Relayed:
    """The source of the offer: the transfer's tensors, once."""

    def __init__(self, transfer: Transfer) -> None:
        self.error: HotbunkError | None = None
        self.nbytes = 0  # that came, once all did
        self._transfer = transfer
        self._loop = asyncio.get_running_loop()
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def specs(self) -> Any:
        """As they were offered here."""
        return self._transfer.manifest.tensors

    def stop(self) -> None:
        """Let the thread go that walks."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def tensors(self) -> Iterator[torch.Tensor]:
        """In a thread of the sender's."""
        try:
            yield from self._walk()
        except HotbunkError as error:
            self.error = error
            raise

    def _walk(self) -> Iterator[torch.Tensor]:
        specs = self._transfer.manifest.tensors
        self._do(self._transfer.accept(None))
        intake = Intake(self._transfer.manifest, [spec.nbytes for spec in specs])
        parts: dict[int, bytearray] = {}
        left = {n: spec.nbytes for n, spec in enumerate(specs)}
        sums: dict[str, int] = {}
        buckets = self._transfer.buckets()
        at = 0
        while (bucket := self._do(_next(buckets))) is not None:
            data = memoryview(bucket.data).cast("B")
            for entry in intake.check(bucket, len(data)):
                part = parts.setdefault(entry.index, bytearray(specs[entry.index].nbytes))
                end = entry.start + entry.nbytes
                part[entry.start : end] = data[entry.offset : entry.offset + entry.nbytes]
                left[entry.index] -= entry.nbytes
            del data
            while at < len(specs) - 1 and left[at] == 0:
                yield self._tensor(at, parts, sums)
                at += 1
        intake.finish()
        self.nbytes = intake.nbytes
        rest = [self._tensor(n, parts, sums) for n in range(at, len(specs))]
        expected = self._do(self._transfer.fingerprints())
        differing = {name for name, value in expected.items() if sums.get(name) != value}
        if differing:
            raise VerifyFailed(differing, where="on the way to the relay")
        self._do(
            self._transfer.commit()
        )  # the sender's vote is in before the server can have its own
        yield from rest

    def _tensor(self, index: int, parts: dict[int, bytearray], sums: dict[str, int]) -> Any:
        import torch

        from hotbunk.rollout.binding import dtype_from
        from hotbunk.rollout.kernels import fingerprint

        spec = self._transfer.manifest.tensors[index]
        dtype = dtype_from(spec.dtype)
        data = parts.pop(index, None)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(spec.shape)
        if self._transfer.manifest.fingerprint == KIND:
            sums[spec.name] = fingerprint(tensor)
        return tensor

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop, and wait."""
        if self._stopped:
            work.close()
            raise TransferFailed("the update was given up")
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._waiting = waiting
        if self._stopped:  # just now, and stop() saw nothing to cancel
            waiting.cancel()
        try:
            return waiting.result()
        except (asyncio.CancelledError, concurrent.futures.CancelledError):
            raise TransferFailed("the update was given up") from None
        finally:
            self._waiting = None


async def _next(buckets: AsyncIterator[Bucket]) -> Bucket | None:
    return await anext(buckets, None)
