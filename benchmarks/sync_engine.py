"""The engine's side of `hotbunk bench sync`: a process that takes weights in each of the ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hotbunk.benchmarks import verl_transfer
from hotbunk.rollout import kernels
from hotbunk.rollout.binding import dtype_from, tensor_over
from hotbunk.rollout.contract import ArenaHandle, Bucket, Placement, ReceiverLayout, Ticket
from hotbunk.rollout.kernels import as_bytes, copy_many
from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.registry import open_transfer

Shape = tuple[str, str, tuple[int, ...]]  # name, element type, shape


class Weights:
    """An engine's weights: in one arena, of pages as large as there are."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.pool = NativePool("shared")
        sizes = [torch.empty(s, dtype=dtype_from(d), device="meta").nbytes for _, d, s in shapes]
        self.arena = self.pool.arena("weights", sum(-(-n // 256) * 256 for n in sizes))
        self.tensors: dict[str, torch.Tensor] = {}
        self.layout: dict[str, Placement] = {}
        for (name, dtype, shape), size in zip(shapes, sizes, strict=True):
            region = self.arena.add(name, size)
            flat = tensor_over(self.pool, self.arena, region, dtype_from(dtype))
            self.tensors[name] = flat.view(shape)
            self.layout[name] = Placement(dtype, shape, region.offset)
        self.bytes = [as_bytes(t) for t in self.tensors.values()]
        for data in self.bytes:
            data.zero_()

    def write(self, bucket: Bucket) -> None:
        """What an engine does with a bucket."""
        if bucket.data is None:
            return
        data = torch.frombuffer(bucket.data, dtype=torch.uint8)
        copy_many(
            (
                self.bytes[e.index][e.start : e.start + e.nbytes],
                data[e.offset : e.offset + e.nbytes],
            )
            for e in bucket.entries
        )

    async def sync(self, ticket: Ticket, in_place: bool) -> None:
        """One update, as an engine runs it: the loop stays free while bytes are copied."""
        transfer = await open_transfer(ticket)
        handle = None
        if in_place:
            assert self.arena.fd is not None
            handle = ArenaHandle("file", self.arena.size, self.arena.fd)
        assert await transfer.accept(ReceiverLayout(self.layout), handle) == in_place
        await transfer.take(self.write)
        sent = await transfer.fingerprints()
        if sent:
            names = list(sent)
            found = await asyncio.to_thread(
                kernels.fingerprints, [(self.tensors[name], 0) for name in names]
            )
            assert dict(zip(names, found, strict=True)) == dict(sent)
        await transfer.commit()

    def broadcast(self) -> None:
        """torch.distributed, straight into the weights."""
        for tensor in self.tensors.values():
            dist.broadcast(tensor, src=0)

    def shared_memory(self, pipe: Connection) -> None:
        """A new segment and a pickled table for each bucket; what is applied is acknowledged."""
        while (bucket := pipe.recv()) is not None:
            name, table = bucket
            segment = SharedMemory(name)
            data = torch.frombuffer(segment.buf, dtype=torch.uint8)
            for index, start, nbytes, offset in table:
                self.bytes[index][start : start + nbytes] = data[offset : offset + nbytes]
            del data
            segment.close()
            pipe.send(None)

    def safetensors(self, path: Path) -> None:
        """A file, read tensor by tensor."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for name, tensor in self.tensors.items():
                tensor.copy_(file.get_tensor(name))

    def verl(self, address: str) -> None:
        """Whole tensors a bucket, copied into the weights."""

        def apply(tensors: Sequence[tuple[str, torch.Tensor]], last: bool) -> None:
            for name, tensor in tensors:
                self.tensors[name].copy_(tensor)

        verl_transfer.receiver(address).receive_weights(apply)

    def ray(self, address: str, pipe: Connection) -> None:
        """Objects of the store of this machine, mapped and copied."""
        import ray

        if not ray.is_initialized():
            ray.init(address, logging_level="error", log_to_driver=False)
        for data, told in zip(self.bytes, pipe.recv(), strict=True):
            # By numpy: torch warns of memory that cannot be written to.
            np.copyto(data.numpy(), ray.get(ray.cloudpickle.loads(told)))


def main(pipe: Connection, shapes: Sequence[Shape], threads: int, store: str) -> None:
    """Serve commands until told to stop; each is answered with None, or with what went wrong."""
    torch.set_num_threads(threads)
    weights = Weights(shapes)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    with asyncio.Runner() as runner:
        pipe.send(None)
        while (command := pipe.recv()) is not None:
            way, told = json.loads(command)
            if way == "shm":
                ticket = msgspec.convert(told["ticket"], Ticket)
                runner.run(weights.sync(ticket, told["in_place"]))
            elif way == "gloo":
                weights.broadcast()
            elif way == "shared_memory":
                weights.shared_memory(pipe)
            elif way == "safetensors":
                weights.safetensors(Path(told["path"]))
            elif way == "verl":
                weights.verl(told["address"])
            elif way == "ray":
                weights.ray(told["address"], pipe)
            elif way == "check":
                found: dict[str, Any] = {n: t.sum().item() for n, t in weights.tensors.items()}
                pipe.send(found)
                continue
            pipe.send(None)
    dist.destroy_process_group()
