"""Fast forms of the kernels, over torch tensors. Equal bit for bit to their definitions."""

from __future__ import annotations

from functools import lru_cache

import torch

from hotbunk.rollout.fingerprint import BLOCK, MASK, inner_keys, outer_key

_BLOCKS_AT_ONCE = 4096  # 16 MiB of words at a time bounds the scratch memory


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


@lru_cache(maxsize=1)
def _inner() -> torch.Tensor:
    return torch.tensor([_signed(k) for k in inner_keys()], dtype=torch.int64)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a flat uint8 view; 0-d and empty included."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= 1:  # any stride is contiguous then, and only 1 can be viewed as bytes
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)


def fingerprint(tensor: torch.Tensor, start: int = 0) -> int:
    """The fingerprint of a tensor's bytes lying at byte ``start`` of a larger one.

    Defined in :mod:`hotbunk.rollout.fingerprint`.
    """
    data = as_bytes(tensor.contiguous())
    block_bytes = 4 * BLOCK
    first, lead = divmod(start, block_bytes)
    total, done, size = 0, 0, data.numel()
    while done < size:
        room = _BLOCKS_AT_ONCE * block_bytes - lead
        part = data[done : done + room]
        done += part.numel()
        tail = -(lead + part.numel()) % block_bytes
        if lead or tail or part.data_ptr() % 4:
            padded = torch.zeros(lead + part.numel() + tail, dtype=torch.uint8)
            padded[lead : lead + part.numel()] = part
            part = padded
        words = part.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        sums = words.view(-1, BLOCK).mul_(_inner()).sum(1)
        outer = torch.tensor(
            [_signed(outer_key(first + n)) for n in range(sums.numel())], dtype=torch.int64
        )
        total += int(sums.mul_(outer).sum())
        first, lead = first + sums.numel(), 0
    return total & MASK
