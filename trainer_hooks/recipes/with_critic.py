"""PPO: as GRPO in turns, with a critic that takes a turn of its own: ``trainer=ppo``.

Between rollout and training the critic has the memory: it says what each token was worth, learns from
what came of it, and lets go. So the most that is held at once is what GRPO holds.
"""

from __future__ import annotations

import torch

from hotbunk.trainer_hooks.recipes import checkpoint
from hotbunk.trainer_hooks.recipes.critic import TAG, Critic
from hotbunk.trainer_hooks.recipes.grpo import Batch
from hotbunk.trainer_hooks.recipes.in_turns import TurnsJob
from hotbunk.trainer_hooks.recipes.job import Parts
from hotbunk.trainer_hooks.recipes.meter import MeteredShare
from hotbunk.trainer_hooks.recipes.threads import in_thread


class CriticJob(TurnsJob):
    """Generate, sleep, appraise, train, wake."""

    tenants = (*TurnsJob.tenants, TAG)
    compute = (TAG, *TurnsJob.compute)

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._critic = Critic(parts.bundle.model_dir, parts.learner.config, parts.pool)
        if parts.plan.resumed is not None:
            checkpoint.load_other(
                parts.plan.resumed, TAG, self._critic.model, self._critic.optimizer
            )
        self._critic_share = MeteredShare(self._critic.share, parts.meter)

    async def begin(self) -> None:
        await self._critic_share.offload()
        await super().begin()

    async def appraise(
        self, number: int, batch: Batch, rewards: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, object]]:
        with self.recorder.phase(TAG):
            await self._critic_share.restore()
            async with self.meter.sampling():
                found = await in_thread(self._critic.appraise, batch, rewards, number)
            await self._critic_share.offload()
        return found.advantages, {
            "critic/loss": found.loss,
            "critic/grad_norm": found.grad_norm,
            "critic/value_mean": found.value_mean,
            "critic/explained_variance": found.explained,
        }

    def beside(self) -> dict[str, checkpoint.Trained]:
        return {TAG: (self._critic.model, self._critic.optimizer)}

    async def save(self, done: int) -> int:
        await self._critic_share.restore()  # before the policy's: it is read while that is written
        try:
            return await super().save(done)
        finally:
            await self._critic_share.offload()
