"""Which vLLM is this, and what follows: by its source, and by recorded surfaces of others."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
from vllm.v1.metrics.stats import SchedulerStats

from hotbunk.rollout import errors, native
from hotbunk.rollout.backends.vllm import compat, declared, options
from hotbunk.rollout.backends.vllm.options import VllmOptions
from hotbunk.rollout.backends.vllm.stats import Stats
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.registry import create_backend

HERE = Path(__file__).parent / "surfaces"


def recorded(version: str) -> compat.Surface:
    said = json.loads((HERE / f"{version}.json").read_text())
    return {name: tuple(parameters) for name, parameters in said.items()}


def test_what_is_installed_is_what_was_recorded() -> None:
    """A signature that drifts shows here first."""
    assert compat.installed() == recorded("0.32.0")
    assert compat.missing(compat.installed()) == []


def test_the_source_says_what_the_classes_say() -> None:
    """The probe reads source, so that it can speak before anything is imported."""
    for name, parameters in compat.installed().items():
        kind, _, member = name.partition(".")
        path = compat._WHERE[kind].removesuffix(".py").replace("/", ".")
        owner = getattr(import_module(f"vllm.{path}"), kind)
        attribute = getattr(owner, member, None) if member else owner
        if inspect.isfunction(attribute) or inspect.ismethod(attribute):
            found = [p for p in inspect.signature(attribute).parameters if p not in ("self", "cls")]
            variadic = {"args", "kwargs"} - set(parameters)
            assert [p for p in found if p not in variadic] == list(parameters), name


def test_vllm_0_24_is_refused_and_each_missing_thing_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No version spans, no sessions in its transfer engines, and no word from all engine cores."""
    older = recorded("0.24.0")
    lacking = compat.missing(older)
    assert lacking == [
        "AsyncLLM.update_weight_version",
        "AsyncMPClient.call_utility_all_async",
        "CompletionOutput.weight_versions",
        "GracefulHTTPError",
        "RequestState.track_weight_version",
        "VLLMClientError",
        "WeightTransferEngine.finish_weight_update",
        "WeightTransferEngine.reset_weight_update_target",
        "WeightTransferEngine.start_weight_update",
    ]
    assert older["Worker.start_weight_update"] == ("is_checkpoint_format",)
    assert "AsyncLLM.release_kv_cache_memory" not in older
    monkeypatch.setattr(compat, "installed", lambda: older)
    with pytest.raises(errors.ConfigError) as refused:
        create_backend("vllm", model="m")
    assert all(name in str(refused.value) for name in lacking)


def test_a_missing_argument_is_named() -> None:
    changed = {**compat.installed(), "AsyncLLM.pause_generation": ("mode",)}
    assert compat.missing(changed) == ["AsyncLLM.pause_generation(clear_cache)"]


def test_capabilities_follow_the_device_the_surface_and_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = declared.declared(VllmOptions("m", tensor_parallel_size=2, data_parallel_size=3))
    assert here.release
    assert here.release_kv_cache
    assert here.ranks == 6
    assert here.retentions == frozenset(Retention)

    asked_not_to = declared.declared(VllmOptions("m", enable_sleep_mode=False))
    assert not asked_not_to.release
    assert "enable_sleep_mode" in asked_not_to.release.how
    assert asked_not_to.retentions == {Retention.RESIDENT}

    with monkeypatch.context() as pure:
        pure.setattr(native, "path", lambda: Path("/nowhere"))
        assert "native pool" in declared.declared(VllmOptions("m")).release.how

    monkeypatch.setattr(declared, "is_cpu_build", lambda: False)
    monkeypatch.setattr(options, "is_cpu_build", lambda: False)
    assert declared.declared(VllmOptions("m")).release_kv_cache
    older = declared.declared(VllmOptions("m"), recorded("0.24.0"))
    assert older.release
    assert not older.release_kv_cache
    assert compat.KV_ALONE in older.release_kv_cache.how


def test_kv_in_use_is_that_of_all_engine_cores() -> None:
    """Blocks are counted over all of them, so one that is empty must not speak for the others."""
    stats = Stats(2)
    config: Any = None
    logger = PerEngineStatLoggerAdapter(config, [0, 1], lambda *_: stats)  # type: ignore[arg-type]
    logger.record(SchedulerStats(kv_cache_usage=0.5), None, engine_idx=0)
    assert stats.kv_usage == 0.25  # the other has said nothing yet
    logger.record(SchedulerStats(kv_cache_usage=0.0), None, engine_idx=1)
    assert stats.kv_usage == 0.25
    logger.record(SchedulerStats(kv_cache_usage=0.1), None, engine_idx=1)
    assert stats.kv_usage == pytest.approx(0.3)
    assert stats.steps == 3
