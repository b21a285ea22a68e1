"""From logits to tokens: one row a sequence, each with its own way of drawing.

Log-probs are log-softmax at the request's temperature over the whole vocabulary; truncation
(min-p, top-k, top-p, in vLLM's order and meaning) only changes what is drawn. A draw is one
uniform number, a function of the request's seed and the token's position in the whole sequence:
it does not depend on batch neighbours, on KV computed twice, nor on a response cut off and
continued.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from hotbunk.rollout.backends.reference.scheduler import Sequence
from hotbunk.rollout.fingerprint import mix

COLDEST = 1e-30  # a temperature below it is as good as greedy, and float32 would make it 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one sequence got: a token, its log-prob, and the most likely alternatives if asked."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for the token at ``position`` (from 0, prompt included)."""
    return (mix(mix(seed & (1 << 64) - 1) ^ position) >> 11) / (1 << 53)


def draw(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[Drawn]:
    """One token a row of ``logits`` [sequences, vocabulary] (float32)."""
    wants = [s.request.sampling for s in sequences]
    greedy = torch.tensor([[w.temperature == 0] for w in wants])
    scale = torch.tensor([[max(w.temperature, COLDEST) if w.temperature else 1.0] for w in wants])
    # Relative to the best one: whatever the temperature, the best stays 0 and nothing overflows.
    relative = logits - logits.amax(-1, keepdim=True)
    logprobs = (relative / scale).log_softmax(-1)
    tokens = logits.argmax(-1)
    if not bool(greedy.all()):
        numbers = [
            uniform(s.seed, len(s.tokens)) if w.temperature else 0.0
            for s, w in zip(sequences, wants, strict=True)
        ]
        # A sum over a whole vocabulary needs float64, or its last tokens are never drawn.
        probs = _truncated(logprobs.double().exp(), sequences)
        cdf = probs.cumsum(-1)
        aim = torch.tensor(numbers, dtype=torch.float64)[:, None] * cdf[:, -1:]
        # ``right``: a token without probability is never hit, also by an exact zero.
        drawn = torch.searchsorted(cdf, aim, right=True).clamp_(max=cdf.shape[1] - 1)
        tokens = torch.where(greedy, tokens[:, None], drawn).squeeze(1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
    most = max(w.logprobs for w in wants)
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(wants)
    if most:
        best, ids = logprobs.topk(min(most, logprobs.shape[1]), -1)
        rows = zip(ids.tolist(), best.tolist(), wants, strict=True)
        tops = [tuple(zip(i[: w.logprobs], b[: w.logprobs], strict=True)) for i, b, w in rows]
    return [Drawn(t, lp, top) for t, lp, top in zip(tokens.tolist(), chosen, tops, strict=True)]


def _truncated(probs: torch.Tensor, sequences: SequenceOf[Sequence]) -> torch.Tensor:
    """Zero what top-k, top-p and min-p leave out, row by row where a request asks for it."""
    for row, sequence in enumerate(sequences):
        want = sequence.request.sampling
        if want.top_k <= 0 and want.top_p >= 1.0 and want.min_p <= 0.0:
            continue
        ordered, ids = probs[row].sort(descending=True, stable=True)
        keep = ordered >= want.min_p * ordered[0]
        if want.top_k > 0:
            keep[want.top_k :] = False
        if want.top_p < 1.0:
            kept = torch.where(keep, ordered, 0.0)
            kept = kept / kept.sum()
            keep &= kept.cumsum(-1) - kept < want.top_p  # the first one stays in any case
        keep[0] = True
        probs[row] = torch.zeros_like(ordered).scatter_(0, ids, torch.where(keep, ordered, 0.0))
    return probs
