"""The reference engine's sampler against an independent, slow one, and against its own promises."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hotbunk.rollout.backends.reference import sampler  # noqa: E402
from hotbunk.rollout.backends.reference.sampler import Drawn, draw, uniform  # noqa: E402
from hotbunk.rollout.backends.reference.scheduler import Sequence  # noqa: E402
from hotbunk.rollout.contract import GenerateRequest, Sampling  # noqa: E402

PROMPT = (1, 2, 3)


def sequence(index: int = 0, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Sequence:
    return Sequence(GenerateRequest("r", prompt, Sampling(**sampling)), index)


def one(logits: list[float], index: int = 0, **sampling: Any) -> Drawn:
    [drawn] = draw(torch.tensor([logits]), [sequence(index, **sampling)])
    return drawn


def draws(logits: list[float], count: int, **sampling: Any) -> Counter[int]:
    """Tokens drawn with that many seeds."""
    rows = torch.tensor([logits]).repeat(count, 1)
    found = draw(rows, [sequence(seed=seed, **sampling) for seed in range(count)])
    return Counter(d.token for d in found)


def log_softmax(logits: list[float], temperature: float) -> list[float]:
    scaled = [x / (temperature or 1.0) for x in logits]
    top = max(scaled)
    norm = math.log(sum(math.exp(x - top) for x in scaled))
    return [x - top - norm for x in scaled]


def distribution(logits: list[float], want: Sampling) -> list[float]:
    """The probabilities that tokens are drawn with: min-p, top-k, top-p, one after the other."""
    probs = [math.exp(x) for x in log_softmax(logits, want.temperature)]
    order = sorted(range(len(probs)), key=lambda t: (-probs[t], t))
    kept = [t for t in order if probs[t] >= want.min_p * probs[order[0]]] or order[:1]
    if want.top_k:
        kept = kept[: want.top_k]
    if want.top_p < 1:
        total, before, short = sum(probs[t] for t in kept), 0.0, []
        for t in kept:
            if before < want.top_p or not short:
                short.append(t)
            before += probs[t] / total
        kept = short
    total = sum(probs[t] for t in kept)
    return [probs[t] / total if t in kept else 0.0 for t in range(len(probs))]


def chi_square(counted: Counter[int], expected: list[float]) -> float:
    """The statistic over its degrees of freedom; about 1 where they agree."""
    n = sum(counted.values())
    cells = [(counted[t], n * p) for t, p in enumerate(expected) if p > 0]
    assert all(want >= 5 for _, want in cells), "too few draws for a chi-square"
    return sum((got - want) ** 2 / want for got, want in cells) / max(len(cells) - 1, 1)


LOGITS = [1.0, 3.0, 0.5, 2.0, 2.5, -1.0, 3.0, 0.0]


# -- distributions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.8},
        {"top_k": 4, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_asked_for(sampling: dict[str, Any]) -> None:
    want = distribution(LOGITS, Sampling(**sampling))
    counted = draws(LOGITS, 10_000, **sampling)
    never = {t for t, p in enumerate(want) if p == 0}
    assert not never & counted.keys(), "a token that was cut off was drawn"
    assert chi_square(counted, want) < 3.0  # p below 0.001 for any number of cells here


def test_a_wrong_distribution_would_be_noticed() -> None:
    counted = draws(LOGITS, 20_000, temperature=1.1)
    assert chi_square(counted, distribution(LOGITS, Sampling())) > 5.0


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (
        [uniform(seed, 7) for seed in range(20_000)],
        [uniform(7, position) for position in range(20_000)],
        [uniform(n, n) for n in range(20_000)],
        [uniform(-n, 3) for n in range(20_000)],
    ):
        cells = Counter(int(u * 20) for u in numbers)
        assert chi_square(cells, [1 / 20] * 20) < 2.5
        assert all(0.0 <= u < 1.0 for u in numbers)
        pairs = pairwise(numbers)
        together = Counter(int(a * 4) * 4 + int(b * 4) for a, b in pairs)
        assert chi_square(together, [1 / 16] * 16) < 2.5, "one number tells the next"


# -- against the slow one ---------------------------------------------------------------------

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.25, 0.1]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 1 << 40),
)
# On a grid, so that ties are common and nothing lies within rounding of a limit by chance.
ROWS = st.lists(st.integers(-12, 12).map(lambda n: n * 0.37), min_size=2, max_size=9)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ROWS, SAMPLINGS), min_size=1, max_size=5))
def test_every_row_is_drawn_as_the_slow_sampler_does(cases: list[tuple[list[float], Any]]) -> None:
    width = max(len(row) for row, _ in cases)
    rows = [[*row, *[-1e9] * (width - len(row))] for row, _ in cases]
    sequences = [Sequence(GenerateRequest("r", PROMPT, want)) for _, want in cases]
    found = draw(torch.tensor(rows), sequences)
    for row, s, drawn in zip(rows, sequences, found, strict=True):
        want = s.request.sampling
        logprobs = log_softmax(row, want.temperature)
        assert drawn.logprob == pytest.approx(logprobs[drawn.token], abs=1e-4)
        probs = distribution(row, want)
        aim, below, at_aim = uniform(s.seed, len(PROMPT)), 0.0, set[int]()
        for token, p in enumerate(probs):
            if p > 0 and below - 1e-5 <= aim <= below + p + 1e-5:
                at_aim.add(token)
            below += p
        near_top_p = want.top_p < 1  # a sum within rounding of the limit may fall on either side
        assert drawn.token in at_aim or near_top_p
        assert probs[drawn.token] > 0 or near_top_p


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_ends_of_the_interval_never_hit_a_token_without_probability(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: number)
    first, last = -1e9, 1e-9  # tokens 0 and 4 are impossible
    logits = [first, 1.0, 1.0 + last, 0.5, first]
    for sampling in ({}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.9}):
        assert one(logits, **sampling).token in (1, 2, 3), sampling
    wide = [0.0] * 60_000 + [-1e9] * 500
    assert one(wide).token == min(int(number * 60_000), 59_999)


# -- greedy, hot and cold ---------------------------------------------------------------------


def test_greedy_takes_the_first_of_equals_as_argmax_does() -> None:
    assert one([0.0, 2.0, 2.0, 1.0], temperature=0).token == 1
    assert one([5.0] * 8, temperature=0).token == 0
    assert one([0.0, 2.0, 3.0], temperature=0, top_k=1, top_p=0.1, min_p=0.5).token == 2


def test_greedy_log_probs_are_those_of_temperature_1() -> None:
    drawn = one(LOGITS, temperature=0)
    assert drawn.logprob == pytest.approx(log_softmax(LOGITS, 1.0)[drawn.token], abs=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-45, 1e-300, 5e-324])
def test_the_smallest_temperatures_draw_the_best_and_overflow_nothing(temperature: float) -> None:
    drawn = one([-50.0, 3.0, 2.0, 40.0], temperature=temperature, logprobs=4)
    assert drawn.token == 3
    assert drawn.logprob == 0.0
    assert not any(math.isnan(p) for _, p in drawn.top)
    ties = draws([7.0, 1.0, 7.0], 5000, temperature=temperature)
    assert set(ties) == {0, 2}, "equals are equally likely at any temperature"
    assert chi_square(ties, [0.5, 0.0, 0.5]) < 7.0


def test_the_highest_temperature_draws_anything() -> None:
    counted = draws([0.0, 50.0, -50.0, 3.0], 4000, temperature=1e30)
    assert chi_square(counted, [0.25] * 4) < 3.0


def test_large_logits_keep_their_differences() -> None:
    near, far = one([0.0, 1.0, 2.0], seed=3), one([30_000.0, 30_001.0, 30_002.0], seed=3)
    assert (near.token, near.logprob) == (far.token, pytest.approx(far.logprob, abs=1e-4))


# -- log-probs --------------------------------------------------------------------------------


def test_truncation_changes_what_is_drawn_and_not_the_log_probs() -> None:
    want = log_softmax(LOGITS, 0.8)
    for sampling in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}):
        drawn = one(LOGITS, temperature=0.8, **sampling)
        assert drawn.logprob == pytest.approx(want[drawn.token], abs=1e-5)


def test_top_logprobs_are_the_best_in_order_and_only_for_who_asked() -> None:
    sequences = [sequence(logprobs=n, seed=1) for n in (0, 2, 8)]
    rows = torch.tensor([LOGITS] * 3)
    none, two, all_of_them = draw(rows, sequences)
    assert none.top == ()
    want = sorted(log_softmax(LOGITS, 1.0), reverse=True)
    for drawn, n in ((two, 2), (all_of_them, 8)):
        assert [p for _, p in drawn.top] == pytest.approx(want[:n], abs=1e-5)
        for token, p in drawn.top:
            assert p == pytest.approx(log_softmax(LOGITS, 1.0)[token], abs=1e-5)
    assert {t for t, _ in two.top} == {1, 6}
    assert sorted(t for t, _ in all_of_them.top) == list(range(8))
    assert dict(all_of_them.top)[all_of_them.token] == all_of_them.logprob


# -- seeds ------------------------------------------------------------------------------------


def test_the_same_draw_whatever_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 64) * 2
    wants = [sequence(seed=n, temperature=0.7 + n / 10, top_k=n) for n in range(9)]
    together = draw(logits, wants)
    alone = [draw(logits[n : n + 1], [wants[n]])[0] for n in range(9)]
    assert [d.token for d in together] == [d.token for d in alone]
    turned = draw(logits.flip(0), wants[::-1])[::-1]
    assert [d.token for d in together] == [d.token for d in turned]
    assert [d.logprob for d in together] == pytest.approx([d.logprob for d in alone], abs=1e-6)


def test_the_i_th_sample_draws_with_seed_plus_i() -> None:
    flat = [0.0] * 1000
    samples = [one(flat, index, seed=40, n=4).token for index in range(4)]
    plain = [one(flat, seed=40 + index).token for index in range(4)]
    assert samples == plain
    assert len(set(samples)) == 4


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """So a response that is cut off and continued draws what it would have drawn (V1)."""
    flat = torch.zeros(1, 1000)
    whole = sequence(seed=5, prompt=(1, 2, 3))
    got = []
    for _ in range(6):
        [drawn] = draw(flat, [whole])
        whole.tokens.append(drawn.token)
        got.append(drawn.token)
    assert len(set(got)) > 4
    rest = sequence(seed=5, prompt=(1, 2, 3, *got[:4]))
    [fifth] = draw(flat, [rest])
    assert fifth.token == got[4]


def test_without_a_seed_two_requests_draw_differently() -> None:
    flat = [0.0] * 100_000
    assert len({one(flat).token for _ in range(8)}) > 6


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**80])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert one(LOGITS, seed=seed) == one(LOGITS, seed=seed)
    assert one(LOGITS, 3, seed=seed).token in range(8)
