"""``hotbunk plan``: sizes from shapes, levels by phase, and what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hotbunk.cli.plan import run
from hotbunk.rollout.errors import BackendNotFound, ConfigError, Unsupported, UsageError
from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.forecast import (
    GIB,
    MemoryPlan,
    Rates,
    forecast,
    phases_of,
    takes_turns,
)
from hotbunk.trainer_hooks.recipes.models import build_tiny, load_model
from hotbunk.trainer_hooks.recipes.sizes import (
    ModelShapes,
    Parts,
    engine_sizes,
    parse_bytes,
    parts_of,
    shapes_of,
)

PARTS = Parts(weights=10, kv_cache=40, trainer=35, reference_policy=0, bucket=5, trainer_backup=26)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> ModelShapes:
    directory = build_tiny(tmp_path_factory.mktemp("model"))
    (directory / "model.safetensors").unlink()  # config.json is enough
    return shapes_of(directory)


def settings(*overrides: str) -> configuration.RunConfig:
    return configuration.load(["out=unused", *overrides])


def planned(shapes: ModelShapes, memory: int, *overrides: str) -> MemoryPlan:
    return forecast(settings(*overrides), shapes, "a device", memory, None)


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True), ("qwen3", False)])
def test_parameters_are_counted_as_the_model_holds_them(
    tmp_path: Path, family: str, tied: bool
) -> None:
    directory = build_tiny(tmp_path, family=family, tied=tied)
    model = load_model(directory)
    found = shapes_of(directory)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    assert found.kv_elements == 2 * config.num_hidden_layers * heads * dim


def test_turns_are_the_two_paths_of_the_architecture() -> None:
    levels = {p.name: p.levels for p in phases_of(settings(), PARTS)}
    assert [p.total for p in phases_of(settings(), PARTS)] == [50, 35, 50, 10]
    assert levels["generate"]["trainer"] == 0
    assert levels["update"]["kv_cache"] == 0
    assert [p.host for p in phases_of(settings(), PARTS)] == [26, 0, 0, 26]


@pytest.mark.parametrize(
    "overrides, totals",
    [
        (["trainer.offload=false"], [85, 35, 50]),
        (["rollout.free_cache_engine=false"], [50, 85, 90, 50]),
        (["rollout.deployment=standalone"], [50, 85, 90, 50]),
        (["rollout.deployment=standalone", "sync.release_kv=always"], [50, 85, 50, 10]),
        (["trainer=grpo_async"], [90, 90]),  # by shm, whose halves stay
        (["trainer=grpo_async", "sync.release_kv=always"], [90, 50]),
    ],
)
def test_each_setting_has_its_levels(overrides: list[str], totals: list[int]) -> None:
    config = settings(*overrides)
    assert [p.total for p in phases_of(config, PARTS)] == totals


def test_a_colocated_engine_keeps_its_weights_on_the_host() -> None:
    config = settings("rollout.deployment=colocated")
    assert takes_turns(config)
    assert [p.host for p in phases_of(config, PARTS)] == [26, 10, 0, 26]


def test_a_critic_takes_a_turn_of_its_own() -> None:
    parts = msgspec.structs.replace(PARTS, critic=30, critic_backup=22)
    phases = phases_of(settings("trainer=ppo"), parts)
    assert [p.name for p in phases] == ["generate", "critic", "train", "update", "trainer lets go"]
    assert [p.total for p in phases] == [50, 30, 35, 50, 10]
    assert [p.host for p in phases] == [48, 26, 22, 22, 48]
    kept = phases_of(settings("trainer=ppo", "trainer.offload=false"), parts)
    assert [p.total for p in kept] == [115, 65, 65, 80]


def test_a_judge_speaks_when_nobody_else_is_there() -> None:
    parts = msgspec.structs.replace(PARTS, judge=20, judge_backup=15)
    phases = phases_of(settings("judge=generative"), parts)
    assert [p.name for p in phases] == ["generate", "judge", "train", "update", "trainer lets go"]
    assert [p.total for p in phases] == [50, 20, 35, 50, 10]
    assert [p.host for p in phases] == [41, 26, 15, 15, 41]


def test_a_copy_for_the_kl_penalty_stays_all_the_time(shapes: ModelShapes) -> None:
    parts = parts_of(settings("trainer.kl_coef=0.1"), shapes, GIB)
    assert parts.reference_policy == shapes.arena(torch.float32)
    phases = phases_of(settings("trainer.kl_coef=0.1"), parts)
    assert {p.levels["reference_policy"] for p in phases} == {parts.reference_policy}


@pytest.mark.parametrize(
    "transport, buckets",
    [
        ("naive", 2),
        ("shm", 2),
        ("ipc", 2),
        ("collective", 3),
        ("disk", 2),
    ],
)
def test_buckets_of_two_replicas(shapes: ModelShapes, transport: str, buckets: int) -> None:
    config = settings(f"transport={transport}", "rollout.replicas=2", "sync.bucket_bytes=65536")
    assert parts_of(config, shapes, GIB).bucket == buckets * 65536


def test_what_is_written_in_place_needs_no_bucket(
    shapes: ModelShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parts_of(settings("rollout=vllm"), shapes, GIB).bucket == 0
    for other in ("transport=collective", "rollout.options.enable_sleep_mode=false"):
        assert parts_of(settings("rollout=vllm", other), shapes, GIB).bucket > 0


def test_vllm_pads_the_vocabulary_and_keeps_a_gibibyte_of_kv(
    shapes: ModelShapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rollout = configuration.RolloutConfig(name="vllm", options={})
    found = engine_sizes(rollout, shapes, 8 * GIB)
    plain = sum(one.nbytes(torch.float32) for one in shapes.tensors if one.parameter)
    huge = 2 << 20
    assert plain < found.weights < plain * 1.3 + huge
    assert found.weights % huge == 0, "memory that others map comes in huge pages"
    assert found.kv_cache == GIB
    two = configuration.RolloutConfig(name="vllm", options={"tensor_parallel_size": 2})
    halves = engine_sizes(two, shapes, 8 * GIB)
    assert found.weights <= halves.weights <= found.weights + 2 * huge
    assert halves.kv_cache == 2 * GIB, "each worker has as much as it is told"
    copies = configuration.RolloutConfig(name="vllm", options={"data_parallel_size": 2})
    assert engine_sizes(copies, shapes, 8 * GIB).weights == 2 * found.weights


def test_a_backend_that_nobody_knows_is_refused(shapes: ModelShapes) -> None:
    with pytest.raises(Unsupported, match=r"^backend 'sglang' does not support a plan"):
        engine_sizes(configuration.RolloutConfig(name="sglang"), shapes, GIB)


def test_every_change_is_true_and_the_first_that_fits_fits(shapes: ModelShapes) -> None:
    needed = planned(shapes, GIB).peak_bytes
    found = planned(shapes, needed - 4096)
    assert not found.fits
    assert found.changes
    for change in found.changes:
        again = planned(shapes, needed - 4096, *change.overrides)
        assert again.peak_bytes == change.peak_bytes
        assert again.fits == change.fits
    assert any(change.fits for change in found.changes)


def test_where_one_change_is_not_enough_several_are_named(shapes: ModelShapes) -> None:
    kept = ("trainer.offload=false", "rollout.free_cache_engine=false")
    update = next(p for p in planned(shapes, GIB).phases if p.name == "update")
    enough = update.total + 4096  # with turns, and less KV; neither is enough by itself
    found = planned(shapes, enough, *kept)
    assert not found.fits
    last = found.changes[-1]
    assert len(last.overrides) > 1
    assert last.fits
    # Later settings win, as they do on the command line.
    assert planned(shapes, enough, *kept, *last.overrides).fits


def test_a_device_too_small_for_anything_has_no_change_that_fits(shapes: ModelShapes) -> None:
    found = planned(shapes, 1 << 20)
    assert not found.fits
    assert not any(change.fits for change in found.changes)


def test_taking_turns_costs_what_moves(shapes: ModelShapes) -> None:
    rates = Rates(release=1.0, resume=2.0, backup=4.0, restore=8.0)
    config = settings()
    parts = parts_of(config, shapes, GIB)
    found = forecast(config, shapes, "a device", GIB, rates)
    assert found.switch is not None
    engine = (parts.weights + parts.kv_cache) * 3.0
    trainer = parts.trainer_backup * 12.0 + (parts.trainer - parts.trainer_backup) * 3.0
    assert found.switch.seconds * GIB == pytest.approx(engine + trainer)
    kept = settings("rollout.free_cache_engine=false", "trainer.offload=false")
    nothing = forecast(kept, shapes, "a device", GIB, rates).switch
    assert nothing is not None
    assert nothing.seconds == 0
    assert nothing.peak_bytes == found.switch.kept_peak_bytes


@pytest.mark.parametrize(
    "text, size",
    [("80GiB", 80 << 30), ("512m", 512 << 20), ("1.5 KB", 1536), ("4096", 4096), ("2T", 2 << 40)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 Gibs", "-3G", "0", "inf", "1e400", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"size|nothing"):
        parse_bytes(text)


def test_the_command_tells_by_its_exit_code_whether_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny(tmp_path / "model")
    assert run([], model=model, memory="1GiB", json=True) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["fits"]
    assert said["peak_bytes"] == max(phase["total"] for phase in said["phases"])
    assert run([], model=model, memory=str(said["peak_bytes"] - 1), json=False) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "rollout.options.kv_cache_tokens" in shown
    with pytest.raises(ConfigError, match=r"did you mean 'trainer\.offload'"):
        run(["trainer.offlod=true"], model=None, memory=None, json=False)
    with pytest.raises(ConfigError, match="no model directory"):
        run([], model=tmp_path / "none", memory=None, json=False)


@pytest.mark.parametrize("name", ["sglang", "trtllm", "vllm_ascend"])
def test_an_engine_without_an_adapter_is_not_one_that_does_not_fit(name: str) -> None:
    """A mistake in the command (exit code 2), not the answer no (1)."""
    with pytest.raises(BackendNotFound, match=f"'{name}': this hotbunk has no adapter") as error:
        run([f"rollout={name}"], model=None, memory="1GiB", json=True)
    assert isinstance(error.value, UsageError)
    assert "hotbunk.backends" in error.value.remedy


def test_on_this_host_the_cost_of_a_turn_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny(tmp_path / "model")
    assert run([], model=model, memory=None, json=True) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["switch"]["seconds"] > 0
    assert said["switch"]["kept_peak_bytes"] > said["peak_bytes"]
