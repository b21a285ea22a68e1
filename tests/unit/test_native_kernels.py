"""Fingerprints, KV rows and threads of the native kernels: equal in every variant and in torch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbunk.rollout import fallbacks, kernels
from hotbunk.rollout.errors import KernelFailed
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.kernels import copy_many, fingerprint, fingerprints
from hotbunk.rollout.native_kernels import Code, Kernels, Run, Variant

needs_native = pytest.mark.skipif(
    kernels.native_kernels() is None, reason="installed without the native library"
)


def found() -> Kernels:
    native = kernels.native_kernels()
    assert native is not None
    return native


def variants() -> list[Variant]:
    native = kernels.native_kernels()
    return [v for v in Variant if v and native is not None and native.has(v)]


@pytest.fixture(params=["native", "torch"])
def face(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of doing the work, under the one face."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "native_kernels", lambda: None)
    elif kernels.native_kernels() is None:
        pytest.skip("installed without the native library")
    return str(request.param)


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


# -- fingerprints -----------------------------------------------------------------------------


@needs_native
@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=300) | st.integers(0, 20_000).map(os.urandom),
    start=st.integers(0, 10_000) | st.sampled_from([2**40 + 1, 2**61]),
    offset=st.integers(0, 65),
)
def test_every_variant_sums_alike(data: bytes, start: int, offset: int) -> None:
    want = fingerprint_bytes(data, start)
    memory = torch.frombuffer(bytearray(bytes(offset) + data + b"\xff"), dtype=torch.uint8)
    piece = (memory.data_ptr() + offset, len(data), start)
    for variant in variants():
        assert found().fingerprints([piece], Run(variant=variant)) == [want], variant
    assert fallbacks.fingerprint(memory[offset : offset + len(data)], start) == want


def test_many_pieces_at_once(face: str) -> None:
    data = random_bits(3 << 20)
    cuts = sorted({0, 1, 4095, 4096, 700_001, 2 << 20, 3 << 20})
    pieces = [(data[a:b], a) for a, b in itertools.pairwise(cuts)]
    one_by_one = [fingerprint(piece, start) for piece, start in pieces]
    assert fingerprints(pieces) == one_by_one
    assert sum(one_by_one) % 2**64 == fallbacks.fingerprint(data, 0)
    assert fingerprints([]) == []


# -- threads ----------------------------------------------------------------------------------


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = found().threads
    yield
    found().set_threads(before)


@needs_native
@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads(threads: int) -> None:
    found().set_threads(threads)
    assert found().threads == threads
    data = random_bits((9 << 20) + 5)
    out = torch.empty_like(data)
    copy_many([(out, data)])
    assert torch.equal(out, data)
    assert fingerprint(data) == fallbacks.fingerprint(data, 0)


@needs_native
@pytest.mark.usefixtures("restored_threads")
def test_calls_at_the_same_time() -> None:
    found().set_threads(3)
    data = [random_bits(2_000_000 + n, seed=n) for n in range(6)]
    want = [fallbacks.fingerprint(one, 0) for one in data]

    def work(n: int) -> bool:
        out = torch.empty_like(data[n])
        copy_many([(out, data[n])])
        return torch.equal(out, data[n]) and fingerprint(out) == want[n]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [n % 6 for n in range(60)]))


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        text=True,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = "from hotbunk.rollout import native; k = native.load().kernels; print(k.variant.name, k.threads)"


@needs_native
def test_the_environment_chooses_variant_and_threads() -> None:
    assert run_python(SHOW, HOTBUNK_KERNELS="scalar", HOTBUNK_KERNEL_THREADS="3") == "SCALAR 3"
    plain = run_python(SHOW, HOTBUNK_KERNELS="no such thing", HOTBUNK_KERNEL_THREADS="0")
    best = max(variants())
    assert plain == f"{best.name} {min(len(os.sched_getaffinity(0)), 4)}"


@needs_native
def test_a_forked_child_has_its_own_threads() -> None:
    code = """
import os
from hotbunk.rollout import native
k = native.load().kernels
k.set_threads(4)
data = bytearray(os.urandom(4 << 20))
import ctypes
at = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
want = k.fingerprints([(at, len(data), 0)])
child = os.fork()
if not child:
    os._exit(0 if k.fingerprints([(at, len(data), 0)]) == want and k.threads == 4 else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code) == "0"


