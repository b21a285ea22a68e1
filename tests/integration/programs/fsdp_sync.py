"""One trainer rank of an FSDP2 job whose every rank has a manager; rank 0 has the replica, a process.

Arguments: rank, world, a folder for everything, and a fault. Writes ``rank<N>.json`` there: a report a
sync, and when this rank let go.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.ranks import StoreRanks
from hotbunk.checkpoint_engine.source import WeightSource, state_dict_source
from hotbunk.checkpoint_engine.sources.joined import JoinedSource, with_group
from hotbunk.checkpoint_engine.sources.sharded import ShardedSource
from hotbunk.checkpoint_engine.transports import walking
from hotbunk.checkpoint_engine.transports.shm import ShmTransport
from hotbunk.conformance.drill import engine
from hotbunk.conformance.drill.plan import BUCKET, Fault, How
from hotbunk.rollout.backends.oracle.model import GROUPS, parameters_of, weights_at
from hotbunk.rollout.binding import dtype_from
from hotbunk.rollout.contract import PauseMode, Version, digest_name
from hotbunk.rollout.errors import HotbunkError, SyncFailed
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.process import ProcessHandle, shutdown, start_replica
from hotbunk.rollout.status import Deadlines

DEADLINE = 6.0  # seconds, of a sync
walking.CLOSE_WAIT = 1.0  # for a gather that hangs: the sync's end is waited for here
said: dict[str, Any] = {"syncs": [], "let go": []}


def tensors(step: int, group: str) -> dict[str, torch.Tensor]:
    return {
        spec.name: torch.tensor(list(content), dtype=torch.uint8)
        .view(dtype_from(spec.dtype))
        .reshape(spec.shape)
        for spec, content in weights_at(step, [group])
    }


class Model(nn.Module):
    """A group of the oracle's weights; what FSDP2 can spread is spread, each type of its own."""

    def __init__(self, group: str, mesh: Any) -> None:
        super().__init__()
        for parameter in parameters_of(group):
            dtype = dtype_from(parameter.dtype)
            spread = bool(parameter.shape) and parameter.nbytes > 0 and dtype.is_floating_point
            home = f"of_{parameter.dtype}" if spread else "whole"
            if not hasattr(self, home):
                setattr(self, home, nn.Module())
            one = nn.Parameter(torch.zeros(parameter.shape, dtype=dtype), requires_grad=False)
            for name in parameter.names:
                getattr(self, home).register_parameter(name.replace(".", "/"), one)
        for home, child in self.named_children():
            if home != "whole":
                fully_shard(child, mesh=mesh)

    @torch.no_grad()
    def at(self, step: int, group: str) -> None:
        """As it is after ``step`` steps of training; each rank writes its own part."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        whole = tensors(step, group)
        for name, parameter in self.named_parameters():
            value = whole[plain(name)]
            if isinstance(parameter, DTensor):
                spread = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.to_local().copy_(spread.to_local())
            else:
                parameter.copy_(value)


def plain(name: str) -> str:
    return name.split(".", 1)[1].replace("/", ".")


class Failing(ShardedSource):
    """This rank dies, or hangs, when it is to gather its second tensor."""

    fault = ""
    count = 0

    def _gather(self, parameter: torch.Tensor) -> torch.Tensor:
        self.count += bool(self.fault)
        if self.count == 2 and self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == 2 and self.fault == "hangs":
            time.sleep(3600)
        return super()._gather(parameter)


async def has(replica: ProcessHandle, step: int) -> bool:
    expected = {
        digest_name(spec.group, name): fingerprint_bytes(content)
        for spec, content in weights_at(step)
        for name in spec.names
    }
    return dict((await replica.digest(list(expected))).values) == expected


async def sync(manager: CheckpointEngineManager, source: WeightSource, step: int) -> None:
    """All ranks alike; what came of it is said."""

    async def let_go() -> None:
        await asyncio.sleep(0.3 * manager.ranks.rank)
        said["let go"].append(time.perf_counter())

    one: dict[str, Any] = {"error": "", "began": time.perf_counter()}
    try:
        report = await manager.update_weights(source, Version(0, step), let_go=let_go)
    except SyncFailed as error:
        one["error"], report = str(error), error.report  # type: ignore[assignment]
    except HotbunkError as error:
        one["error"] = f"{type(error).__name__}: {error}"
        report = None
    one["seconds"] = time.perf_counter() - one["began"]
    for outcome in report.outcomes if report is not None else ():
        one["outcome"] = outcome.outcome.value
        one["kv"] = [event.start for event in outcome.timeline if event.name == "wake_kv"]
    for replica in manager.replicas:
        one["has it"] = not one["error"] and await has(replica, step)  # type: ignore[arg-type]
    said["syncs"].append(one)


async def main(rank: int, world: int, folder: Path, fault: str) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    mesh = init_device_mesh("cpu", (world,))
    models = {group: Model(group, mesh) for group in GROUPS}
    parts = {g: Failing(m, rename=plain, group=g, timeout=30.0) for g, m in models.items()}
    source = JoinedSource(list(parts.values()))
    replicas: list[ProcessHandle] = []
    if rank == 0:
        engine.setup()
        replicas.append(
            await start_replica(
                engine.NAME,
                {"step_time": 0.005},
                deadlines=Deadlines(update=DEADLINE, memory=5.0, hold=30.0),
                env={engine.FOLDER: str(folder), engine.REPLICA: "0"},
                setup="hotbunk.conformance.drill.engine:setup",
            )
        )
    policy = SyncPolicy(bucket_bytes=64, deadline=DEADLINE)
    transport = ShmTransport()
    manager = CheckpointEngineManager(
        replicas, transport, policy=policy, ranks=StoreRanks(store, rank, world, deadline=20.0)
    )
    for step in (1, 2, 3):
        for group, model in models.items():
            model.at(step, group)
        await manager.sleep_replicas()
        if step == 2 and rank == 0 and fault == "cut off":
            broken = Fault(0, "shm", 0, 0, BUCKET, 1, How.RAISE, PauseMode.ABORT, 64)
            engine.armed(folder, 0, 0).write_bytes(msgspec.json.encode(broken))
        if step == 2 and rank:
            Failing.fault = fault if fault in ("dies", "hangs") else ""
        await sync(manager, source, step)
        if step == 2 and fault in ("dies", "hangs"):
            break
    if rank == 0 and len(said["syncs"]) == 2:  # a trainer that is started again heals it
        alone = CheckpointEngineManager(replicas, transport, policy=policy)
        whole = JoinedSource([with_group(state_dict_source(tensors(3, g)), g) for g in GROUPS])
        await sync(alone, whole, 3)
    for replica in replicas:
        await replica.close()
    await transport.close()
    shutdown()
    end(rank, folder)


def end(rank: int, folder: Path) -> None:
    """Say it and go; a gather that hangs is not waited for."""
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    try:
        asyncio.run(asyncio.wait_for(main(rank, world, folder, sys.argv[4]), 80.0))
    # A boundary: what the parent sees is this text, and that nothing was said.
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        end(rank, folder)
