"""verl's manager over replicas that cost nothing; run by an interpreter that has verl, not hotbunk.

``PYTHON verl_manager.py REPEATS COUNT...`` prints JSON: count -> seconds of each sync. The manager is
verl's own, whole; only what it calls is free: replicas, workers, their engine, and ``ray.get``.
"""

import asyncio
import gc
import json
import sys
import time
from importlib import import_module
from typing import Any


class Replica:
    """Every verb returns at once."""

    def __init__(self) -> None:
        self.workers = [object()]

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass

    async def resume_generation(self) -> None:
        pass


class Group:
    """A worker group: its calls are done when they are made."""

    def __init__(self, worker_handles: Any = (), ray_cls_with_init: Any = None) -> None:
        self.world_size = max(len(worker_handles), 1)

    def execute_checkpoint_engine(self, method: list[str], **_: Any) -> list[None]:
        return [None] * len(method)

    def update_weights(self, **_: Any) -> list[None]:
        return [None] * self.world_size


class Engine:
    """No topology to build."""

    @classmethod
    def build_topology(cls, trainers: int, rollouts: int, metadata: Any) -> tuple[Any, Any]:
        return {"rank": [0] * trainers}, {"rank": [0] * rollouts}


class Ray:
    """Nothing is remote."""

    @staticmethod
    def get(results: Any) -> Any:
        return results


def main(repeats: int, counts: list[int]) -> None:
    """Measure, and say so on stdout."""
    base: Any = import_module("verl.checkpoint_engine.base")
    base.CheckpointEngineRegistry.register("free")(Engine)
    base.ray, base.RayWorkerGroup = Ray, Group
    config = type("Config", (), {"backend": "free", "custom_backend_module": None})()
    base.RayClassWithInitArgs = lambda **_: None

    gc.collect()
    gc.freeze()

    async def syncs(count: int) -> list[float]:
        manager = base.CheckpointEngineManager(config, Group(), [Replica() for _ in range(count)])
        seconds = []
        for step in range(repeats + 1):
            began = time.perf_counter()
            await manager.update_weights(global_steps=step)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]

    print(json.dumps({count: asyncio.run(syncs(count)) for count in counts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(text) for text in sys.argv[2:]])
