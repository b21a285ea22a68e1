"""The kernels against torch doing the same, on fresh random data and the same number of threads."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from hotbunk.benchmarks.rows import Row, rate_row
from hotbunk.rollout import fallbacks, kernels
from hotbunk.rollout.errors import Unsupported

MIB = 1 << 20
LIMIT_BYTES = 128 * MIB
Limit = tuple[int, Callable[[], object]]

# A model of 135M parameters: 30 layers, 576 wide, 272 tensors.
_LAYER = [
    (576, 576),
    (192, 576),
    (192, 576),
    (576, 576),
    (1536, 576),
    (1536, 576),
    (576, 1536),
    (576,),
    (576,),
]
SHAPES_135M = [(49152, 576), *(_LAYER * 30), (576,)]


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
        source = torch.randint(0, 256, (LIMIT_BYTES,), dtype=torch.uint8)
        target = torch.empty_like(source)
        plan = kernels.CopyPlan([(target, source)])  # large: it goes around the cache
        limit = (LIMIT_BYTES, plan.run)
        for part in (_small, _model, _fingerprint, _kv):
            tell(part.__name__.strip("_"))
            rows += part(limit)
    finally:
        torch.set_num_threads(before)
    settings = (
        f"{native.threads} threads on both sides, {native.variant.name}, torch {torch.__version__} "
        f"({torch.backends.cpu.get_cpu_capability()}); the limit is one non-temporal copy"
    )
    return rows, settings


def _loop(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def copy() -> None:
        for target, source in pairs:
            target.copy_(source)

    return copy


def _small(limit: Limit) -> list[Row]:
    """18 thousand tensors into one buffer: of 2 KiB, as a norm of 1024 in bf16 is, and of 4 KiB."""
    rows = []
    for suffix, size in (("", 1024), ("_4k", 2048)):
        count = 18_000
        sources = [torch.randn(size).to(torch.bfloat16) for _ in range(count)]
        buffer = torch.empty(count * size, dtype=torch.bfloat16)
        rows += _small_of(f"copy_many_small{suffix}", sources, buffer, limit)
    return rows


def _small_of(
    name: str, sources: list[torch.Tensor], buffer: torch.Tensor, limit: Limit
) -> list[Row]:
    targets = list(buffer.view(len(sources), -1).unbind())
    pairs = list(zip(targets, sources, strict=True))
    plan = kernels.CopyPlan(pairs)
    nbytes = buffer.nbytes

    def foreach() -> None:
        torch._foreach_copy_(targets, sources)

    def cat() -> None:
        torch.cat(sources, out=buffer)

    def unplanned() -> None:
        kernels.copy_many(pairs)

    anew = "`copy_`, one by one; ours plans anew each time"
    return [
        rate_row(name, nbytes, plan.run, _loop(pairs), "`copy_`, one by one", limit),
        rate_row(f"{name}_foreach", nbytes, plan.run, foreach, "`torch._foreach_copy_`", limit),
        rate_row(f"{name}_cat", nbytes, plan.run, cat, "`torch.cat(out=)`", limit),
        rate_row(f"{name}_unplanned", nbytes, unplanned, _loop(pairs), anew, limit),
    ]


def _model(limit: Limit) -> list[Row]:
    """The tensors of a 135M model into one buffer, as they are and cast."""
    rows = []
    for suffix, source_type in (("", torch.bfloat16), ("_cast", torch.float32)):
        sources = [torch.randn(shape).to(source_type) for shape in SHAPES_135M]
        buffer = torch.empty(sum(s.numel() for s in sources), dtype=torch.bfloat16)
        pairs, at = [], 0
        for one in sources:
            pairs.append((buffer[at : at + one.numel()], one.view(-1)))
            at += one.numel()
        plan = kernels.CopyPlan(pairs)
        what = "`copy_`, one by one" + (", f32 to bf16" if suffix else "")
        name = f"copy_many_135m{suffix}"
        rows.append(rate_row(name, buffer.nbytes, plan.run, _loop(pairs), what, limit))
    return rows


def _fingerprint(limit: Limit) -> list[Row]:
    """64Mi bf16 elements."""
    data = torch.randn(64 * MIB).to(torch.bfloat16)
    name = "fingerprint_128mib"

    def ours() -> None:
        kernels.fingerprint(data)

    hash_tensor = getattr(torch, "hash_tensor", None)
    if hash_tensor is None:
        raw = kernels.as_bytes(data)
        peer = "our fingerprint in torch operations: this torch has no `hash_tensor`"
        return [
            rate_row(name, data.nbytes, ours, lambda: fallbacks.fingerprint(raw, 0), peer, limit)
        ]
    words = data.view(torch.int64)
    by_words = "`torch.hash_tensor` of the bytes as int64"
    return [
        rate_row(name, data.nbytes, ours, lambda: hash_tensor(data), "`torch.hash_tensor`", limit),
        rate_row(f"{name}_int64", data.nbytes, ours, lambda: hash_tensor(words), by_words, limit),
    ]


def _kv(limit: Limit) -> list[Row]:
    """Half of the blocks, in random order, of a cache of 180 MiB in huge pages."""
    layers, slots, heads, dim, size = 30, 16_384, 3, 64, 16
    nbytes = layers * 2 * slots * heads * dim * 2
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    kv = torch.frombuffer(memory, dtype=torch.bfloat16).view(layers, 2, slots, heads, dim)
    kv.copy_(torch.randn(kv.shape))
    blocks = torch.randperm(slots // size)[: slots // size // 2].tolist()
    tokens = len(blocks) * size
    index = fallbacks.slots_of(kv, blocks, size, tokens)
    packed = torch.empty(layers, 2, tokens, heads, dim, dtype=kv.dtype).copy_(kv[:, :, index])
    half = packed.nbytes

    def zero_by_index() -> None:
        kv[:, :, index] = 0

    return [
        rate_row(
            "kv_gather",
            half,
            lambda: kernels.kv_gather(kv, blocks, size, tokens, packed),
            lambda: torch.index_select(kv, 2, index, out=packed),
            "`index_select(out=)`",
            limit,
        ),
        rate_row(
            "kv_scatter",
            half,
            lambda: kernels.kv_scatter(kv, blocks, size, packed),
            lambda: kv.index_copy_(2, index, packed),
            "`index_copy_`",
            limit,
        ),
        rate_row(
            "kv_zero",
            half,
            lambda: kernels.kv_zero(kv, blocks, size),
            zero_by_index,
            "`kv[:, :, slots] = 0`",
            limit,
        ),
        rate_row(
            "kv_zero_fill",
            half,
            lambda: kernels.kv_zero(kv, blocks, size),
            lambda: kv.index_fill_(2, index, 0),
            "`index_fill_`",
            limit,
        ),
    ]
