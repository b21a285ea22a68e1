"""What of verl we stand on is where it was; and the test names what is not."""

from __future__ import annotations

import pytest
import verl

from hotbunk.rollout.errors import Unsupported
from hotbunk.trainer_hooks.verl import surfaces


def test_nothing_that_we_stand_on_has_moved() -> None:
    assert surfaces.moved() == []


def test_what_moved_is_named() -> None:
    base = "verl.workers.rollout.base"
    lines = surfaces.moved(
        {
            f"{base}:BaseRollout.update_weights": ("weights", "buckets"),
            f"{base}:BaseRollout.fly": (),
            "verl.workers.rollout.wings:Wing": None,
        }
    )
    assert lines[0] == f"{base}:BaseRollout.update_weights takes no 'buckets'"
    assert lines[1] == f"{base}:BaseRollout.fly is gone: there is no fly"
    assert lines[2].startswith("verl.workers.rollout.wings:Wing: No module named")


def test_an_untested_verl_is_refused_only_where_something_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl, "__version__", "0.99")
    surfaces.check()
    monkeypatch.setattr(surfaces, "moved", lambda: ["BaseRollout.release is gone"])
    with pytest.raises(Unsupported, match=r"verl 0\.99: BaseRollout\.release is gone"):
        surfaces.check()
    monkeypatch.setattr(verl, "__version__", surfaces.TESTED[-1])
    surfaces.check()
