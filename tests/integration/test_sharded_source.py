"""FSDP2 over two real processes: rank 0 sends what all of them gather."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from torch import nn

from hotbunk.checkpoint_engine.sources.sharded import ShardedSource, plain_name
from hotbunk.rollout.errors import ConfigError

PROGRAM = Path(__file__).parent / "programs" / "fsdp_rank.py"


def run(tmp_path: Path, fault: str = "none", world: int = 2) -> list[dict[str, Any]]:
    """What every rank said; empty for those that died."""
    rendezvous = tmp_path / "rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(n), str(world), rendezvous, tmp_path, fault],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        for n in range(world)
    ]
    try:
        for one in ranks:
            one.wait(timeout=90)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    files = [tmp_path / f"rank{n}.json" for n in range(world)]
    return [json.loads(f.read_text()) if f.exists() else {} for f in files]


def test_what_rank_0_gets_is_what_the_ranks_have_together_m5(tmp_path: Path) -> None:
    leader, follower = run(tmp_path)
    got = safetensors_torch.load_file(tmp_path / "got.safetensors")
    expected = safetensors_torch.load_file(tmp_path / "expected.safetensors")
    assert got.keys() == expected.keys()
    assert len(got) == 14
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float32, "not the bfloat16 copies that the forward left"
        assert torch.equal(got[name], tensor), name
    assert leader["ties"] == [["embed.weight", "head.weight"]]
    assert leader["peak"] == leader["largest"], "more than one gathered tensor was alive"
    assert [follower["followed 0"], follower["followed 1"]] == [14, 14]
    assert leader["default group untouched"]


def test_a_walk_that_is_cut_off_leaves_nobody_in_a_collective(tmp_path: Path) -> None:
    leader, follower = run(tmp_path, "cut off")
    assert follower["followed 0"] < 14
    assert follower["followed 1"] == 14
    got = safetensors_torch.load_file(tmp_path / "got.safetensors")
    expected = safetensors_torch.load_file(tmp_path / "expected.safetensors")
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert leader["default group untouched"]


@pytest.mark.parametrize("fault, left", [("leader dies", 1), ("follower dies", 0)])
def test_a_rank_that_dies_is_a_typed_error_on_the_other(
    tmp_path: Path, fault: str, left: int
) -> None:
    ranks = run(tmp_path, fault)
    assert ranks[1 - left] == {}
    assert ranks[left]["error"][0] == "TrainerFailed", ranks
    assert f"trainer rank {left}" in ranks[left]["error"][1]


def test_a_module_without_a_process_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="module_source"):
        ShardedSource(nn.Linear(2, 2))


def test_names_of_wrappers_are_taken_off() -> None:
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
