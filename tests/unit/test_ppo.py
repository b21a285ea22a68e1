"""PPO's arithmetic against plain sums, and a critic that learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotbunk.rollout.memory import host_pool
from hotbunk.trainer_hooks.recipes.config import TrainerConfig
from hotbunk.trainer_hooks.recipes.critic import Critic
from hotbunk.trainer_hooks.recipes.grpo import Batch, grpo_loss
from hotbunk.trainer_hooks.recipes.models import build_tiny
from hotbunk.trainer_hooks.recipes.ppo import (
    estimate_advantages,
    explained_variance,
    token_rewards,
    value_loss,
    whitened,
)

MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_a_reward_comes_with_the_last_token_of_its_response() -> None:
    found = token_rewards(torch.tensor([0.5, 2.0, 7.0]), MASK)
    assert found.tolist() == [[0, 0, 0, 0.5], [0, 2.0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_advantages_are_the_sums_of_the_definition(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, 4, generator=generator) * MASK
    rewards = torch.randn(3, 4, generator=generator) * MASK
    advantages, returns = estimate_advantages(rewards, values, MASK, gamma, lam)
    for row in range(3):
        places = [at for at in range(4) if MASK[row, at]]
        v = [float(values[row, at]) for at in places] + [0.0]
        r = [float(rewards[row, at]) for at in places]
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
        for t, at in enumerate(places):
            want = sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
            assert float(advantages[row, at]) == pytest.approx(want, abs=1e-6)
            assert float(returns[row, at]) == pytest.approx(want + v[t], abs=1e-6)
    assert (advantages[MASK == 0] == 0).all()
    assert (returns[MASK == 0] == 0).all()


def test_values_outside_a_response_change_nothing() -> None:
    values = torch.randn(3, 4)
    rewards = token_rewards(torch.ones(3), MASK)
    inside = estimate_advantages(rewards, values * MASK, MASK, 1.0, 0.9)
    assert torch.equal(estimate_advantages(rewards, values, MASK, 1.0, 0.9)[0], inside[0])


def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens() -> None:
    found = whitened(torch.randn(3, 4) * 7 + 3, MASK)
    chosen = found[MASK > 0]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-5)
    assert float(chosen.var(correction=0)) == pytest.approx(1, abs=1e-4)
    assert (found[MASK == 0] == 0).all()


@pytest.mark.parametrize(
    "value, old, target, expected",
    [
        (0.1, 0.0, 1.0, 0.5 * 0.81),  # within the range: as it is
        (0.9, 0.0, 1.0, 0.5 * 0.64),  # it gained too much: the loss of the range's edge
        (-0.9, 0.0, 1.0, 0.5 * 3.61),  # it lost: all of it
    ],
)
def test_a_value_gains_nothing_beyond_its_range(
    value: float, old: float, target: float, expected: float
) -> None:
    one = torch.ones(1, 1)
    loss = value_loss(value * one, old * one, target * one, one, clip=0.2, tokens=1.0)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_explained_variance_is_1_for_a_prophet_and_0_for_a_constant() -> None:
    returns = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    assert explained_variance(returns, returns, MASK) == 1.0
    assert explained_variance(torch.full((3, 4), 2.0), returns, MASK) == pytest.approx(0, abs=1e-6)
    assert explained_variance(returns, torch.ones(3, 4), MASK) == 0.0


def test_each_token_has_its_own_advantage_in_the_policys_loss() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    mask = torch.ones(1, 2)
    zeros = torch.zeros(1, 2)
    batch = Batch(ids, mask, zeros, torch.tensor([[2.0, -1.0]]), zeros, mask)
    loss = grpo_loss(zeros, zeros, batch, clip=0.2, tokens=2.0)
    assert float(loss.value) == pytest.approx(-(2.0 - 1.0) / 2)


def test_a_critic_learns_what_comes_and_gives_its_memory_away(tmp_path: Path) -> None:
    directory = build_tiny(tmp_path, hidden=32, layers=1)
    pool = host_pool()
    try:
        config = TrainerConfig(
            name="ppo", group_size=1, critic_lr=3e-3, warmup=1, value_clip=10.0, offload=True
        )
        critic = Critic(directory, config, pool)
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 100, (32, 6), generator=generator)
        rewards = (ids[:, 0] % 2).float()  # what is said first decides
        mask = torch.zeros(32, 5)
        mask[:, 2:] = 1.0
        zeros = torch.zeros(32, 5)
        batch = Batch(ids, mask, zeros, torch.zeros(32), zeros, mask)
        first = critic.appraise(batch, rewards, 0)
        assert first.value_mean == 0  # its head begins at 0
        for number in range(1, 40):
            last = critic.appraise(batch, rewards, number)
            critic.share._give_away()
            assert pool.memory().resident() == 0
            critic.share._take_back()
        assert last.loss < first.loss / 4
        assert last.explained > 0.7
        assert last.advantages.shape == mask.shape
    finally:
        pool.close()
