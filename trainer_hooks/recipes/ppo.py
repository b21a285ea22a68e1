"""PPO's arithmetic beside GRPO's: advantages by generalised estimation, and the value's loss.

Generalised advantage estimation as in Schulman et al., High-dimensional continuous control using
generalized advantage estimation (2016), equations 11 to 16, over the tokens of a response::

    d_t = r_t + gamma * V_(t+1) - V_t        A_t = d_t + gamma * lam * A_(t+1)       R_t = A_t + V_t

with V = 0 after the last token, whether the response ended there or was cut. A response's reward comes
with its last token. The value's loss is clipped around the values before the step, as in Schulman et
al.'s PPO implementation (2017)::

    L = 1/2 max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)
"""

from __future__ import annotations

import torch


def token_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``rewards`` [responses] at each response's last token: [responses, tokens - 1], as ``mask``."""
    places = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask > 0, places, -1).amax(1)
    found = torch.zeros_like(mask)
    rows = torch.arange(len(mask))[last >= 0]
    found[rows, last[rows]] = rewards.to(mask.dtype)[rows]
    return found


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of response tokens; all are [responses, tokens - 1], 0 outside ``mask``.

    The response tokens of a row lie side by side.
    """
    advantages = torch.zeros_like(values)
    later = torch.zeros(len(values), dtype=values.dtype)
    value_after = torch.zeros_like(later)
    for at in reversed(range(values.shape[1])):
        inside = mask[:, at]
        delta = rewards[:, at] + gamma * value_after - values[:, at]
        later = inside * (delta + gamma * lam * later)
        value_after = inside * values[:, at]
        advantages[:, at] = later
    return advantages, (advantages + values) * mask


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over the tokens of ``mask``; 0 outside it."""
    count = mask.sum().clamp(min=1)
    centred = (advantages - (advantages * mask).sum() / count) * mask
    return centred * ((centred**2).sum() / count + 1e-8).rsqrt()


def value_loss(
    values: torch.Tensor,
    old: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float,
    tokens: float,
) -> torch.Tensor:
    """The clipped loss of some rows, summed over response tokens and divided by ``tokens``."""
    near = torch.clamp(values, old - clip, old + clip)
    worse = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * (worse * mask).sum() / tokens


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """``1 - var(R - V) / var(R)`` over the tokens of ``mask``; 0 where returns do not vary."""
    chosen = mask > 0
    left = (returns - values)[chosen].var(correction=0)
    all_of_it = returns[chosen].var(correction=0)
    return float(1 - left / all_of_it) if float(all_of_it) > 1e-12 else 0.0
