"""verl's driver and a server that does not come back: a typed error, in time, with what to do."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from hotbunk.rollout.errors import ReplicaLost, SessionError
from hotbunk.trainer_hooks.verl import manager
from hotbunk.trainer_hooks.verl.manager import HotbunkManager

pytestmark = pytest.mark.anyio


def driver(*errors: Exception | None) -> Any:
    """A manager of one server, whose calls end so, the last one again and again."""
    left = list(errors)

    async def restart() -> None:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error

    made = HotbunkManager.__new__(HotbunkManager)
    server = SimpleNamespace(restart=SimpleNamespace(remote=restart))
    made.replicas = [SimpleNamespace(name="one", server_handle=server)]
    return made


GONE = RayActorError()
AWAY = ActorUnavailableError("it is being started", None)


async def test_a_server_that_comes_back_is_waited_for() -> None:
    await driver(AWAY, None)._restart("one")


async def test_one_that_is_gone_for_good_is_an_error_at_once() -> None:
    with pytest.raises(ReplicaLost, match="its server's actor is dead") as error:
        await driver(AWAY, GONE)._restart("one")
    assert error.value.where == "one"
    assert "resume from the last checkpoint" in error.value.remedy


async def test_one_that_never_comes_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "RESTART", 0.2)
    began = time.monotonic()
    with pytest.raises(ReplicaLost, match=r"did not come back in 0\.2 s"):
        await driver(AWAY)._restart("one")
    assert time.monotonic() - began < 10


async def test_one_that_nobody_has_is_named() -> None:
    with pytest.raises(SessionError, match="'two'"):
        await driver(None)._restart("two")
