"""GRPO's arithmetic against plain sums."""

from __future__ import annotations

import math

import pytest
import torch

from hotbunk.rollout.contract import Completion, FinishReason, Version, VersionSpan
from hotbunk.trainer_hooks.recipes.grpo import (
    Batch,
    entropies,
    group_advantages,
    grpo_loss,
    importance_weights,
    make_batch,
    overdue_scale,
)


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, 0.25, 0.75])
    advantages = group_advantages(rewards, 2)
    assert advantages[0] == pytest.approx(1.0, abs=1e-3)
    assert advantages[1] == pytest.approx(-1.0, abs=1e-3)
    assert advantages[2] == advantages[3] == 0, "a group without a difference teaches nothing"
    assert advantages.view(-1, 2).sum(1).abs().max() < 1e-5


def test_a_batch_points_at_the_prediction_of_each_response_token() -> None:
    done = Completion("r", (7, 8), (-0.1, -0.2), (), FinishReason.LENGTH)
    short = Completion("s", (9,), (-0.3,), (), FinishReason.STOP)
    batch = make_batch([[1, 2, 3], [4]], [done, short], torch.zeros(2), pad_id=0)
    assert batch.ids.tolist() == [[1, 2, 3, 7, 8], [4, 9, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]
    assert batch.behaviour[0, 2:].tolist() == pytest.approx([-0.1, -0.2])


def _batch(advantage: float) -> Batch:
    one = torch.ones(1, 1)
    ids = torch.zeros(1, 2, dtype=torch.long)
    return Batch(ids, one, one, torch.tensor([advantage]), torch.zeros(1, 1), one)


@pytest.mark.parametrize(
    "advantage, ratio, expected",
    [
        (2.0, 1.1, -2.2),  # inside the range
        (2.0, 1.5, -2.4),  # a gain is clipped at 1.2
        (2.0, 0.5, -1.0),  # a loss is not
        (-2.0, 0.5, 1.6),  # clipped at 0.8
        (-2.0, 1.5, 3.0),
    ],
)
def test_the_ratio_is_clipped_on_the_side_that_gains(
    advantage: float, ratio: float, expected: float
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]])
    loss = grpo_loss(logprobs, torch.zeros(1, 1), _batch(advantage), clip=0.2, tokens=1.0)
    assert float(loss.value) == pytest.approx(expected, rel=1e-5)
    assert loss.clipped == (0.0 if expected in (-2.2, -1.0, 3.0) else 1.0)


def test_the_penalty_is_zero_only_at_the_reference() -> None:
    at = grpo_loss(
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        _batch(0.0),
        clip=0.2,
        tokens=1.0,
        reference=torch.zeros(1, 1),
        kl_coef=0.5,
    )
    away = grpo_loss(
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        _batch(0.0),
        clip=0.2,
        tokens=1.0,
        reference=torch.full((1, 1), 0.3),
        kl_coef=0.5,
    )
    assert float(at.value) == at.kl == 0.0
    assert away.kl == pytest.approx(math.exp(0.3) - 0.3 - 1, rel=1e-5)
    assert float(away.value) == pytest.approx(0.5 * away.kl, rel=1e-5)


def test_entropy_is_counted_in_nats_and_earns_a_bonus() -> None:
    even, sure = torch.zeros(1, 1, 8), torch.full((1, 1, 8), -1e9)
    sure[..., 3] = 0
    assert float(entropies(even.log_softmax(-1))) == pytest.approx(math.log(8))
    assert float(entropies(sure.log_softmax(-1))) == 0
    nothing = torch.zeros(1, 1)
    logits = torch.tensor([[[2.0, 0.0, 0.0]]], requires_grad=True)
    entropy = entropies(logits.log_softmax(-1))
    loss = grpo_loss(
        nothing, nothing, _batch(0.0), clip=0.2, tokens=1.0, entropy=entropy, entropy_coef=0.1
    )
    assert float(loss.value.detach()) == pytest.approx(-0.1 * float(entropy.detach()), rel=1e-5)
    loss.value.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 0, 1], "a step makes the likeliest less likely"


