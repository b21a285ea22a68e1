"""The pool's part of gpu_check.py: (title, call) pairs in CHECKS; each returns what it found.

Runs on a GPU, and without torch's share (``torch_too``) on the tests' fake CUDA driver as well:
tests/unit/test_gpu_check.py does that, so that a machine with a GPU is not the first to run it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hotbunk.rollout.allocator import EXPANDABLE, preflight
from hotbunk.rollout.arena import Survival
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import MemoryFault, ResumeOutOfMemory
from hotbunk.rollout.memory import NativeArena, NativePool

MIB = 1 << 20
DRIVER = "cuda:0"
torch_too = torch.cuda.is_available()
nbytes = 1024 * MIB  # of the large arena
cycles = 200  # of the small one
BACKUP, DISCARD = Retention.BACKUP, Retention.DISCARD


def filled(pool: NativePool, size: int, tag: str = "weights") -> NativeArena:
    """Content, state, zeros and a persistent part, all random."""
    arena = pool.arena(tag, size, persistent=4096)
    arena.add("content", size // 2)
    arena.add("state", 5000, Survival.STATE)
    arena.add("zero", 70_000, Survival.ZERO)
    arena.add("persist", 100, Survival.PERSIST)
    for region in arena.regions.values():
        arena.write(region.offset, os.urandom(region.nbytes))
    return arena


def content_of(arena: NativeArena) -> dict[str, bytes]:
    return {name: arena.read(r.offset, r.nbytes) for name, r in arena.regions.items()}


def free_bytes(pool: NativePool) -> int:
    return int(pool.facts().free)


def opens() -> str:
    pool = NativePool(DRIVER)
    facts = pool.facts()
    if torch_too:
        free, total = torch.cuda.mem_get_info(0)
        assert facts.total == total, "torch sees another device"
        assert abs(facts.free - free) < 256 * MIB
    pool.close()
    return f"{facts.total / 2**30:.0f} GiB in units of {facts.granularity / MIB:g} MiB"


def release_and_resume() -> str:
    """What each retention keeps, at the same address; the driver has the memory back meanwhile."""
    pool = NativePool(DRIVER)
    arena = filled(pool, nbytes)
    address, before, awake = arena.address, content_of(arena), free_bytes(pool)
    freed = []
    for retention in (BACKUP, DISCARD):
        report = pool.release(["weights"], retention)
        freed.append(free_bytes(pool) - awake)
        assert min(report.freed, freed[-1]) >= 0.95 * arena.info.size, f"{report.freed} came back"
        assert content_like(arena, before, ["persist"], released=True)
        pool.resume(["weights"])
        assert arena.address == address
        kept = ["content", "state", "persist"] if retention is BACKUP else ["state", "persist"]
        assert content_like(arena, before, kept)
        zero = arena.regions["zero"]
        assert not any(arena.read(zero.offset, zero.nbytes)), "zeros are not zero"
        assert abs(free_bytes(pool) - awake) < arena.info.size // 20
    pool.check_invariants()
    pool.close()
    return f"{freed[0] / MIB:.0f} MiB of {nbytes / MIB:.0f} back, as the driver counts"


def content_like(
    arena: NativeArena, before: dict[str, bytes], names: list[str], *, released: bool = False
) -> bool:
    """Whether these regions are as before. A released part cannot be read at all."""
    if released:
        try:
            arena.read(0, 1)
        except MemoryFault:
            pass
        else:
            return False
    return all(
        arena.read(arena.regions[n].offset, arena.regions[n].nbytes) == before[n] for n in names
    )


def many_cycles() -> str:
    """Nothing grows: what the driver has free while asleep, descriptors, mappings."""
    pool = NativePool(DRIVER)
    arena = filled(pool, 8 * MIB)
    state = content_of(arena)["state"]
    asleep, counts = [], []
    for n in range(cycles):
        pool.release(["weights"], BACKUP if n % 2 else DISCARD)
        asleep.append(free_bytes(pool))
        counts.append(
            (len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\n"))
        )
        pool.resume(["weights"])
    assert content_of(arena)["state"] == state
    lost = max(asleep[2:4]) - min(asleep[-2:])
    assert lost <= 8 * MIB, f"{lost} bytes fewer are free after {cycles} cycles"
    assert counts[-1][0] <= counts[3][0], "descriptors grow"
    assert counts[-1][1] <= counts[3][1] + 8, "mappings grow"
    pool.close()
    return f"{cycles} cycles, {max(lost, 0)} bytes lost"


def no_room_on_resume() -> str:
    """Somebody else took the memory: an error that says how much is missing, and a retry."""
    pool, other = NativePool(DRIVER), NativePool(DRIVER)
    arena = filled(pool, nbytes)
    before = content_of(arena)
    pool.release(["weights"], BACKUP)
    asleep, hogs = free_bytes(pool), []
    step = max(free_bytes(pool) // 16 // (2 * MIB) * 2 * MIB, 2 * MIB)
    while step >= 2 * MIB and free_bytes(pool) >= nbytes // 2:
        try:
            hogs.append(other.arena("hog", step, str(len(hogs))))
        except MemoryFault:
            step //= 2
    left = free_bytes(pool)
    try:
        pool.resume(["weights"])
    except ResumeOutOfMemory as error:
        told = error
    else:
        raise AssertionError("it fitted")
    assert told.needed >= nbytes
    assert told.free < told.needed
    assert arena.released
    assert free_bytes(pool) == left or torch_too, "what was mapped stayed"
    other.close()
    del hogs
    pool.resume(["weights"])
    assert content_like(arena, before, ["content", "state", "persist"])
    pool.check_invariants()
    pool.close()
    return f"refused with {left / MIB:.0f} MiB free, resumed with {asleep / MIB:.0f}"


def views_live() -> str:
    """Tensors, views of them and what DLPack made of them stay where they are, and work."""
    from hotbunk.rollout.binding import tensor_over

    pool = NativePool(DRIVER)
    arena = pool.arena("weights", 64 * MIB)
    flat = tensor_over(pool, arena, arena.add("w", 16 * MIB), torch.float32)
    flat.normal_()
    matrix, row = flat.view(2048, 2048), flat[5:500]
    shared = torch.from_dlpack(flat)
    before, product = flat.clone(), matrix @ matrix
    for _ in range(3):
        pool.release(["weights"], BACKUP)
        pool.resume(["weights"])
        assert arena.address <= flat.data_ptr() < arena.address + arena.size
        assert torch.equal(flat, before)
        assert torch.equal(row, before[5:500])
        assert torch.equal(shared, before)
        assert torch.equal(matrix @ matrix, product)
    flat.add_(1)
    assert torch.equal(shared, before + 1), "no longer the same memory"
    pool.close()
    return "tensor, slice, DLPack, matmul, 3 cycles"


CHILD = """
import sys, torch
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.memory import NativePool
pool = NativePool(sys.argv[1])
arena = pool.arena("weights", 4 << 20)
tensor = tensor_over(pool, arena, arena.add("w", 4096))
print(int(tensor.sum()), flush=True)
pool.release(["weights"], Retention.BACKUP)
print(int(tensor.sum()), flush=True)
"""


def released_memory_faults() -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, DRIVER],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "0\n", done.stdout
    assert done.returncode != 0, "it read released memory"
    return (done.stderr.strip().splitlines() or ["killed"])[-1]


def beside_expandable_segments() -> str:
    """The setting that conflicts with torch's own pools leaves ours alone; a scope turns it off."""
    found = preflight() or "not set"
    with EXPANDABLE.off():
        junk = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    del junk
    pool = NativePool(DRIVER)
    arena = filled(pool, 64 * MIB)
    before = content_of(arena)
    pool.release(["weights"], BACKUP)
    pool.resume(["weights"])
    assert content_like(arena, before, ["content", "state"])
    pool.close()
    return found


