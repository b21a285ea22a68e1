"""Weights that tests send, the same in every process."""

from __future__ import annotations

from typing import Any

import torch

from hotbunk.rollout.contract import Manifest, Version
from hotbunk.rollout.fingerprint import KIND

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
]


def _random(draw: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=draw) * 20).to(dtype)


def simple(seed: int, tensors: int = 12, rows: int = 40) -> dict[str, torch.Tensor]:
    """A dozen float32 tensors of about 10 KiB."""
    draw = torch.Generator().manual_seed(seed)
    return {f"w{n}": torch.randn(rows, 64, generator=draw) for n in range(tensors)}


def packing_cases() -> dict[str, torch.Tensor]:
    """Everything that must be packed exactly, in one stream."""
    draw = torch.Generator().manual_seed(7)
    f32 = torch.float32
    whole = _random(draw, (12, 10), f32)
    tied = _random(draw, (50, 7), f32)
    named: dict[str, torch.Tensor] = {
        "larger than a bucket": _random(draw, (99, 33), f32),
        "a row wider than a bucket": _random(draw, (1, 5000), f32),
        "0-d": torch.tensor(3.5),
        "0-d int": torch.tensor(7),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 9, dtype=torch.bfloat16),
        "transposed": whole.t(),
        "sliced": whole[2:9:3, 1:7],
        "offset": whole.view(-1)[3:50],
        "expanded": whole[0].expand(40, 10),
        "a scalar expanded": torch.tensor(1.5).expand(33, 3),
        "permuted": _random(draw, (2, 3, 4, 5), f32).permute(3, 1, 0, 2),
        "tied": tied,
        "tied again": tied,
        "odd values": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]),
    }
    for n in (1, 3, 17):
        for dtype in (*DTYPES, *reversed(DTYPES)):
            named[f"{len(named)} {dtype} {n}"] = _random(draw, (n,), dtype)
    return named


def manifest_of(
    source: Any, *, step: int = 1, bucket_bytes: int = 4096, fingerprint: str = KIND, **kw: Any
) -> Manifest:
    return Manifest(
        Version(0, step),
        source.specs(),
        bucket_bytes=bucket_bytes,
        fingerprint=fingerprint,
        **kw,
    )
