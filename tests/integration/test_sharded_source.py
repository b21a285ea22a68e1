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

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 90.0  # seconds for a job; a rank that hangs in it is killed then


def run(tmp_path: Path, fault: str = "none", world: int = 2) -> list[dict[str, Any]]:
    """What every rank said; empty for those that died."""
    return started("fsdp_rank.py", tmp_path, [tmp_path / "rendezvous", tmp_path, fault], world)


def started(
    program: str, tmp_path: Path, arguments: list[Any], world: int = 2, waits_for: int | None = None
) -> list[dict[str, Any]]:
    """What every rank said; ``waits_for``: of these ranks, the first so many end by themselves."""
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / program, str(n), str(world), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        for n in range(world)
    ]
    try:
        for one in ranks[:waits_for]:
            one.wait(timeout=PATIENCE)
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


def synced(tmp_path: Path, fault: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What came of the syncs of an FSDP job, the second of which met the fault; by rank."""
    hung = 1 if fault == "hangs" else None
    said = started("fsdp_sync.py", tmp_path, [tmp_path, fault], waits_for=hung)
    return said[0], said[1]


def test_managers_of_all_ranks_sync_a_sharded_model_into_a_process(tmp_path: Path) -> None:
    """FSDP2's ranks and the manager's barriers at once: no KV before all have let go; an update
    that a receiver cuts off leaves nobody behind, and the next one is whole."""
    leader, follower = synced(tmp_path, "cut off")
    syncs = leader["syncs"]
    assert [one["outcome"] for one in syncs] == ["committed", "poisoned", "committed"], syncs
    assert [one["has it"] for one in syncs] == [True, False, True]
    assert [one["error"] for one in follower["syncs"]] == ["", "", ""]
    assert len(leader["let go"]) == len(follower["let go"]) == 2
    for one, away in zip(syncs[::2], follower["let go"], strict=True):
        assert away < one["kv"][0], "KV came back before every rank had let go"


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_rank_that_is_gone_ends_the_sync_of_a_sharded_model_in_time(
    tmp_path: Path, fault: str
) -> None:
    syncs = synced(tmp_path, fault)[0]["syncs"]
    assert [one["outcome"] == "committed" for one in syncs] == [True, False, True], syncs
    assert "TrainerFailed" in syncs[1]["error"] or "the source" in syncs[1]["error"]
    assert syncs[1]["seconds"] < 25, "longer than its deadline and what follows it"
    assert syncs[2]["has it"]


def test_a_module_without_a_process_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="module_source"):
        ShardedSource(nn.Linear(2, 2))


def test_names_of_wrappers_are_taken_off() -> None:
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"