def engine_sleeps_and_wakes() -> str:
    """The reference engine: same tokens after level 1, memory gone meanwhile, none from level 2."""
    from hotbunk.rollout.backends.reference import create
    from hotbunk.rollout.contract import GenerateRequest, Sampling, collect
    from hotbunk.rollout.errors import WeightsNotLoaded
    from hotbunk.rollout.replica import Replica

    async def run(directory: str) -> str:
        replica = Replica(create(model=directory, device=engine_device, kv_cache_tokens=4096))
        await replica.start()

        async def tokens() -> tuple[int, ...]:
            request = GenerateRequest(
                "r", (1, 5, 9, 12), Sampling(0.0, max_tokens=24, ignore_eos=True)
            )
            return tuple((await collect(replica.generate(request))).token_ids)

        first = await tokens()
        assert len(first) == 24
        awake = (await replica.memory()).resident()
        report = await replica.sleep(1)
        assert report.resident() == 0, f"still resident: {report.residual()}"
        assert report.freed > 0.9 * awake
        await replica.wake_up()
        assert await tokens() == first, "other tokens after a sleep"
        await replica.sleep(2)
        await replica.wake_up()
        try:
            await tokens()
        except WeightsNotLoaded:
            pass
        else:
            raise AssertionError("tokens from weights that were discarded")
        await replica.close()
        return f"{awake / MIB:.0f} MiB slept and woke"

    with tempfile.TemporaryDirectory() as directory:
        tiny_model(directory)
        return asyncio.run(run(directory))


engine_device = DRIVER


def tiny_model(directory: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)  # the same model each time
    LlamaForCausalLM(config).save_pretrained(directory)


def times() -> str:
    """Milliseconds per GiB, and the share of the measured limit of what copies."""
    pool = NativePool(DRIVER)
    arena = pool.arena("weights", nbytes)
    arena.add("w", nbytes)
    took: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        took.setdefault(name, []).append((time.perf_counter() - began) * 1e3 * (1 << 30) / nbytes)

    host, device = bytes(0), None
    if torch_too:
        host = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        device = torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    for _ in range(5):
        timed("backup", lambda: pool.release(["weights"], BACKUP))
        timed("restore", lambda: pool.resume(["weights"]))
        timed("release", lambda: pool.release(["weights"], DISCARD))
        timed("resume", lambda: pool.resume(["weights"]))
        if device is not None:
            timed("copy to the host", lambda: copy(host, device))
            timed("copy from the host", lambda: copy(device, host))
    pool.close()
    middle = {name: statistics.median(values) for name, values in took.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in middle.items())
    if device is None:
        return f"{shown} ms/GiB"
    to, fro = middle["copy to the host"], middle["copy from the host"]
    return (
        f"{shown} ms/GiB; of the limit: backup {to / middle['backup']:.2f}, "
        f"restore {fro / middle['restore']:.2f}"
    )


ANY_DRIVER = [
    ("pool opens", opens),
    ("pool release and resume", release_and_resume),
    ("pool cycles", many_cycles),
    ("pool out of memory", no_room_on_resume),
    ("pool times", times),
]
CHECKS = [
    *ANY_DRIVER,
    ("pool views", views_live),
    ("pool faults", released_memory_faults),
    ("pool and torch's allocator", beside_expandable_segments),
    ("engine on the GPU", engine_sleeps_and_wakes),
]
