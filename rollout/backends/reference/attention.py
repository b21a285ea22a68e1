"""Paged attention through transformers' ``AttentionInterface``.

A step's tokens lie in one row: single tokens of sequences under way first, then pieces of
prompts. Keys and values are written to their slots of the KV arena, and gathered from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hotbunk.rollout.backends.reference.scheduler import Plan

NAME = "hotbunk_paged"


@dataclass(slots=True)
class PrefillPiece:
    """Tokens ``[begin, end)`` of the row attend to ``slots``; ``mask`` [count, context] is causal."""

    begin: int
    end: int
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(slots=True)
class StepContext:
    """Where this step's keys and values go and come from.

    ``kv`` is [layers, 2 (keys, values), slots, kv_heads, head_dim]. ``slots`` [tokens] are those
    written. ``decode_slots`` [sequences, longest] and ``decode_mask`` [sequences, 1, 1, longest]
    are those read by the first ``decode_slots.shape[0]`` tokens.
    """

    kv: torch.Tensor
    slots: torch.Tensor
    decode_slots: torch.Tensor
    decode_mask: torch.Tensor
    prefill: list[PrefillPiece]

    @staticmethod
    def of(plan: Plan, kv: torch.Tensor, block_size: int) -> StepContext:
        """Lay out a plan."""
        within = torch.arange(block_size)

        def all_slots(blocks: list[int]) -> torch.Tensor:
            return (torch.tensor(blocks)[:, None] * block_size + within).view(-1)

        written: list[torch.Tensor] = []
        width = max((c.start + 1 for c in plan.decode), default=0)
        blocks = -(-width // block_size)
        decode_slots = torch.empty((0, 0), dtype=torch.long)
        decode_mask = torch.empty((0, 1, 1, 0), dtype=torch.bool)
        if plan.decode:
            table = torch.tensor(
                [
                    c.sequence.blocks[:blocks] + [0] * (blocks - len(c.sequence.blocks))
                    for c in plan.decode
                ]
            )
            decode_slots = (table[:, :, None] * block_size + within).view(len(plan.decode), -1)
            decode_slots = decode_slots[:, :width]
            last = torch.tensor([c.start for c in plan.decode])
            seen = torch.arange(width)[None] <= last[:, None]
            # Masked places read the sequence's own first slot: a mask does not stop a NaN that
            # another request, or nobody yet, has in the slots behind the end.
            decode_slots = torch.where(seen, decode_slots, decode_slots[:, :1])
            decode_mask = seen[:, None, None]
            written.append(decode_slots.gather(1, last[:, None]).view(-1))
        pieces: list[PrefillPiece] = []
        begin = len(plan.decode)
        for chunk in plan.prefill:
            stop = chunk.start + chunk.count
            slots = all_slots(chunk.sequence.blocks)[:stop]
            rows = torch.arange(chunk.start, stop)
            mask = torch.arange(stop)[None] <= rows[:, None]
            pieces.append(PrefillPiece(begin, begin + chunk.count, slots, mask))
            written.append(slots[chunk.start :])
            begin += chunk.count
        laid = StepContext(kv, torch.cat(written), decode_slots, decode_mask, pieces)
        return laid if kv.is_cpu else laid.on(kv.device)

    def on(self, device: torch.device) -> StepContext:
        """The same plan on the device where the cache is; it is laid out on the host."""
        pieces = [
            PrefillPiece(p.begin, p.end, p.slots.to(device), p.mask.to(device))
            for p in self.prefill
        ]
        return StepContext(
            self.kv,
            self.slots.to(device),
            self.decode_slots.to(device),
            self.decode_mask.to(device),
            pieces,
        )


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    hotbunk_step: StepContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [1, heads, tokens, head_dim], ``key`` and ``value`` [1, kv_heads, tokens, head_dim].

    :returns: [1, tokens, heads, head_dim], and no attention weights.
    """
    keys, values = hotbunk_step.kv[module.layer_idx]
    keys.index_copy_(0, hotbunk_step.slots, key[0].transpose(0, 1))
    values.index_copy_(0, hotbunk_step.slots, value[0].transpose(0, 1))
    grouped = query.shape[1] != key.shape[1]
    out: list[torch.Tensor] = []
    decodes = hotbunk_step.decode_slots.shape[0]
    if decodes:
        # Heads that share keys are laid along the query axis: nothing is copied per head.
        heads, dim = query.shape[1], query.shape[3]
        kv_heads = key.shape[1]
        seen = functional.scaled_dot_product_attention(
            query[0, :, :decodes].transpose(0, 1).reshape(decodes, kv_heads, -1, dim),
            keys[hotbunk_step.decode_slots].permute(0, 2, 1, 3),
            values[hotbunk_step.decode_slots].permute(0, 2, 1, 3),
            attn_mask=hotbunk_step.decode_mask,
            scale=scaling,
        )
        out.append(seen.reshape(decodes, heads, dim))
    for piece in hotbunk_step.prefill:
        seen = functional.scaled_dot_product_attention(
            query[:, :, piece.begin : piece.end],
            keys[piece.slots].transpose(0, 1)[None],
            values[piece.slots].transpose(0, 1)[None],
            attn_mask=piece.mask[None, None],
            scale=scaling,
            enable_gqa=grouped,
        )
        out.append(seen[0].transpose(0, 1))
    return torch.cat(out)[None], None


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
