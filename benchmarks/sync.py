"""Weight sync from a trainer's process to an engine's, against the other ways on one host.

Whole syncs are timed: from the offer to the commit. The peers verify nothing, so ours does not
either, except in the rows that say so. Peers that are not installed (verl, Ray, vLLM) are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any, Self

import msgspec
import psutil
import torch
import torch.distributed as dist

from hotbunk.benchmarks import sync_engine, verl_transfer, vllm_reload
from hotbunk.benchmarks.kernels import SHAPES_135M
from hotbunk.benchmarks.rows import Row, in_turns
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.rollout import kernels
from hotbunk.rollout.binding import dtype_name, tensor_over
from hotbunk.rollout.contract import FULL, Manifest, Version
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.kernels import CopyPlan, as_bytes
from hotbunk.rollout.memory import NativePool

MIB = 1 << 20
REPEATS = 5
BUCKET = 32 * MIB  # ours, the default; `shm` packs less where that fits the cache
PATIENCE = 60.0  # seconds to wait in all, for each set of weights, until nothing else works
_IDLE = 0.05  # of all processors' time
PEER_BUCKET = 64 * MIB  # faster for the peer than its default of 512
# About a billion parameters in bf16: 16 layers, 2048 wide; 2 GiB.
_LAYER = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), *[(8192, 2048)] * 3, (2048,)]
SHAPES_2GIB = [(47_616, 2048), *(_LAYER * 16), (2048,)]
SIZES: dict[str, list[tuple[int, ...]]] = {"2gib": SHAPES_2GIB, "135m": SHAPES_135M}
Named = Mapping[str, torch.Tensor]


def run(tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows, and the settings they were measured with. ``tell`` hears what comes next.

    :raises Unsupported: there is no native library.
    """
    native = kernels.native_kernels()
    if native is None:
        raise Unsupported("native kernels", "this install", "reinstall without HOTBUNK_PURE")
    before = torch.get_num_threads()
    torch.set_num_threads(native.threads)
    try:
        rows = []
        for suffix, shapes in SIZES.items():
            tell(suffix)
            named = {f"t{i}": _random(shape) for i, shape in enumerate(shapes)}
            with _Pair(named, native.threads) as pair:
                rows += pair.rows(suffix)
            del named
    finally:
        torch.set_num_threads(before)
    settings = (
        f"bf16, {native.threads} threads in each process, {native.variant.name}, "
        f"torch {torch.__version__}, buckets of {BUCKET // MIB} MiB (shared memory: "
        f"{PEER_BUCKET // MIB}); the limit is one non-temporal copy of the same tensors, "
        f"into pages of the same kind"
    )
    return rows, settings


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(-30_000, 30_000, shape, dtype=torch.int16).view(torch.bfloat16)


