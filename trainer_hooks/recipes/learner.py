"""The trainer's side of GRPO: a torch model, AdamW, and one step over a batch.

It knows nothing of engines; its memory lies in a pool, so that it can be given away.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from hotbunk.checkpoint_engine.source import TensorSource, module_source
from hotbunk.rollout.arena import MemoryPool
from hotbunk.trainer_hooks.recipes.config import Overdue, TrainerConfig
from hotbunk.trainer_hooks.recipes.grpo import (
    Batch,
    all_logprobs,
    entropies,
    grpo_loss,
    importance_weights,
    of_tokens,
    overdue_scale,
    token_logprobs,
)
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.share import PooledTrainer


@dataclass(frozen=True)
class StepStats:
    """What a training step saw, as means over its optimizer steps.

    ``logprob_diff_max`` is between rollout and trainer, over the ``fresh`` tokens: those that the
    very version being trained has made; NaN where there are none. ``weight``: mean importance
    weight of a token; ``truncated``: the share of tokens whose weight was cut to the cap. ``entropy``:
    of a token's distribution, in nats, estimated from the tokens that were drawn.
    """

    loss: float
    grad_norm: float
    kl: float
    clipped: float
    entropy: float
    weight: float
    truncated: float
    fresh: int
    logprob_diff_max: float
    logprob_diff_mean: float


@dataclass(frozen=True)
class _Piece:
    """What one optimizer step saw."""

    loss: float = 0.0
    grad_norm: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    weight: float = 0.0
    truncated: float = 0.0


class Learner:
    """Owns the policy being trained. ``step`` may run in any thread, one at a time."""

    def __init__(self, model_dir: Path, config: TrainerConfig, pool: MemoryPool) -> None:
        self.config = config
        self.model: Any = load_model(model_dir, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self._reference: Any = None
        if config.kl_coef > 0:
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
        self.share = PooledTrainer(self.model, self.optimizer, pool, offload=config.offload)
        self.source: TensorSource = module_source(self.model)

    def step(self, batch: Batch, number: int) -> StepStats:
        """One step over a batch: ``epochs`` times ``mini_batches`` optimizer steps.

        :param number: of the step, from 0; the learning rate warms up over the first few.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, (number + 1) / max(config.warmup, 1))
        once = config.epochs * config.mini_batches == 1
        # With a single optimizer step the forward pass that trains also compares; with several,
        # the log-probs before the first of them are taken beforehand.
        before = None if once else self._logprobs(batch)
        pieces_seen: list[_Piece] = []
        seen = torch.zeros_like(batch.behaviour)
        for epoch in range(config.epochs):
            order = torch.randperm(
                len(batch.ids), generator=torch.Generator().manual_seed(number * 1000 + epoch)
            )
            if once:
                order = torch.arange(len(batch.ids))
            pieces = order.chunk(config.mini_batches)
            pieces_seen.extend(self._update(batch, piece, before, seen) for piece in pieces)
        ours = seen if before is None else before
        means = {
            field.name: sum(getattr(piece, field.name) for piece in pieces_seen) / len(pieces_seen)
            for field in fields(_Piece)
        }
        fresh = batch.fresh
        gap, count = (ours - batch.behaviour).abs() * fresh, int(fresh.sum())
        return StepStats(
            **means,
            fresh=count,
            logprob_diff_max=float(gap.max()) if count else math.nan,
            logprob_diff_mean=float(gap.sum()) / count if count else math.nan,
        )

    def _update(
        self,
        batch: Batch,
        chosen: torch.Tensor,
        before: torch.Tensor | None,
        seen: torch.Tensor,
    ) -> _Piece:
        config = self.config
        tokens = float(batch.mask[chosen].sum())
        self.optimizer.zero_grad(set_to_none=False)
        loss = kl = clipped = entropy = weight = truncated = 0.0
        for rows in torch.split(chosen, config.micro_batch):
            part = batch.rows(rows)
            every = all_logprobs(self.model, part.ids, config.temperature)
            ours = of_tokens(every, part.ids)
            seen[rows] = ours.detach()
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference = token_logprobs(self._reference, part.ids, config.temperature)
            old, weights = part.behaviour if before is None else before[rows], None
            if config.decoupled:
                old = seen[rows] if before is None else before[rows]
                weights = importance_weights(old, part.behaviour, config.weight_cap)
                truncated += float(((weights >= config.weight_cap) * part.mask).sum()) / tokens
                if config.overdue is Overdue.REWEIGHT:
                    weights = weights * overdue_scale(part.staleness, config.max_staleness)
            result = grpo_loss(
                ours,
                old,
                part,
                clip=config.clip,
                tokens=tokens,
                reference=reference,
                kl_coef=config.kl_coef,
                weights=weights,
                entropy=entropies(every) if config.entropy_coef > 0 else None,
                entropy_coef=config.entropy_coef,
            )
            del every
            result.value.backward()  # type: ignore[no-untyped-call]
            loss += float(result.value.detach())
            kl, clipped = kl + result.kl, clipped + result.clipped
            entropy -= float((ours.detach() * part.mask).sum()) / tokens
            used = part.mask if weights is None else part.mask * weights
            weight += float(used.sum()) / tokens
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        self.optimizer.step()
        return _Piece(loss, float(norm), kl, clipped, entropy, weight, truncated)

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> torch.Tensor:
        parts = torch.split(batch.ids, self.config.micro_batch)
        return torch.cat([token_logprobs(self.model, p, self.config.temperature) for p in parts])