def test_pieces_of_a_minibatch_add_up() -> None:
    torch.manual_seed(0)
    batch = Batch(
        torch.zeros(4, 4, dtype=torch.long),
        torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]),
        torch.zeros(4, 3),
        torch.tensor([1.0, -1.0, 0.5, 2.0]),
        torch.zeros(4, 3),
        torch.ones(4, 3),
    )
    ours = torch.randn(4, 3) * 0.1
    tokens = float(batch.mask.sum())
    whole = grpo_loss(ours, batch.behaviour, batch, clip=0.2, tokens=tokens).value
    parts = [
        grpo_loss(ours[r], batch.behaviour[r], batch.rows(r), clip=0.2, tokens=tokens).value
        for r in (torch.tensor([0, 1]), torch.tensor([2, 3]))
    ]
    assert float(whole) == pytest.approx(float(sum(parts)), rel=1e-6)


def test_each_token_has_the_staleness_of_the_version_that_made_it() -> None:
    """V6: an update that lands in a response does not change what came before it."""
    spans = (VersionSpan(Version(0, 3), 0, 1), VersionSpan(Version(0, 5), 1, 3))
    across = Completion("r", (7, 8, 9), (-0.1, -0.2, -0.3), spans, FinishReason.LENGTH)
    now = Completion("s", (9,), (-0.4,), (VersionSpan(Version(0, 5), 0, 1),), FinishReason.STOP)
    batch = make_batch([[1, 2], [4]], [across, now], torch.zeros(2), 0, 5)
    assert batch.staleness.tolist() == [[0, 2, 0, 0], [0, 0, 0, 0]]
    assert batch.fresh.tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]
    uncertain = make_batch([[1, 2], [4]], [across, now], torch.zeros(2), 0, 5, stale_kv=True)
    assert float(uncertain.fresh.sum()) == 0


def test_the_decoupled_loss_is_its_formula() -> None:
    """Token by token in plain floats: w = min(p/b, C), around p the ratio is clipped."""
    torch.manual_seed(0)
    shape, cap, clip = (5, 7), 1.5, 0.2
    behaviour = -torch.rand(shape) * 3
    proximal, ours = behaviour + torch.randn(shape), behaviour + torch.randn(shape)
    mask, stale = (torch.rand(shape) > 0.3).float(), torch.randint(0, 5, shape).float()
    ids, advantages = torch.zeros(5, 8, dtype=torch.long), torch.randn(5)
    batch = Batch(ids, mask, behaviour, advantages, stale, mask)
    weights = importance_weights(proximal, behaviour, cap) * overdue_scale(stale, 2)
    tokens = float(mask.sum())
    loss = grpo_loss(ours, proximal, batch, clip=clip, tokens=tokens, weights=weights)
    total = 0.0
    for row in range(shape[0]):
        for token in range(shape[1]):
            if not mask[row, token]:
                continue
            b, p, pi = (float(x[row, token].exp()) for x in (behaviour, proximal, ours))
            age, a = float(stale[row, token]), float(advantages[row])
            w = min(p / b, cap) * (3 / (1 + age) if age > 2 else 1.0)
            total += -w * min(pi / p * a, min(max(pi / p, 1 - clip), 1 + clip) * a)
    assert float(loss.value) == pytest.approx(total / tokens, rel=1e-5)


def test_weights_are_constants_and_on_policy_they_are_one() -> None:
    """The gradient at pi = p is -w A d(log pi): nothing flows through w."""
    ours = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, -2.0]])
    batch = Batch(
        torch.zeros(1, 3, dtype=torch.long),
        torch.ones(1, 2),
        behaviour,
        torch.tensor([2.0]),
        torch.zeros(1, 2),
        torch.ones(1, 2),
    )
    old = ours.detach()
    weights = importance_weights(old, behaviour, 10.0)
    grpo_loss(ours, old, batch, clip=0.2, tokens=1.0, weights=weights).value.backward()
    assert ours.grad is not None
    assert ours.grad.tolist()[0] == pytest.approx([-2 * math.exp(0.5), -2.0])
    assert importance_weights(old, old, 2.0).tolist() == [[1.0, 1.0]]


def test_what_is_not_overdue_counts_whole() -> None:
    scale = overdue_scale(torch.tensor([0.0, 1, 2, 3, 5]), 2)
    assert scale.tolist() == pytest.approx([1, 1, 1, 3 / 4, 3 / 6])
    assert overdue_scale(torch.tensor([1.0]), 0).tolist() == [0.5]
