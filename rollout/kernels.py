"""The kernels over torch tensors: copies with casts, fingerprints, rows of a KV cache.

The native library does the work where it can (the host; CUDA devices when the library has its
CUDA kernels), and torch operations do elsewhere, equal bit for bit. Calls return when the work is
done, and check everything before they write the first byte.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Iterable, Sequence

import torch

from hotbunk.rollout import fallbacks, native
from hotbunk.rollout.errors import KernelFailed
from hotbunk.rollout.native_kernels import KV, Code, DType, Kernels, Run, copy_entry

_log = logging.getLogger(__name__)
_CAST = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
_HOST = torch.device("cpu")


@functools.cache
def native_kernels() -> Kernels | None:
    """The native kernels; None in a pure install."""
    try:
        return native.load().kernels
    except native.NativeUnavailable as error:
        if native.path().is_file():
            _log.warning("falling back to torch: %s", error)
        return None


def _native_for(device: torch.device) -> tuple[Kernels, Run | None] | None:
    """What runs natively on a device, and how; None: torch has to."""
    kernels = native_kernels()
    if kernels is None or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cpu":
        return kernels, None
    index = device.index
    if not _cuda_works(kernels, index):
        return None
    return kernels, Run(index, stream=torch.cuda.current_stream(index).cuda_stream)


@functools.lru_cache(maxsize=64)
def _cuda_works(kernels: Kernels, index: int) -> bool:
    why = kernels.why_not_cuda(index)
    if why:
        _log.warning("falling back to torch on cuda:%d: %s", index, why)
    return not why


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 view; 0-d and empty included."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # any stride is contiguous then, and only 1 can be viewed as bytes
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether torch negates or conjugates when it reads: the bytes are not the values then."""
    return tensor.is_neg() or tensor.is_conj()


