"""PPO's critic: a model like the policy's with one number a token, trained on what rewards came."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotbunk.rollout.arena import MemoryPool
from hotbunk.trainer_hooks.recipes.config import TrainerConfig
from hotbunk.trainer_hooks.recipes.grpo import Batch
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.recipes.ppo import (
    estimate_advantages,
    explained_variance,
    token_rewards,
    value_loss,
    whitened,
)
from hotbunk.trainer_hooks.share import PooledTrainer

TAG = "critic"  # of its memory: it takes turns with the policy's trainer, too


class ValueModel(nn.Module):
    """A decoder with a head of one output; the head begins at 0."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        whole: Any = load_model(model_dir, dtype=torch.float32)
        self.body: Any = whole.base_model
        self.head = nn.Linear(whole.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` [responses, tokens] -> values [responses, tokens - 1]: before each token but one."""
        hidden = self.body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden).squeeze(2)
        return values


@dataclass(frozen=True)
class Appraisal:
    """What the critic says of a batch. ``advantages`` and ``returns`` are [responses, tokens - 1].

    ``loss`` and ``grad_norm`` are means over its optimizer steps; ``explained`` is of the values
    before them: how much of the returns' variance they foretold.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    value_mean: float
    loss: float
    grad_norm: float
    explained: float


class Critic:
    """Owns the value function. ``appraise`` may run in any thread, one at a time."""

    def __init__(self, model_dir: Path, config: TrainerConfig, pool: MemoryPool) -> None:
        self.config = config
        self.model = ValueModel(model_dir)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.critic_lr, betas=config.betas, weight_decay=0.0
        )
        self.share = PooledTrainer(
            self.model, self.optimizer, pool, offload=config.offload, tag=TAG
        )

    def appraise(self, batch: Batch, rewards: torch.Tensor, number: int) -> Appraisal:
        """Advantages of a batch by the values so far, and one step of training on its returns.

        :param rewards: [responses].
        :param number: of the step, from 0; the learning rate warms up as the policy's does.
        """
        config, mask = self.config, batch.mask
        before = self._values(batch.ids) * mask
        advantages, returns = estimate_advantages(
            token_rewards(rewards, mask), before, mask, config.gamma, config.lam
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.critic_lr * min(1.0, (number + 1) / max(config.warmup, 1))
        losses, norms = [], []
        for epoch in range(config.epochs):
            generator = torch.Generator().manual_seed(number * 1000 + epoch)
            order = torch.randperm(len(batch.ids), generator=generator)
            for chosen in order.chunk(config.mini_batches):
                loss, norm = self._update(batch, chosen, before, returns)
                losses.append(loss)
                norms.append(norm)
        return Appraisal(
            whitened(advantages, mask),
            returns,
            value_mean=float(before.sum() / mask.sum()),
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            explained=explained_variance(before, returns, mask),
        )

    def _update(
        self, batch: Batch, chosen: torch.Tensor, before: torch.Tensor, returns: torch.Tensor
    ) -> tuple[float, float]:
        tokens = float(batch.mask[chosen].sum())
        self.optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for rows in torch.split(chosen, self.config.micro_batch):
            loss = value_loss(
                self.model(batch.ids[rows]),
                before[rows],
                returns[rows],
                batch.mask[rows],
                clip=self.config.value_clip,
                tokens=tokens,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return total, float(norm)

    @torch.no_grad()
    def _values(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.model(part) for part in torch.split(ids, self.config.micro_batch)])
