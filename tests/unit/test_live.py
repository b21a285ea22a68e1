"""The live table of a run."""

from __future__ import annotations

import pytest

from hotbunk.cli.live import _cell


@pytest.mark.parametrize(
    "key", ["rollout/logprob_diff_max", "memory/peak_bytes", "rollout/overlap"]
)
@pytest.mark.parametrize("value", [None, float("nan")])
def test_what_is_not_known_is_not_a_number(key: str, value: float | None) -> None:
    assert _cell(key, value) == "-"
    assert _cell(key, 1.0) != "-"