class _Pair:
    """A trainer, which is this process, and an engine."""

    def __init__(self, named: Named, threads: int) -> None:
        self.named = named
        self.nbytes = sum(t.nbytes for t in named.values())
        self._threads = threads
        self._stack = contextlib.ExitStack()
        self._steps = itertools.count(1)
        self._ray_address = ""
        # One a way, as a trainer has one: it keeps what that way needs.
        self._transports: dict[tuple[bool, str], ShmTransport] = {}

    def __enter__(self) -> Self:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self._path = Path(folder) / "weights.safetensors"
        store = str(Path(folder) / "store")
        shapes = [(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in self.named.items()]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=sync_engine.main, args=(theirs, shapes, self._threads, store)
        )
        self._process.start()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        self._runner = self._stack.enter_context(asyncio.Runner())
        _answer(self._pipe)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        dist.destroy_process_group()
        self._process.join(30)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._pipe.close()
        for transport in self._transports.values():
            self._runner.run(transport.close())
        self._stack.close()

    def rows(self, suffix: str) -> list[Row]:
        """One a way of ours."""
        pool = NativePool("shared")
        arena = pool.arena("limit", sum(-(-t.nbytes // 256) * 256 for t in self.named.values()))
        pairs = []
        for name, tensor in self.named.items():
            region = arena.add(name, tensor.nbytes)
            pairs.append((tensor_over(pool, arena, region), as_bytes(tensor)))
        limit = CopyPlan(pairs)
        del pairs
        ways: dict[str, Callable[[], None]] = {
            "shm": lambda: self._shm(False),
            "onecopy": lambda: self._shm(True),
            "shm_verified": lambda: self._shm(False, KIND),
            "onecopy_verified": lambda: self._shm(True, KIND),
        }
        peers: dict[str, Callable[[], None]] = {
            "gloo broadcast": self._gloo,
            "new SharedMemory and pickled table a bucket": self._shared_memory,
            "safetensors in /dev/shm": self._safetensors,
        }
        if verl_transfer.installed():
            peers["verl's sender and receiver"] = self._verl
        if importlib.util.find_spec("ray") is not None:
            peers["Ray's object store"] = self._ray
        for name, way in (ways | peers).items():
            self._check(name, way)
        if vllm_reload.installed():
            peers["vLLM's reload_weights"] = self._vllm()
        calls = [*ways.values(), *peers.values(), limit.run]
        # Ray's daemons are still starting, and free what they held after each of its turns.
        seconds = in_turns(calls, REPEATS, before=_Quiet())
        rates = [[self.nbytes / s / 1e9 for s in each] for each in seconds]
        top = median(rates.pop())
        others = dict(zip(peers, rates[len(ways) :], strict=True))
        best = max(others, key=lambda name: median(others[name]))
        rows = [
            _row(f"sync_{suffix}_{way}", mine, others[best], top, best)
            for way, mine in zip(ways, rates, strict=False)
        ]
        # The other peers, against the plain way.
        rows += [
            _row(f"sync_{suffix}_shm_{number}", rates[0], theirs, top, name)
            for number, (name, theirs) in enumerate(others.items())
            if name != best
        ]
        del limit
        pool.close()
        return rows

    def _check(self, name: str, way: Callable[[], None]) -> None:
        """Once before anything is timed: what arrives is what was sent."""
        first = next(iter(self.named.values()))
        first.view(torch.int16).add_(1)
        way()
        self._ask("check")
        found = self._pipe.recv()
        wanted = {n: t.sum().item() for n, t in self.named.items()}
        differing = [n for n in wanted if repr(wanted[n]) != repr(found[n])]
        if differing:
            raise RuntimeError(f"{name} lost {differing[:3]}")

    def _ask(self, way: str, **told: Any) -> None:
        self._pipe.send(json.dumps([way, told]))

    # -- the ways -----------------------------------------------------------------------------

    def _shm(self, in_place: bool, fingerprint: str = "none") -> None:
        self._runner.run(self._sync(in_place, fingerprint))
        _answer(self._pipe)

    async def _sync(self, in_place: bool, fingerprint: str) -> None:
        source = state_dict_source(self.named)
        version = Version(0, next(self._steps))
        manifest = Manifest(version, source.specs(), FULL, BUCKET, fingerprint)
        transport = self._transports.setdefault((in_place, fingerprint), ShmTransport())
        offer = await transport.offer(source, manifest, deadline=60.0)
        ticket = msgspec.to_builtins(offer.tickets[0])
        self._ask("shm", ticket=ticket, in_place=in_place)
        await offer.serve()
        await offer.close()

    def _gloo(self) -> None:
        self._ask("gloo")
        for tensor in self.named.values():
            dist.broadcast(tensor, src=0)
        _answer(self._pipe)

    def _shared_memory(self) -> None:
        self._ask("shared_memory")
        for table in self._peer_buckets():
            segment = SharedMemory(create=True, size=PEER_BUCKET)
            data = torch.frombuffer(segment.buf, dtype=torch.uint8)
            told = []
            for index, source, start, offset in table:
                data[offset : offset + source.numel()] = source
                told.append((index, start, source.numel(), offset))
            self._pipe.send((segment.name, told))
            _answer(self._pipe)
            del data
            segment.close()
            segment.unlink()
        self._pipe.send(None)
        _answer(self._pipe)

    def _peer_buckets(self) -> Iterator[list[tuple[int, torch.Tensor, int, int]]]:
        table: list[tuple[int, torch.Tensor, int, int]] = []
        used = 0
        for index, tensor in enumerate(self.named.values()):
            data, start = as_bytes(tensor), 0
            while start < data.numel():
                if used == PEER_BUCKET:
                    yield table
                    table, used = [], 0
                end = min(start + PEER_BUCKET - used, data.numel())
                table.append((index, data[start:end], start, used))
                used, start = used + end - start, end
        if table:
            yield table

    def _safetensors(self) -> None:
        from safetensors.torch import save_file

        save_file(dict(self.named), self._path)
        self._ask("safetensors", path=str(self._path))
        _answer(self._pipe)
        self._path.unlink()

    def _verl(self) -> None:
        address = f"ipc://{self._path.parent / 'verl'}"
        self._ask("verl", address=address)
        self._runner.run(verl_transfer.sender(address).async_send_weights(iter(self.named.items())))
        _answer(self._pipe)

    def _vllm(self) -> Callable[[], None]:
        """An engine of its own: it takes weights in its own way only, and is checked here."""
        reload = vllm_reload.Reload(self.named, self._path.parent / "vllm", self._threads)
        self._stack.callback(reload.close)
        next(iter(self.named.values())).view(torch.int16).add_(1)
        reload.sync()
        if not reload.check():
            raise RuntimeError("vLLM does not hold what was sent")
        return reload.sync

    def _ray(self) -> None:
        """One object a tensor, as trainers do; the engine maps them and copies."""
        import ray

        if not self._ray_address:
            os.environ["RAY_AUTH_MODE"] = "disabled"  # as in the engine: it joins as a driver
            store = min(2 * self.nbytes + (1 << 28), 6 << 30)
            context = ray.init(
                num_cpus=1,
                object_store_memory=store,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
            self._stack.callback(ray.shutdown)
            self._ray_address = context.address_info["address"]
        refs = [ray.put(as_bytes(t).numpy()) for t in self.named.values()]
        self._ask("ray", address=self._ray_address)
        self._pipe.send([ray.cloudpickle.dumps(ref) for ref in refs])
        _answer(self._pipe)


class _Quiet:
    """Called, it waits until the processors are idle; for ``PATIENCE`` in all, and then no more."""

    def __init__(self) -> None:
        self._left = PATIENCE

    def __call__(self) -> None:
        while self._left > 0:
            busy, whole = _processors()
            time.sleep(0.5)
            self._left -= 0.5
            busy_then, whole_then = _processors()
            if busy_then - busy <= _IDLE * (whole_then - whole):
                return


def _processors() -> tuple[float, float]:
    """Seconds of all processors since the start: at work, and in all."""
    times = psutil.cpu_times()
    whole = sum(times[:8])  # what guests had is in it already
    return whole - times.idle - times.iowait, whole


def _answer(pipe: Connection) -> None:
    """Wait for the engine to be done."""
    if not pipe.poll(120):
        raise RuntimeError("the engine does not answer")
    pipe.recv()


def _row(name: str, mine: list[float], theirs: list[float], top: float, peer: str) -> Row:
    rate, other = median(mine), median(theirs)
    spread = [min(mine), max(mine), min(theirs), max(theirs)]
    return Row(
        name, rate, other, top, "GB/s", rate / other, rate / top, len(mine), spread, f"{peer}"
    )
