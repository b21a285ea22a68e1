"""A real model: after a sync over shm, vLLM says what a fresh vLLM of the same weights says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.rollout.contract import GenerateRequest, Sampling, Version, collect
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.registry import create_backend, load_transport
from hotbunk.rollout.replica import Replica

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
PROMPTS = ((504, 3575, 282, 4649, 314), tuple(range(1000, 1040)), (19556, 28, 638, 359, 346, 47))


@pytest.fixture(scope="module")
def base() -> str:
    """The model's directory, made (once on a machine) by the environment that can read GGUF."""
    program = (
        "from hotbunk.trainer_hooks.recipes.smollm2 import ensure_smollm2; print(ensure_smollm2())"
    )
    made = subprocess.run(
        [ROOT / ".venv/bin/python", "-P", "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=500,
    )
    return made.stdout.strip()


async def replica_of(model: str) -> Replica:
    engine = create_backend(
        "vllm", model=model, kv_cache_memory_bytes=64 << 20, max_model_len=256, max_num_seqs=4
    )
    made = Replica(engine, name="vllm")
    await made.start()
    return made


async def says(replica: Replica, name: str) -> list[tuple[Any, Any]]:
    found = []
    for n, prompt in enumerate(PROMPTS):
        sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        done = await collect(replica.generate(GenerateRequest(f"{name}{n}", prompt, sampling)))
        found.append((done.token_ids, done.logprobs))
    return found


async def test_a_sync_makes_what_a_fresh_engine_is(base: str, tmp_path: Path) -> None:
    """Its head is tied to the embedding; a stale one would say other tokens."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
            parameter += (0.1 * parameter.float().std() * noise).to(parameter.dtype)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    replica, shm = await replica_of(base), load_transport("shm")()
    try:
        before = await says(replica, "before")
        manager = CheckpointEngineManager(
            [LocalHandle(replica)], shm, policy=SyncPolicy(deadline=120.0)
        )
        report = await manager.update_weights(module_source(model), Version(0, 1))
        assert report.outcomes[0].update.verified == "applied"
        synced = await says(replica, "synced")
    finally:
        await replica.close()
        await shm.close()
    model.save_pretrained(tmp_path)
    fresh = await replica_of(str(tmp_path))
    try:
        assert await says(fresh, "fresh") == synced
    finally:
        await fresh.close()
    assert all(a[0] != b[0] for a, b in zip(before, synced, strict=True))
