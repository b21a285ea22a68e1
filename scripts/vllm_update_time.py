"""How long an update of SmolLM2 takes vLLM, against an in-place copy of the same bytes.

    make engine-venv ENGINE=vllm
    .venv-vllm/bin/python -P scripts/vllm_update_time.py [ROUNDS]

Everything in one run: whole syncs over shm by the manager, without sleep; the replica's part of
each (from accept to commit, verified); and torch copying the same tensors within this process, into
memory that has been touched. Both orders alternate. Only a quiet machine's figures mean anything.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.rollout.contract import Version
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import create_backend, load_transport
from hotbunk.rollout.replica import Replica
from hotbunk.trainer_hooks.recipes.smollm2 import ensure_smollm2


async def main(rounds: int) -> None:
    """Print one line a figure: median, least and most, in milliseconds."""
    directory = str(ensure_smollm2())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tensors = list({p.data_ptr(): p.detach() for p in model.parameters()}.values())
    places = [torch.empty_like(tensor).fill_(1) for tensor in tensors]
    engine = create_backend("vllm", model=directory, kv_cache_memory_bytes=64 << 20)
    replica, shm = Replica(engine), load_transport("shm")()
    await replica.start()
    found: dict[str, list[float]] = {"sync": [], "replica": [], "copy": []}
    try:
        manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=SyncPolicy())
        for step in range(1, rounds + 3):
            began = time.perf_counter()
            report = await manager.update_weights(module_source(model), Version(0, step))
            synced = time.perf_counter()
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor)
            copied = time.perf_counter()
            update = report.outcomes[0].update
            if step > 2 and update is not None:  # the first ones touch memory for the first time
                found["sync"].append(synced - began)
                found["replica"].append(update.seconds)
                found["copy"].append(copied - synced)
    finally:
        await replica.close()
        await shm.close()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    print(f"{nbytes / 1e6:.0f} MB, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, seconds in found.items():
        ms = [1000 * one for one in seconds]
        print(f"{name:8} {statistics.median(ms):8.1f} ms  ({min(ms):.1f} - {max(ms):.1f})")
    ratio = statistics.median(found["replica"]) / statistics.median(found["copy"])
    print(f"replica / copy {ratio:.2f}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