# -- KV ---------------------------------------------------------------------------------------


def caches() -> Iterator[torch.Tensor]:
    whole = torch.randn(3, 2, 64, 2, 5).to(torch.bfloat16)
    yield whole
    yield torch.randn(2, 2, 64, 1, 1)
    yield torch.randn(2, 64, 2, 3, 4).transpose(1, 2)  # planes inside of slots
    yield torch.randn(2, 2, 64, 2, 7)[:, :, :, :1]  # rows with gaps between them


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    "size, blocks, tokens", [(4, [3, 4, 0, 15], 14), (1, [9, 2], 2), (16, [1], 0)]
)
def test_rows_of_a_cache(face: str, which: int, size: int, blocks: list[int], tokens: int) -> None:
    kv = list(caches())[which]
    before = kv.clone()
    slots = torch.tensor([b * size + i for b in blocks for i in range(size)])
    packed = kernels.kv_gather(kv, blocks, size, tokens)
    assert torch.equal(packed, before[:, :, slots[:tokens]])
    assert packed.is_contiguous()
    out = torch.empty_like(packed)
    assert kernels.kv_gather(kv, blocks, size, tokens, out) is out
    assert torch.equal(out, packed)
    assert torch.equal(kv, before)
    kernels.kv_zero(kv, blocks, size)
    want = before.clone()
    want[:, :, slots] = 0
    assert torch.equal(kv, want)
    kernels.kv_scatter(kv, blocks, size, packed)
    want[:, :, slots[:tokens]] = before[:, :, slots[:tokens]]
    assert torch.equal(kv, want)


@needs_native
@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 9), row=st.integers(1, 40))
def test_every_variant_moves_the_same_rows(data: st.DataObject, size: int, row: int) -> None:
    slots = 12 * size + data.draw(st.integers(0, size - 1))
    blocks = data.draw(st.lists(st.integers(0, 11), max_size=12, unique=True))
    tokens = data.draw(st.integers(0, len(blocks) * size))
    kv = random_bits(2 * 2 * slots * row).view(2, 2, slots, 1, row)
    index = torch.tensor([b * size + i for b in blocks for i in range(size)], dtype=torch.long)
    cache = kernels._cache(kv)
    packed = torch.empty(2, 2, tokens, 1, row, dtype=torch.uint8)
    before = kv.clone()
    for variant in variants():
        run = Run(variant=variant)
        found().kv_gather(cache, blocks, size, tokens, packed.data_ptr(), run)
        assert torch.equal(packed, before[:, :, index[:tokens]])
        found().kv_zero(cache, blocks, size, tokens, run)
        assert torch.equal(kv, before.clone().index_fill_(2, index[:tokens], 0))
        found().kv_scatter(cache, blocks, size, tokens, packed.data_ptr(), run)
        assert torch.equal(kv, before)


def test_rows_that_cannot_be_meant(face: str) -> None:
    kv = torch.randn(2, 2, 32, 2, 3)
    before = kv.clone()
    rows = torch.randn(2, 2, 8, 2, 3)
    for blocks, code in (
        ([1, 8], Code.OUT_OF_RANGE),
        ([-1, 1], Code.OUT_OF_RANGE),
        ([1], Code.OUT_OF_RANGE),
        ([1, 1], Code.OVERLAP),
    ):
        with pytest.raises(KernelFailed) as caught:
            kernels.kv_scatter(kv, blocks, 4, rows)
        assert caught.value.code == code
    for wrong in (rows[0], rows.double(), rows[:, :, :, :1]):
        with pytest.raises(KernelFailed):
            kernels.kv_scatter(kv, [1, 2], 4, wrong)
    with pytest.raises(KernelFailed):
        kernels.kv_zero(kv, [8], 4)
    with pytest.raises(KernelFailed):
        kernels.kv_gather(kv[0], [0], 4, 4)
    with pytest.raises(KernelFailed):
        kernels.kv_gather(kv.transpose(3, 4), [0], 4, 4)
    with pytest.raises(KernelFailed):
        kernels.kv_gather(kv, [0], 4, 5)
    assert torch.equal(kv, before)
