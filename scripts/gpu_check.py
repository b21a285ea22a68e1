"""What gpu_check.sh runs: every CUDA kernel against exact references, the pool and the reference
engine (gpu_check_pool.py), memory that processes share (gpu_check_ipc.py), and times, in one table.

References are torch operations on the host (the fallbacks, which the unit tests hold to the
definitions). Times are medians over CUDA events around whole calls, launch and waiting included.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

import torch
from gpu_check_ipc import CHECKS as IPC
from gpu_check_pool import CHECKS

from hotbunk.rollout import fallbacks, kernels, native
from hotbunk.rollout.errors import HotbunkError, KernelFailed

DEVICE = torch.device("cuda", 0)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIB = 1 << 20
rows: list[tuple[str, str, str]] = []


class NotHere(Exception):
    """This machine lacks what a check needs, and nothing is downloaded."""


def check(name: str, call: Callable[[], str]) -> None:
    """Run one check; what it returns is shown."""
    began = time.perf_counter()
    try:
        detail, result = call(), "ok"
    except ModuleNotFoundError as error:
        detail, result = f"{error.name} is not installed", "skipped"
    except NotHere as error:
        detail, result = str(error), "skipped"
    except (
        AssertionError,
        HotbunkError,
        RuntimeError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        traceback.print_exc()
        detail, result = f"{type(error).__name__}: {error}".splitlines()[0], "FAILED"
    rows.append((name, result, f"{detail} ({time.perf_counter() - began:.1f} s)"))
    print(*rows[-1], sep="  ", flush=True)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        kernels.as_bytes(a.cpu().contiguous()), kernels.as_bytes(b.cpu().contiguous())
    )


def bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits as elements: NaNs, infinities and denormals are among them."""
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


# -- right ------------------------------------------------------------------------------------


def kernels_load() -> str:
    found = native.load()
    if not list(found.path.parent.glob("*.fatbin")):
        raise NotHere("they were not built: no nvcc")
    why = found.kernels.why_not_cuda(0)
    assert not why, why
    return f"{found.path.parent}"


def casts() -> str:
    """Every 16-bit pattern, and 16Mi f32 ones; any offset and count."""
    n = 0
    for source in FLOATS:
        whole = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
        data = bits(16 * MIB, source) if source == torch.float32 else whole.view(source)
        for target in FLOATS:
            for first, count in ((0, data.numel()), (1, 1000), (3, 65), (8, 4096), (5, 1)):
                part = data[first : first + count]
                want = torch.empty(count, dtype=target)
                fallbacks.copy(want, part)
                got = torch.full((count + 24,), 1, dtype=target, device=DEVICE)
                moved = data.to(DEVICE)[first : first + count]
                kernels.copy_many([(got[7 : 7 + count], moved)])
                assert same(got[7 : 7 + count], want), f"{source} to {target}, {count} from {first}"
                edges = torch.cat([got[:7], got[7 + count :]]).float()
                assert bool((edges == 1).all()), "bytes around the target changed"
                n += 1
    return f"{n} copies"


def tables() -> str:
    """18 thousand copies in one call, bytes at any address, and refused overlaps."""
    source = bits(64 * MIB, torch.uint8).to(DEVICE)
    target = torch.zeros_like(source)
    rng, pairs, at = random.Random(1), [], 0
    while len(pairs) < 18_000 and at + 9000 < source.numel():
        size = rng.randrange(0, 6000)
        pairs.append((target[at : at + size], source[at + 16 : at + 16 + size]))
        at += size + rng.randrange(0, 40)
    kernels.copy_many(pairs)
    want = torch.zeros_like(source)
    for t, s in pairs:
        first = t.data_ptr() - target.data_ptr()
        want[first : first + t.numel()] = s
    assert torch.equal(target, want)
    try:
        kernels.copy_many([(source[5:15], source[:10])])
    except KernelFailed:
        return f"{len(pairs)} copies"
    raise AssertionError("an overlap was not refused")


def fingerprints() -> str:
    n = 0
    for size in (0, 1, 3, 4, 4095, 4096, 4097, 262_143, 262_145, 5 * MIB + 3):
        for start in (0, 1, 4095, 4096, 10**9 + 1):
            for offset in (0, 1, 4, 16):
                data = bits(size + offset, torch.uint8)[offset:]
                where = bits(size + offset, torch.uint8).to(DEVICE)[offset:].copy_(data)
                want = fallbacks.fingerprint(data, start)
                assert kernels.fingerprint(where, start) == want, (size, start, offset)
                n += 1
    many = [(torch.randn(k, device=DEVICE), 4 * k) for k in range(0, 3000, 7)]
    host = [fallbacks.fingerprint(kernels.as_bytes(t.cpu()), s) for t, s in many]
    assert kernels.fingerprints(many) == host
    return f"{n} pieces, and {len(many)} in one call"


