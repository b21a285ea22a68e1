"""verl's six-method CheckpointEngine, over our transports: ``checkpoint_engine.backend=hotbunk_shm``.

For verl's own manager and any rollout of verl's. The sender makes a host copy of what verl's
generator yields, since a generator can be walked once; receivers see every tensor whole, and what
arrived is compared with what was sent before the last of them may be used. A store of rank 0's tells
the receivers where to go; it carries bytes, and lives from ``prepare`` to ``finalize``.

    rank 0       prepare (store) -> send_weights: stage -> offer -> a ticket a receiver -> serve
    receivers    receive_weights: ticket -> accept -> tensors -> compare -> commit
    the others   send_weights: walk the generator, as a collective must be
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import msgspec
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hotbunk.checkpoint_engine.transports.base import Transport
from hotbunk.checkpoint_engine.transports.collective.groups import join_store, open_store
from hotbunk.rollout import registry
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import Manifest, Ticket, Transfer
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    SessionError,
    TransferFailed,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.intake import Intake
from hotbunk.rollout.kernels import as_bytes, fingerprints
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.process.wire_errors import to_wire
from hotbunk.trainer_hooks.verl.handle import Answer, opened
from hotbunk.trainer_hooks.verl.sources import staged
from hotbunk.trainer_hooks.verl.versions import version_of

PREFIX = "hotbunk_"
HOST = "127.0.0.1"
Named = AsyncIterator[tuple[str, torch.Tensor]]


class TransportCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One of our transports as verl's checkpoint engine. See the module.

    :param bucket_size: bytes.
    :param deadline: seconds for one sync, on both ends.
    :param options: the transport's own (``checkpoint_engine.engine_kwargs.hotbunk_<transport>``).
    """

    transport_name: ClassVar[str]

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, deadline: float = 600.0, **options: Any
    ) -> None:
        if deadline <= 0:
            raise ConfigError(f"deadline={deadline} must be above 0 seconds")
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._deadline = deadline
        self._options = options
        self._transport: Transport | None = None
        self._store: Any = None
        self._rank = -1
        self._world = 0

    # -- the six methods ----------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Rank 0: where its store is."""
        if not self.is_master:
            return {}
        host = str(self._options.get("address", HOST))
        self._store, port = open_store(host, self._deadline)
        return {"host": host, "port": port}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer rank 0 sends to every rollout rank; other trainer ranks have no number (-1)."""

        def told(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {
                "rank": ranks,
                "world_size": [rollout_world_size] * count,
                "store": [metadata[0]] * count,
            }

        others = [-1] * (actor_wg_world_size - 1)
        return told([0, *others]), told(list(range(1, rollout_world_size + 1)))

    def init_process_group(self, rank: int, world_size: int, store: Mapping[str, Any]) -> None:
        """Receivers: reach the store.

        :raises TransferFailed: it is not there.
        """
        self._rank, self._world = rank, world_size
        if rank > 0:
            self._store = join_store(store["host"], store["port"], self._deadline)

    async def send_weights(
        self, weights: Any, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Send what ``weights`` yields to every receiver; a receiver's failure is its own to tell.

        :raises HotbunkError: nothing could be offered; every receiver was told.
        """
        if self._rank != 0:
            await staged(weights, keep=False)
            return None
        began = time.perf_counter()
        try:
            source = await staged(weights, keep=True)
            assert source is not None
            manifest = Manifest(
                version_of(global_steps, None),
                source.specs(),
                bucket_bytes=self.bucket_size,
                fingerprint=KIND,
            )
            offer = await self._made().offer(
                source, manifest, ranks=[1] * self._world, deadline=self._deadline
            )
        # A boundary: receivers wait for a ticket, and must hear that there is none.
        except Exception as error:
            told = encode(Answer(error=to_wire("send_weights", error)))
            await self._tell([told] * self._world)
            raise
        try:
            await self._tell(
                [encode(Answer(value=msgspec.Raw(encode(ticket)))) for ticket in offer.tickets]
            )
            await offer.serve()
        finally:
            await offer.close()
        seconds = time.perf_counter() - began
        return {
            "checkpoint_engine/bytes": float(manifest.total_bytes),
            "checkpoint_engine/send_seconds": seconds,
        }

    async def receive_weights(self, global_steps: int | None = None) -> Named:
        """The tensors, in the sender's order, each whole and the caller's own.

        :raises HotbunkError: the sender failed, or what came is not what was sent.
        """
        if self._store is None:
            raise SessionError("init_process_group comes before receive_weights")
        ticket = opened("send_weights", await self._told(), Ticket)
        transfer = await registry.open_transfer(ticket)
        try:
            await transfer.accept(None)
            async for one in self._tensors(transfer):
                yield one
            await transfer.commit()
        except BaseException as error:
            await transfer.abort(error)
            raise

    def finalize(self) -> None:
        """Let go of the store; the transport keeps what is costly for the next sync."""
        self._store = None

    # -- inside -------------------------------------------------------------------------------

    def _made(self) -> Transport:
        if self._transport is None:
            self._transport = registry.load_transport(self.transport_name)(**self._options)
        return self._transport

    async def _tell(self, words: list[bytes]) -> None:
        for rank, word in enumerate(words, 1):
            await asyncio.to_thread(self._store.set, f"ticket/{rank}", word)

    async def _told(self) -> bytes:
        try:
            word: bytes = await asyncio.to_thread(self._store.get, f"ticket/{self._rank}")
        except RuntimeError as error:  # torch's DistStoreError and timeouts
            raise DeadlineExceeded(
                "waiting for the sender's ticket", self._deadline, remedy="it is dead or hangs"
            ) from error
        return word

    async def _tensors(self, transfer: Transfer) -> Named:
        specs = transfer.manifest.tensors
        intake = Intake(transfer.manifest, [spec.nbytes for spec in specs])
        arrived: dict[str, int] = {}
        under_way: dict[int, torch.Tensor] = {}
        async for bucket in transfer.buckets():
            data = bucket.data
            if not isinstance(data, torch.Tensor):
                data = torch.frombuffer(data, dtype=torch.uint8)
            done: list[tuple[str, torch.Tensor]] = []
            for entry in intake.check(bucket, data.numel()):
                spec = specs[entry.index]
                tensor = under_way.get(entry.index)
                if tensor is None:
                    dtype = dtype_from(spec.dtype)
                    tensor = torch.empty(spec.shape, dtype=dtype, device=data.device)
                    under_way[entry.index] = tensor
                # A copy: the bucket is lent until the next one.
                piece = data[entry.offset : entry.offset + entry.nbytes]
                as_bytes(tensor)[entry.start : entry.start + entry.nbytes].copy_(piece)
                if entry.start + entry.nbytes == spec.nbytes:
                    done.append((spec.name, under_way.pop(entry.index)))
            for (name, _), one in zip(done, fingerprints((t, 0) for _, t in done), strict=True):
                arrived[name] = one
            for named in done:
                yield named
        intake.finish()
        sent = await transfer.fingerprints()
        if wrong := [name for name, one in sent.items() if arrived.get(name) != one]:
            raise TransferFailed(f"{len(wrong)} tensor(s) arrived other than sent: {wrong[:5]}")


def _register() -> None:
    for name in registry.names(registry.TRANSPORTS):
        if name != "naive":  # it cannot leave the process, and the name is verl's own
            made = type(
                f"{name.title()}CheckpointEngine",
                (TransportCheckpointEngine,),
                {"transport_name": name, "__module__": __name__},
            )
            globals()[made.__name__] = made  # Ray finds a class by module and name
            CheckpointEngineRegistry.register(PREFIX + name)(made)


_register()
__all__ = ["TransportCheckpointEngine"]
