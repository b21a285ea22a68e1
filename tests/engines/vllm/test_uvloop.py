"""Where uvloop is installed, as it is beside vLLM, Ray runs its actors on it; replicas start there, too."""

from __future__ import annotations

import uvloop

from hotbunk.rollout.process import ReplicaSpec, start
from hotbunk.rollout.status import Health


async def _looked_at() -> Health:
    handle = await start(ReplicaSpec("oracle", {}, name="r"))
    try:
        return (await handle.status()).health
    finally:
        await handle.close()


def test_a_replica_is_started_from_uvloop() -> None:
    assert uvloop.run(_looked_at()) is Health.OK
