"""Seconds of overlap, on a clock of our own."""

from __future__ import annotations

import pytest

from hotbunk.trainer_hooks.recipes.overlap import Overlap


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_generation_counts_while_a_request_runs_and_some_engine_may_step() -> None:
    clock = Clock()
    seen = Overlap(clock)
    clock.now = 1.0
    with seen.request():
        clock.now = 3.0  # two seconds of generation alone
        with seen.training():
            clock.now = 6.0  # three of both
            seen.still(1.0)
            clock.now = 7.0  # one of training over engines that stand still
            seen.still(0.0)
            clock.now = 8.0
    with seen.training():
        clock.now = 10.0
    shares = seen.take()
    assert (shares.generating, shares.training, shares.both, shares.stalled) == (6, 7, 4, 1)
    assert shares.overlap == pytest.approx(4 / 7)
    assert seen.take().overlap == 0, "each second is told once"


def test_where_some_engines_go_on_generation_does() -> None:
    clock = Clock()
    seen = Overlap(clock)
    with seen.request(), seen.training():
        seen.still(0.25)
        clock.now = 4.0
        shares = seen.take()
    assert (shares.stalled, shares.overlap) == (1.0, 1.0)


def test_requests_are_counted_not_flagged() -> None:
    clock = Clock()
    seen = Overlap(clock)
    one = seen.request()
    with one:
        with seen.request():
            clock.now = 1.0
        clock.now = 3.0
    clock.now = 9.0
    assert seen.take().generating == 3.0