def materialized(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and as they lie in memory; the tensor itself where it is so."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


# -- fingerprints -----------------------------------------------------------------------------


def fingerprint(tensor: torch.Tensor, start: int = 0) -> int:
    """The fingerprint of a tensor's bytes lying at byte ``start`` of a larger one.

    Defined in :mod:`hotbunk.rollout.fingerprint`.
    """
    return fingerprints([(tensor, start)])[0]


def fingerprints(pieces: Iterable[tuple[torch.Tensor, int]]) -> list[int]:
    """The fingerprints of pieces ``(tensor, start)``, all on one device."""
    held = [(materialized(tensor), start) for tensor, start in pieces]
    if not held:
        return []
    found = _native_for(held[0][0].device)
    if found is None:
        return [fallbacks.fingerprint(as_bytes(tensor), start) for tensor, start in held]
    kernels, run = found
    return kernels.fingerprints([(t.data_ptr(), t.nbytes, start) for t, start in held], run)


# -- copies -----------------------------------------------------------------------------------


class CopyPlan:
    """Copies between tensors whose memory stays where it is: prepared once, run as often as wanted.

    :param pairs: ``(target, source)`` with as many elements each; targets are contiguous. Element
        types may differ: f32, bf16 and f16 are cast by rounding to nearest even, with denormals
        kept, others as torch does it.
    :param cached: on the host, writes stay in the cache, however large: for targets that are read
        next, and fit (:attr:`~hotbunk.rollout.native_kernels.Kernels.cache`).
    :raises KernelFailed: a pair that does not fit together.

    The plan holds the tensors. It must not be run while their memory is released.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        *,
        cached: bool = False,
    ) -> None:
        self._cached = cached
        self._pairs = list(pairs)
        self._by_torch: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: dict[torch.device, array[int]] = {}
        host: list[int] = []
        on_host = native_kernels() is not None
        for target, source in self._pairs:
            if not target.is_contiguous() or _is_lazy(target):
                raise KernelFailed("a target is not contiguous", Code.BAD_ARGUMENT)
            size = source.nbytes
            if target.dtype is source.dtype and target.nbytes == size:
                # bytes on both sides; one line, since buckets of small tensors are many of these
                entry: tuple[int, int, int, int] | None
                entry = (source.data_ptr(), target.data_ptr(), size, 0)
            else:
                entry = _cast_entry(target, source)
            if entry is None or not source.is_contiguous() or _is_lazy(source):
                self._by_torch.append((target, source))
            elif on_host and target.is_cpu and source.is_cpu:
                host += entry
            elif target.device == source.device and _native_for(target.device) is not None:
                self._tables.setdefault(target.device, array("q")).extend(entry)
            else:
                self._by_torch.append((target, source))
        if host:
            self._tables[_HOST] = array("q", host)

    def let_go(self) -> bool:
        """Drop the tensors and keep the addresses; the caller sees to it that they stay valid.

        False: the plan needs its tensors, and still has them.
        """
        if self._by_torch or len(self._tables) > 1:
            return False
        self._pairs = []
        return True

    @torch.no_grad()
    def run(self) -> None:
        """Do all the copies, in any order.

        :raises KernelFailed: bytes that are written are used elsewhere; nothing was written.
        """
        if self._by_torch or len(self._tables) > 1:  # no single call sees them all
            fallbacks.check_overlaps(self._pairs)
        for device, table in self._tables.items():
            found = _native_for(device)
            assert found is not None, "it was there when the plan was made"
            kernels, run = found
            kernels.copy_many(table, run, cached=self._cached)
        for target, source in self._by_torch:
            fallbacks.copy(target.detach().reshape(-1), materialized(source).reshape(-1))


def _cast_entry(target: torch.Tensor, source: torch.Tensor) -> tuple[int, int, int, int] | None:
    """A native cast; None when only torch knows how."""
    count = source.numel()
    if target.numel() != count:
        raise KernelFailed(
            f"{tuple(source.shape)} does not go into {tuple(target.shape)}", Code.BAD_ARGUMENT
        )
    from_, to = _CAST.get(source.dtype), _CAST.get(target.dtype)
    if from_ is None or to is None:
        return None
    return copy_entry(source.data_ptr(), target.data_ptr(), count, from_, to)


def copy_many(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each ``(target, source)``, once; see :class:`CopyPlan`."""
    CopyPlan(pairs).run()


class PieceCopies:
    """Pieces of tensors on their way into one buffer: collected, then copied in one call.

    As :func:`copy_many` of views, without making the views: on the host a small tensor is copied
    faster than two views of it are made.

    :param buffer: flat uint8 tensor.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._address = buffer.data_ptr()
        self._kernels = native_kernels() if buffer.is_cpu else None
        self._table = array("q")
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._held: list[torch.Tensor] = []

    def add(self, source: torch.Tensor, dtype: torch.dtype, entry: tuple[int, int, int]) -> None:
        """A piece ``entry``: byte ``start`` of the tensor as ``dtype``, bytes, byte of the buffer."""
        start, nbytes, offset = entry
        if (
            self._kernels is not None
            and source.dtype is dtype
            and source.is_cpu
            and source.is_contiguous()
            and not _is_lazy(source)
        ):
            if nbytes:
                self._table.extend((source.data_ptr() + start, self._address + offset, nbytes, 0))
                self._held.append(source)
            return
        first, last = start // dtype.itemsize, (start + nbytes) // dtype.itemsize
        piece = self._buffer[offset : offset + nbytes].view(dtype)
        self._pairs.append((piece, materialized(source).reshape(-1)[first:last]))

    def run(self) -> None:
        """Copy, and let go of the tensors. :raises KernelFailed: a source lies in the buffer."""
        if self._table and self._kernels is not None:
            self._kernels.copy_many(self._table)
        if self._pairs:
            copy_many(self._pairs)
        self._table, self._pairs, self._held = array("q"), [], []

    def fingerprints(self, pieces: Sequence[tuple[int, int, int]]) -> list[int]:
        """Of pieces of the buffer as they were added: start, bytes, byte of the buffer."""
        if self._kernels is not None and pieces:
            return self._kernels.fingerprints([(self._address + o, n, s) for s, n, o in pieces])
        return fingerprints([(self._buffer[o : o + n], s) for s, n, o in pieces])


# -- KV ---------------------------------------------------------------------------------------


def _cache(kv: torch.Tensor) -> KV:
    if kv.dim() != 5 or not kv[:1, :1, :1].is_contiguous():
        raise KernelFailed(
            "a KV cache is [layers, 2, slots, heads, dim], with rows of its own", Code.BAD_ARGUMENT
        )
    size = kv.element_size()
    layers, planes, slots, heads, dim = kv.shape
    strides = (stride * size for stride in kv.stride()[:3])
    return KV(kv.data_ptr(), layers, planes, slots, heads * dim * size, *strides)


def _check_packed(kv: torch.Tensor, packed: torch.Tensor, tokens: int) -> None:
    wanted = (*kv.shape[:2], tokens, *kv.shape[3:])
    same = (packed.dtype, packed.device) == (kv.dtype, kv.device) and packed.is_contiguous()
    if tuple(packed.shape) != wanted or not same:
        raise KernelFailed(
            f"rows {tuple(packed.shape)} of {packed.dtype} do not fit {tokens} tokens of a cache "
            f"{tuple(kv.shape)} of {kv.dtype}",
            Code.BAD_ARGUMENT,
        )


def kv_gather(
    kv: torch.Tensor,
    blocks: Sequence[int],
    size: int,
    tokens: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the first ``tokens`` slots of a sequence's blocks hold.

    :param kv: [layers, 2, slots, heads, dim]; block ``b`` holds slots ``[b * size, (b+1) * size)``.
    :param out: where to put it; None: a new tensor.
    :returns: [layers, 2, tokens, heads, dim], contiguous.
    :raises KernelFailed: a block outside the cache, too few of them, or an ``out`` that is not one.
    """
    cache = _cache(kv)
    if out is None:
        shape = (*kv.shape[:2], max(tokens, 0), *kv.shape[3:])
        out = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    _check_packed(kv, out, tokens)
    found = _native_for(kv.device)
    if found is None:
        return out.copy_(kv[:, :, fallbacks.slots_of(kv, blocks, size, tokens)])
    kernels, run = found
    kernels.kv_gather(cache, blocks, size, tokens, out.data_ptr(), run)
    return out


def kv_scatter(kv: torch.Tensor, blocks: Sequence[int], size: int, packed: torch.Tensor) -> None:
    """Put ``packed`` [layers, 2, tokens, heads, dim] into the slots of a sequence's blocks.

    :raises KernelFailed: a block outside the cache or twice in the table, too few blocks, or
        another shape, type or device; nothing was written.
    """
    cache = _cache(kv)
    packed = packed.contiguous()
    tokens = packed.shape[2] if packed.dim() == 5 else 0
    _check_packed(kv, packed, tokens)
    found = _native_for(kv.device)
    if found is not None:
        kernels, run = found
        kernels.kv_scatter(cache, blocks, size, tokens, packed.data_ptr(), run)
        return
    slots = fallbacks.slots_of(kv, blocks, size, tokens)
    used = blocks[: -(-tokens // size)]
    if len(set(used)) != len(used):
        raise KernelFailed("a block comes twice", Code.OVERLAP)
    kv.index_copy_(2, slots, packed)


def kv_zero(kv: torch.Tensor, blocks: Sequence[int], size: int) -> None:
    """Zeros into every slot of the blocks. :raises KernelFailed: a block outside the cache."""
    cache = _cache(kv)
    tokens = len(blocks) * size
    found = _native_for(kv.device)
    if found is not None:
        kernels, run = found
        kernels.kv_zero(cache, blocks, size, tokens, run)
        return
    kv.index_fill_(2, fallbacks.slots_of(kv, blocks, size, tokens), 0)