def kv_rows() -> str:
    n = 0
    for dtype, shape in (
        (torch.bfloat16, (4, 2, 512, 3, 64)),
        (torch.float16, (2, 2, 512, 1, 5)),
        (torch.uint8, (3, 2, 512, 2, 7)),
    ):
        for size in (1, 4, 16):
            host = torch.randn(shape).to(dtype)
            kv = host.to(DEVICE)
            blocks = torch.randperm(512 // size)[:11].tolist()
            tokens = 11 * size - (size > 1)
            slots = torch.tensor([b * size + i for b in blocks for i in range(size)])
            packed = kernels.kv_gather(kv, blocks, size, tokens)
            assert same(packed, host[:, :, slots[:tokens]])
            kernels.kv_zero(kv, blocks, size)
            want = host.clone()
            want[:, :, slots] = 0
            assert same(kv, want)
            kernels.kv_scatter(kv, blocks, size, packed)
            want[:, :, slots[:tokens]] = host[:, :, slots[:tokens]]
            assert same(kv, want)
            n += 3
    return f"{n} calls"


def streams() -> str:
    """A call sees what its stream wrote before it."""
    with torch.cuda.stream(torch.cuda.Stream()):
        data = torch.zeros(64 * MIB, dtype=torch.uint8, device=DEVICE)
        for _ in range(50):
            data.add_(1)
        found = kernels.fingerprint(data)
    assert found == fallbacks.fingerprint(torch.full((64 * MIB,), 50, dtype=torch.uint8), 0)
    return "after 50 writes on a stream of its own"


# -- fast -------------------------------------------------------------------------------------


def rate(nbytes: int, call: Callable[[], object], repeats: int = 9) -> float:
    """GB/s, the median."""
    call()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return nbytes / statistics.median(seconds) / 1e9


def compare(nbytes: int, ours: Callable[[], object], peer: Callable[[], object]) -> str:
    """Written bytes a second; the limit is one copy inside the device, counted the same way."""
    source = torch.empty(1024 * MIB, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    limit = rate(source.nbytes, lambda: target.copy_(source))
    mine, theirs = rate(nbytes, ours), rate(nbytes, peer)
    return (
        f"{mine:.0f} GB/s; torch {theirs:.0f} (x {mine / theirs:.2f}); "
        f"one copy {limit:.0f} ({mine / limit:.2f} of it)"
    )


def time_copy_small() -> str:
    buffer = torch.empty(18_000 * 1024, device=DEVICE)
    sources = [torch.randn(1024, device=DEVICE) for _ in range(18_000)]
    targets = list(buffer.split(1024))
    plan = kernels.CopyPlan(zip(targets, sources, strict=True))
    return compare(buffer.nbytes, plan.run, lambda: torch._foreach_copy_(targets, sources))


def time_copy_cast() -> str:
    source = torch.randn(512 * MIB, device=DEVICE)
    target = torch.empty(512 * MIB, dtype=torch.bfloat16, device=DEVICE)
    plan = kernels.CopyPlan([(target, source)])
    return compare(target.nbytes, plan.run, lambda: target.copy_(source))


def time_fingerprint() -> str:
    data = torch.randn(512 * MIB, device=DEVICE)
    words = data.view(torch.int64)
    peer = getattr(torch, "hash_tensor", torch.sum)
    return compare(data.nbytes, lambda: kernels.fingerprint(data), lambda: peer(words))


def time_kv() -> str:
    kv = torch.randn(32, 2, 65_536, 8, 64, device=DEVICE).to(torch.bfloat16)
    blocks = torch.randperm(4096)[:2048].tolist()
    slots = fallbacks.slots_of(kv, blocks, 16, 2048 * 16)
    out = kernels.kv_gather(kv, blocks, 16, 2048 * 16)
    parts = {
        "gather": (
            lambda: kernels.kv_gather(kv, blocks, 16, 2048 * 16, out),
            lambda: torch.index_select(kv, 2, slots, out=out),
        ),
        "scatter": (
            lambda: kernels.kv_scatter(kv, blocks, 16, out),
            lambda: kv.index_copy_(2, slots, out),
        ),
        "zero": (lambda: kernels.kv_zero(kv, blocks, 16), lambda: kv.index_fill_(2, slots, 0)),
    }
    shown = [f"{name} {compare(out.nbytes, *calls)}" for name, calls in parts.items()]
    return " | ".join(shown)


def main() -> int:
    """0: everything that could be checked holds."""
    if not torch.cuda.is_available():
        print("no GPU that torch can see: nothing to check")
        return 0
    torch.manual_seed(0)
    began = time.perf_counter()
    name = torch.cuda.get_device_name(0)
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    check("kernels load", kernels_load)
    if rows[-1][1] == "ok":
        for one in (casts, tables, fingerprints, kv_rows, streams):
            check(one.__name__.replace("_", " "), one)
        for one in (time_copy_small, time_copy_cast, time_fingerprint, time_kv):
            check(one.__name__.replace("_", " "), one)
    for title, call in (*CHECKS, *IPC):
        check(title, call)
    width = max(len(r[0]) for r in rows)
    print(f"\n{name}: {time.perf_counter() - began:.0f} s")
    for title, result, detail in rows:
        print(f"{title:{width}}  {result:7}  {detail}")
    return 1 if any(result == "FAILED" for _, result, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
