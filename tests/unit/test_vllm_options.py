"""What a vLLM engine can be told: typed, refused with the closest match, and never half-kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.backends.vllm import options as module
from hotbunk.rollout.backends.vllm.options import VllmOptions, prepare_environment
from hotbunk.rollout.errors import ConfigError, MissingExtra
from hotbunk.rollout.options import convert
from hotbunk.rollout.registry import create_backend

KNOWN = dict.fromkeys(
    [
        *VllmOptions.__struct_fields__,
        "disable_log_stats",
        "swap_space",
        "use_tqdm_on_load",
        "weight_transfer_config",
        "worker_cls",
    ]
)


def made(**options: Any) -> VllmOptions:
    return convert({"model": "m", **options}, VllmOptions, "backend vllm")


@pytest.mark.parametrize(
    "options, match",
    [
        ({"max_modellen": 8}, "max_model_len"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"engine_args": {"dtype": "float32"}}, "option of its own"),
        ({"engine_args": {"data_parallel_size": 2}}, "option of its own"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"engine_args": {"worker_cls": "mine"}}, "pool"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(**options)


def test_engine_args_pass_and_unknown_ones_do_not() -> None:
    chosen = made(engine_args={"swap_space": 1}).to_engine_args(KNOWN)
    assert chosen["swap_space"] == 1
    assert "engine_args" not in chosen
    with pytest.raises(ConfigError, match="swap_space"):
        made(engine_args={"swap_spaces": 1}).to_engine_args(KNOWN)


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("sleep", [True, False])
def test_who_gives_memory_back(monkeypatch: pytest.MonkeyPatch, cpu: bool, sleep: bool) -> None:
    """On CPUs a worker of ours; vLLM refuses its own sleep there."""
    monkeypatch.setattr(module, "is_cpu_build", lambda: cpu)
    chosen = made(enable_sleep_mode=sleep).to_engine_args(KNOWN)
    assert chosen.get("worker_cls") == (module.POOLED if cpu and sleep else None)
    assert chosen.get("enable_sleep_mode") == (None if cpu else sleep)
    assert chosen["weight_transfer_config"] == {"backend": "hotbunk"}


def test_the_tokenizer_is_skipped_where_there_is_none(tmp_path: Path) -> None:
    options = made(model=str(tmp_path))
    assert options.to_engine_args(KNOWN)["skip_tokenizer_init"] is True
    (tmp_path / "tokenizer.json").touch()
    assert options.to_engine_args(KNOWN)["skip_tokenizer_init"] is False
    assert made().to_engine_args(KNOWN)["skip_tokenizer_init"] is False  # a name: vLLM finds it
    forced = made(model=str(tmp_path), skip_tokenizer_init=True)
    assert forced.to_engine_args(KNOWN)["skip_tokenizer_init"] is True


def test_the_environment_gets_defaults_and_keeps_what_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "is_cpu_build", lambda: True)
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "8"})
    prepare_environment(made(model=str(tmp_path)))
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ  # it would bind later engines, too
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    monkeypatch.setattr(os, "environ", {})
    prepare_environment(made())
    assert "OMP_NUM_THREADS" not in os.environ
    assert "HF_HUB_OFFLINE" not in os.environ


def test_kv_bytes_are_the_options_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_cpu_build", lambda: True)
    monkeypatch.setattr(os, "environ", {})
    assert made().to_engine_args(KNOWN)["kv_cache_memory_bytes"] == 1 << 30
    told = made(kv_cache_memory_bytes=1 << 20)
    assert told.to_engine_args(KNOWN)["kv_cache_memory_bytes"] == 1 << 20
    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert made().to_engine_args(KNOWN)["kv_cache_memory_bytes"] is None
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE"):
        told.to_engine_args(KNOWN)
    monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    assert told.to_engine_args(KNOWN)["kv_cache_memory_bytes"] == 1 << 20


def test_without_vllm_the_extra_is_named() -> None:
    pytest.importorskip("torch")
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(MissingExtra, match=r"hotbunk\[vllm\]"):
            create_backend("vllm", model="m")
