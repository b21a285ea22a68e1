"""The kernels in torch operations, for installs without the native library: slow, equal bit for bit.

They also serve devices for which the native library has no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from hotbunk.rollout.errors import KernelFailed
from hotbunk.rollout.fingerprint import BLOCK, MASK, inner_keys, outer_key
from hotbunk.rollout.native_kernels import Code

_BLOCKS_AT_ONCE = 4096  # 16 MiB of words at a time bounds the scratch memory
_ELEMENTS_AT_ONCE = 1 << 20
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


@lru_cache(maxsize=8)
def _inner(device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(k) for k in inner_keys()], device=device)


def fingerprint(data: torch.Tensor, start: int) -> int:
    """Of flat uint8 ``data`` at byte ``start`` of its tensor."""
    block_bytes = 4 * BLOCK
    inner = _inner(data.device)
    first, lead = divmod(start, block_bytes)
    total, done, size = 0, 0, data.numel()
    while done < size:
        room = _BLOCKS_AT_ONCE * block_bytes - lead
        part = data[done : done + room]
        done += part.numel()
        tail = -(lead + part.numel()) % block_bytes
        if lead or tail or part.data_ptr() % 4:
            padded = data.new_zeros(lead + part.numel() + tail)
            padded[lead : lead + part.numel()] = part
            part = padded
        words = part.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        sums = words.view(-1, BLOCK).mul_(inner).sum(1)
        outer = [_signed(outer_key(first + n)) for n in range(sums.numel())]
        total += int(sums.mul_(torch.tensor(outer, device=data.device)).sum())
        first, lead = first + sums.numel(), 0
    return total & MASK


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Flat ``source`` into flat ``target``, cast as csrc/include/hotbunk_kernels.h says."""
    if source.dtype == target.dtype or not {source.dtype, target.dtype} <= set(_CAST):
        target.copy_(source)
        return
    for at in range(0, source.numel(), _ELEMENTS_AT_ONCE):
        part = source[at : at + _ELEMENTS_AT_ONCE]
        wide = part if part.dtype == torch.float32 else _widen(part)
        narrow = wide if target.dtype == torch.float32 else _narrow(wide, target.dtype)
        target[at : at + _ELEMENTS_AT_ONCE].copy_(narrow)


def _widen(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int16).to(torch.int32)
    if x.dtype == torch.bfloat16:
        return bits.bitwise_left_shift_(16).view(torch.float32)
    quiet = (bits & 0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return torch.where(x.isnan(), quiet, x.to(torch.float32).view(torch.int32)).view(torch.float32)


def _narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bits = x.view(torch.int32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype == torch.bfloat16:
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        quiet = bits >> 16 | 0x40
    else:
        rounded = x.to(torch.float16).view(torch.int16).to(torch.int32)
        quiet = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return torch.where(nan, quiet, rounded).to(torch.int16).view(dtype)


def check_overlaps(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """:raises KernelFailed: bytes of a target are another's, or some source's."""
    spans: list[tuple[int, int, int]] = []
    for target, source in pairs:
        for tensor, written in ((source, 0), (target, 1)):
            last = sum(
                (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            size = (last + 1) * tensor.element_size() if tensor.numel() else 0
            # Addresses of different devices never meet.
            base = tensor.data_ptr() + (_device(tensor) << 64)
            if size:
                spans.append((base, base + size, written))
    spans.sort()
    read, wrote = 0, 0  # where what was read, or written, ends
    for low, high, written in spans:
        if low < wrote or (written and low < read):
            raise KernelFailed("bytes that are written are used elsewhere", Code.OVERLAP)
        read, wrote = (read, max(wrote, high)) if written else (max(read, high), wrote)


def _device(tensor: torch.Tensor) -> int:
    return 0 if tensor.device.type == "cpu" else 1 + tensor.get_device()


def slots_of(kv: torch.Tensor, blocks: Sequence[int], size: int, tokens: int) -> torch.Tensor:
    """The slots of ``tokens`` tokens. :raises KernelFailed: a block outside the cache."""
    needed = -(-tokens // size)
    if needed > len(blocks):
        raise KernelFailed(f"{len(blocks)} blocks for {tokens} tokens", Code.OUT_OF_RANGE)
    if any(not 0 <= block < kv.shape[2] // size for block in blocks[:needed]):
        raise KernelFailed("a block lies outside the cache", Code.OUT_OF_RANGE)
    starts = torch.tensor(blocks[:needed], dtype=torch.long)[:, None] * size
    return (starts + torch.arange(size)).view(-1)[:tokens].to(kv.device)
