"""What ``import verl`` gets of us: names, nothing heavy, and a word when it goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Everything the plugins load when verl is imported: of ours only, and light.
LOADED = {
    "hotbunk",
    "hotbunk.trainer_hooks",
    "hotbunk.trainer_hooks.verl",
    "hotbunk.trainer_hooks.verl.cpu",
    "hotbunk.trainer_hooks.verl.late",
    "hotbunk.trainer_hooks.verl.plugin",
}


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**clean, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> object:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_verl_loads_nothing_heavy_of_ours() -> None:
    """What verl's import takes longer with us is these modules and two entry points."""
    program = (
        "import sys, json, verl\n"
        "ours = sorted(m for m in sys.modules if m.split('.')[0] == 'hotbunk')\n"
        "late = [m for m in ('verl.workers', 'verl.trainer', 'verl.checkpoint_engine')\n"
        "        if m in sys.modules]\n"
        "print(json.dumps([ours, late]))"
    )
    assert said(run(program)) == [sorted(LOADED), []]


def test_importing_verl_takes_hardly_longer_with_us() -> None:
    """What verl does with our two entry points, in processor time: other load here is not ours."""
    program = (
        "import json, time\n"
        "from importlib.metadata import entry_points\n"
        "import verl\n"  # the others' plugins, too, have been looked for by now
        "import sys\n"
        "for name in [m for m in sys.modules if m.split('.')[0] == 'hotbunk']: del sys.modules[name]\n"
        "began = time.process_time()\n"
        "ours = [p for p in entry_points(group='verl.plugins') if p.value.startswith('hotbunk.')]\n"
        "looked = time.process_time()\n"
        "for point in ours: point.load()\n"
        "print(json.dumps([len(ours), time.process_time() - looked]))"
    )
    measured = [said(run(program)) for _ in range(3)]
    assert all(count == 2 for count, _ in measured)  # type: ignore[misc]
    assert min(seconds for _, seconds in measured) <= 0.05, measured  # type: ignore[misc]


def test_names_are_in_verls_registries_and_verls_own_are_as_they_were() -> None:
    program = (
        "import json, sys, verl, torch, transformers, torch.distributed as dist\n"
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as rollouts, get_rollout_class\n"
        "from verl.workers.rollout.replica import get_rollout_replica_class\n"
        "from verl.checkpoint_engine.base import CheckpointEngineRegistry as engines\n"
        "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY as trainers\n"
        "import verl.trainer.ppo.v1\n"
        "ours = lambda names: sorted(n for n in names if n.startswith('hotbunk_'))\n"
        "print(json.dumps([ours(n for n, _ in rollouts), ours(engines._registry), ours(trainers),\n"
        "  get_rollout_class('hotbunk_reference').__name__,\n"
        "  get_rollout_replica_class('hotbunk_reference').__name__,\n"
        "  dist.init_process_group.__module__, hasattr(torch.cpu, 'mem_get_info'),\n"
        "  rollouts['vllm', 'async'], trainers['sync'].__module__]))"
    )
    rollouts, engines, trainers, *rest = said(run(program))  # type: ignore[misc]
    assert {"hotbunk_reference", "hotbunk_vllm"} <= set(rollouts)
    assert {"hotbunk_shm", "hotbunk_disk", "hotbunk_collective"} <= set(engines)
    assert trainers == ["hotbunk_colocate_async", "hotbunk_separate_async", "hotbunk_sync"]
    assert rest == [
        "HotbunkRollout",
        "HotbunkReplica",
        "torch.distributed.distributed_c10d",
        False,
        "verl.workers.rollout.vllm_rollout.ServerAdapter",
        "verl.trainer.ppo.v1.trainer_sync",
    ]


def test_a_plugin_that_fails_says_so_once_and_verl_goes_on(tmp_path: Path) -> None:
    """verl logs what plugins raise where nobody looks."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['hotbunk.rollout.registry'] = None  # cannot be imported\n"
    )
    program = (
        "import verl, verl.workers.rollout.base, verl.workers.rollout.replica\n"
        "import hotbunk.trainer_hooks.verl.plugin as p\n"
        "p.loudly('a rollout', p._rollouts)()\n"
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as r\n"
        "import json; print(json.dumps(len([n for n, _ in r if n.startswith('hotbunk_')])))"
    )
    done = run(program, PYTHONPATH=str(tmp_path))
    assert said(done) == 0
    lines = [line for line in done.stderr.splitlines() if "a rollout cannot be selected" in line]
    assert len(lines) == 1, done.stderr
    assert "hotbunk.rollout.registry" in lines[0]
    assert "hotbunk doctor" in done.stderr


def test_the_platform_is_there_only_when_it_is_asked_for() -> None:
    program = (
        "import verl, torch, torch.distributed as dist, os, json\n"
        "from verl.utils.device import get_device_name, get_torch_device, get_resource_name\n"
        "get_torch_device().empty_cache()\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('cpu:gloo,cpu:gloo', store=store, rank=0, world_size=1)\n"
        "from torch.distributed.fsdp import CPUOffloadPolicy\n"
        "print(json.dumps([get_device_name(), get_resource_name(), os.environ['VERL_ENGINE_DEVICE'],\n"
        "  get_torch_device().memory_allocated(), CPUOffloadPolicy(pin_memory=True).pin_memory]))"
    )
    assert said(run(program, VERL_PLATFORM="hotbunk_cpu")) == ["cpu", "GPU", "cuda", 0, False]


@pytest.mark.parametrize("attention", ["flash_attention_2", "eager"])
def test_models_load_with_eager_attention_on_a_host(attention: str, tmp_path: Path) -> None:
    program = (
        "import verl, json\n"
        "from transformers import AutoModelForCausalLM, Qwen2Config\n"
        "config = Qwen2Config(vocab_size=32, hidden_size=32, intermediate_size=32,\n"
        "  num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)\n"
        f"m = AutoModelForCausalLM.from_config(config, attn_implementation={attention!r})\n"
        "print(json.dumps(m.config._attn_implementation))"
    )
    assert said(run(program, VERL_PLATFORM="hotbunk_cpu")) == "eager"
