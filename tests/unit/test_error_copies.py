"""Errors are copied field by field, as whoever carries them between processes does."""

from __future__ import annotations

import copy

import pytest

from hotbunk.rollout import errors
from hotbunk.rollout.contract import Version

SOME = [
    errors.UnknownNames({"a", "b"}),
    errors.BaseMismatch(Version(0, 1), Version(0, 2)),
    errors.WeightsPoisoned("target"),
    errors.DeadlineExceeded("waiting", 3.0, where="replica0", remedy="wait longer"),
    errors.SyncFailed("not every replica", None).at("step 3"),
    errors.ReplicaLost("gone"),
]


@pytest.mark.parametrize("error", SOME, ids=lambda error: type(error).__name__)
def test_a_copy_is_the_same_error(error: errors.HotbunkError) -> None:
    other = copy.copy(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
