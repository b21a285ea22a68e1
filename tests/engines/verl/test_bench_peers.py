"""verl's own transfer and Ray's store, as `hotbunk bench sync` times them: what arrives is what was sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hotbunk.benchmarks.sync import _Pair

pytestmark = pytest.mark.slow  # a Ray of its own


@pytest.fixture(scope="module")
def pair() -> Iterator[_Pair]:
    torch.manual_seed(3)
    shapes = [(64, 32), (32,), (5, 7), (128, 128)]
    with _Pair(
        {f"t{n}": torch.randn(s, dtype=torch.bfloat16) for n, s in enumerate(shapes)}, 1
    ) as it:
        yield it


def test_what_arrives_is_what_was_sent(pair: _Pair) -> None:
    for name, way in (("verl", pair._verl), ("ray", pair._ray)):
        for _ in range(2):
            pair._check(name, way)


def test_a_way_that_sends_nothing_is_seen(pair: _Pair) -> None:
    with pytest.raises(RuntimeError, match="nothing lost"):
        pair._check("nothing", lambda: None)
