"""GRPO's arithmetic over token ids: advantages, the clipped loss, and the trainer's log-probs.

Group-relative policy optimisation as in Shao et al., DeepSeekMath (2024), section 4.1: the
advantage of a response is its reward, normalised over the responses to the same prompt; the loss
is PPO's clipped ratio (Schulman et al., 2017), averaged over response tokens; an optional penalty
is the low-variance estimate of the KL divergence to a reference policy (Schulman, 2020).

For responses of older versions the loss is decoupled (Hilton et al., Batch size-invariance for
policy optimization, 2022; for LLMs Fu et al., AReaL, 2025): the behaviour policy b, which made a
token, and the proximal policy p, the trainer's before this step, around which the ratio is clipped,
are two. With truncated importance weights (Ionides, 2008; Yao et al., 2025, call it TIS)::

    r = pi / p        w = min(p / b, C)        loss = -w * min(r A, clip(r, 1 - e, 1 + e) A)

w is a constant of the step: no gradient flows through it. Each token has the b of the very version
that made it, as the engine reported it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotbunk.rollout.contract import Completion


@dataclass(frozen=True)
class Batch:
    """Responses ready for training.

    ``ids`` [responses, tokens] are prompt and response, padded right. ``mask`` and ``behaviour``
    [responses, tokens - 1] speak of the prediction of token t + 1: whether it is a response token,
    and the log-prob the engine gave it. ``advantages`` [responses], or like ``mask`` where each token
    has its own. ``staleness``, like ``mask``:
    how many steps older than the trainer's the version is that made the token. ``fresh``, like
    ``mask``: the trainer's own version made the token, and all KV it stood on.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    staleness: torch.Tensor
    fresh: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> Batch:
        """Some of the responses."""
        return Batch(
            self.ids[chosen],
            self.mask[chosen],
            self.behaviour[chosen],
            self.advantages[chosen],
            self.staleness[chosen],
            self.fresh[chosen],
        )


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """``(reward - mean) / (std + 1e-4)`` within each group of consecutive responses."""
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True, correction=0) + 1e-4)).view(-1)


def make_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    advantages: torch.Tensor,
    pad_id: int,
    step: int | None = None,
    *,
    stale_kv: bool = False,
) -> Batch:
    """Put responses side by side.

    ``step`` is the trainer's version; None: it made all of them. ``stale_kv``: tokens may stand on
    KV of versions before their own, so none is known to be fresh.
    """
    longest = max(len(p) + len(c.token_ids) for p, c in zip(prompts, completions, strict=True))
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros(len(prompts), longest - 1)
    behaviour = torch.zeros(len(prompts), longest - 1)
    staleness = torch.zeros(len(prompts), longest - 1)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        begin, end = len(prompt), len(prompt) + len(completion.token_ids)
        ids[row, :begin] = torch.tensor(prompt)
        ids[row, begin:end] = torch.tensor(completion.token_ids)
        mask[row, begin - 1 : end - 1] = 1.0
        behaviour[row, begin - 1 : end - 1] = torch.tensor(completion.logprobs)
        if step is None:
            continue
        for span in completion.spans:
            where = slice(begin - 1 + span.start, begin - 1 + span.end)
            staleness[row, where] = step - span.version.step
    fresh = torch.zeros_like(mask) if stale_kv else mask * (staleness == 0)
    return Batch(ids, mask, behaviour, advantages, staleness, fresh)


def importance_weights(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """``min(p / b, cap)`` of log-probs, a token each."""
    return (proximal - behaviour).exp().clamp(max=cap)


def overdue_scale(staleness: torch.Tensor, limit: int) -> torch.Tensor:
    """What an overdue token counts: ``(1 + limit) / (1 + staleness)`` beyond ``limit``, else 1.

    The freshness weight ``1 / (1 + staleness)`` (as in TorchRL's StalenessAwareSampler), made 1 at
    the limit.
    """
    return ((1 + limit) / (1 + staleness)).clamp(max=1.0)


def all_logprobs(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of every token there is, after each but the last: [responses, tokens - 1, vocabulary], float32.

    Log-softmax at ``temperature``, untruncated: what the engine reports for the tokens it draws.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    every: torch.Tensor = (logits / temperature).log_softmax(-1)
    return every


def of_tokens(every: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Those of tokens 1.. of each row, [responses, tokens - 1], of what ``all_logprobs`` gives."""
    return every.gather(2, ids[:, 1:, None]).squeeze(2)


def token_logprobs(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """The model's log-probs of tokens 1.. of each row, [responses, tokens - 1]."""
    return of_tokens(all_logprobs(model, ids, temperature), ids)


def entropies(every: torch.Tensor) -> torch.Tensor:
    """In nats, of what ``all_logprobs`` gives: [responses, tokens - 1]."""
    return -(every.exp() * every).sum(-1)


@dataclass(frozen=True)
class Loss:
    """A loss and what is worth a look: KL to the reference, share of clipped tokens."""

    value: torch.Tensor
    kl: float
    clipped: float


def grpo_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    batch: Batch,
    *,
    clip: float,
    tokens: float,
    reference: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    weights: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> Loss:
    """The clipped loss of some rows, summed over response tokens and divided by ``tokens``.

    ``tokens`` is the count over the whole minibatch, so that pieces of it add up. All log-probs,
    ``weights`` and ``entropy`` (nats), are [responses, tokens - 1]. ``old`` is what the ratio is
    clipped around; ``weights`` multiply the clipped term, not the penalty, nor the bonus for entropy.
    """
    ratio = (logprobs - old).exp()
    advantage = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None]
    plain, bounded = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    per_token = -torch.minimum(plain, bounded)
    if weights is not None:
        per_token = per_token * weights
    kl = 0.0
    if reference is not None:
        gap = reference - logprobs
        divergence = gap.exp() - gap - 1
        per_token = per_token + kl_coef * divergence
        kl = float((divergence.detach() * batch.mask).sum() / tokens)
    if entropy is not None:
        per_token = per_token - entropy_coef * entropy
    clipped = float(((bounded < plain).float() * batch.mask).sum() / tokens)
    return Loss((per_token * batch.mask).sum() / tokens, kl, clipped)
