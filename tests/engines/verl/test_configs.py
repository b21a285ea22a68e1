"""Our groups in verl's own configuration: they compose, and say what they mean to."""

from __future__ import annotations

import itertools
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from hotbunk.rollout.contract import Deployment, PauseMode
from hotbunk.rollout.errors import BackendNotFound, ConfigError
from hotbunk.trainer_hooks.verl.settings import (
    adapts,
    backend_of,
    replica_spec,
    settings,
    sync_policy,
)
from hotbunk.trainer_hooks.verl.trainers import _sober_logger, prepared


def composed(*overrides: str) -> DictConfig:
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose(
            "ppo_trainer", ["hydra.searchpath=[pkg://hotbunk.configs]", "tiny=/x", *overrides]
        )


def made(*groups: str) -> DictConfig:
    return composed(f"+verl=[{','.join(groups)}]")


def test_grpo_in_turns() -> None:
    config = made("grpo", "cpu", "tiny")
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.v1.trainer_mode == "hotbunk_sync"
    assert config.actor_rollout_ref.rollout.name == "hotbunk_reference"
    assert config.actor_rollout_ref.model.path == "/x/model"
    assert config.data.train_files == "/x/train.parquet"


def test_ppo_has_a_critic_of_the_actors_model() -> None:
    config = made("ppo", "cpu", "tiny")
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.model.path == "/x/model"
    assert config.trainer.v1.trainer_mode == "hotbunk_sync"


def test_separate_engines_keep_what_is_in_flight() -> None:
    config = made("separate_async", "cpu", "tiny")
    steps = config.trainer.v1.separate_async.parameter_sync_step
    assert (
        config.data.train_batch_size == steps * config.actor_rollout_ref.actor.ppo_mini_batch_size
    )
    assert not config.actor_rollout_ref.hybrid_engine
    rollout = prepared(config, "separate_async").actor_rollout_ref.rollout
    assert sync_policy(rollout, {}).pause is PauseMode.KEEP
    assert config.trainer.v1.trainer_mode == "separate_async"  # what verl's own trainer reads


def test_what_is_under_hotbunk_goes_where_rollouts_find_it() -> None:
    config = composed(
        "+verl=[grpo,cpu,tiny]", "hotbunk.retries=3", "+hotbunk.policy.release_kv=never"
    )
    rollout = prepared(config, "sync").actor_rollout_ref.rollout
    assert settings(rollout).retries == 3
    policy = sync_policy(rollout, {"pause": "keep", "release_kv": "always"})
    assert (policy.pause, policy.release_kv) == (PauseMode.KEEP, "never")
    assert policy.bucket_bytes == 1 << 20
    assert "hotbunk" not in config
    prepared(config, "sync")  # idempotent


@pytest.mark.parametrize(
    "override, word",
    [
        ("+hotbunk.retrys=1", "'retrys'; did you mean 'retries'"),
        ("+hotbunk.policy.paus=keep", "'paus'; did you mean 'pause'"),
        ("+hotbunk.policy.pause=kep", "kep"),
        ("+hotbunk.deadlines.hld=3", "'hld'; did you mean 'hold'"),
        ("hotbunk.retries=-1", "must be 0 or more"),
        ("actor_rollout_ref.rollout.name=vllm", "vllm"),
    ],
)
def test_mistakes_are_named_before_anything_starts(override: str, word: str) -> None:
    config = composed("+verl=[grpo,cpu,tiny]", override)
    with pytest.raises(ConfigError, match=word):
        prepared(config, "sync")


@pytest.mark.parametrize(
    "override, word",
    [
        ("actor_rollout_ref.rollout.name=hotbunk_referense", "did you mean 'reference'"),
        ("actor_rollout_ref.rollout.name=hotbunk_sglang", "has no adapter for SGLang"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_smh", "did you mean 'shm'"),
    ],
)
def test_what_is_not_there_is_named_before_anything_starts(override: str, word: str) -> None:
    config = composed("+verl=[grpo,cpu,tiny]", override)
    with pytest.raises(BackendNotFound, match=word) as error:
        prepared(config, "sync")
    assert error.value.remedy


MODES = {
    "grpo": "sync",
    "ppo": "sync",
    "colocate_async": "colocate_async",
    "separate_async": "separate_async",
}
COMBINED = [
    (base, *(one for one in others if one))
    for base, *others in itertools.product(
        MODES, ("", "lora"), ("", "vllm", "npu"), ("cpu", ""), ("tiny",)
    )
]
# On a laptop in CI; on a device, which none of the others can tell apart, with the slow ones.
SORTED = [
    pytest.param(groups, id="-".join(groups), marks=() if "cpu" in groups else pytest.mark.slow)
    for groups in COMBINED
]


@pytest.mark.parametrize("groups", SORTED)
def test_every_combination_of_our_groups_is_understood(groups: tuple[str, ...]) -> None:
    """verl's own file takes all of them; ours says what it is, or what is not there."""
    config = made(*groups)
    mode = MODES[groups[0]]
    assert config.trainer.v1.trainer_mode == f"hotbunk_{mode}"
    rollout = config.actor_rollout_ref.rollout
    wanted = next((one for one in ("npu", "vllm") if one in groups), "reference")
    assert backend_of(rollout) == wanted.replace("npu", "vllm_ascend")
    assert adapts(config.actor_rollout_ref.model) is ("lora" in groups)
    if "npu" in groups:
        with pytest.raises(BackendNotFound, match="has no adapter for vLLM on Ascend"):
            prepared(config, mode)
        return
    prepared(config, mode)
    keeps = sync_policy(rollout, {}).pause is PauseMode.KEEP
    assert keeps is (mode == "separate_async")


def test_a_run_without_our_section_has_our_defaults() -> None:
    config = made("grpo", "cpu", "tiny")
    OmegaConf.set_struct(config, False)
    config.pop("hotbunk")
    rollout = prepared(config, "sync").actor_rollout_ref.rollout
    assert settings(rollout).retries == 1


@pytest.mark.parametrize(
    "rank, merge, wanted",
    [
        (16, False, {"enable_lora": True, "max_lora_rank": 16}),
        (4, False, {"enable_lora": True, "max_lora_rank": 8}),  # vLLM makes room for 8 at least
        (16, True, {}),
        (0, False, {}),
    ],
)
def test_vllm_makes_room_for_an_adapter_that_stays_apart(
    rank: int, merge: bool, wanted: dict[str, object]
) -> None:
    config = composed(
        "+verl=[grpo,lora,vllm,cpu,tiny]",
        f"actor_rollout_ref.model.lora_rank={rank}",
        f"actor_rollout_ref.model.lora.merge={merge}",
    )
    rollout = prepared(config, "sync").actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    OmegaConf.set_struct(model, False)
    model.local_path = "/x/model"
    spec = replica_spec(rollout, model, name="r", deployment=Deployment.HYBRID, device="cpu")
    args = {**spec.options}["engine_args"]
    assert {key: args[key] for key in ("enable_lora", "max_lora_rank") if key in args} == wanted


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "backend, override, wanted",
    [
        ("reference", "max_num_batched_tokens=123", {"max_num_batched_tokens": 123}),
        ("reference", "max_num_seqs=5", {"max_num_seqs": 5, "kv_cache_tokens": 5 * (64 + 16)}),
        ("reference", "response_length=40", {"kv_cache_tokens": 104 * 256}),
        ("reference", "load_format=auto", {"load": "disk"}),
        ("reference", "load_format=dummy", {"load": "empty"}),
        ("reference", "dtype=bfloat16", {"dtype": "bfloat16"}),
        ("reference", "enable_prefix_caching=false", {"enable_prefix_caching": False}),
        ("reference", "engine_kwargs.hotbunk_reference={block_size: 8}", {"block_size": 8}),
        ("vllm", "gpu_memory_utilization=0.3", {"engine_args.gpu_memory_utilization": 0.3}),
        ("vllm", "max_num_batched_tokens=123", {"engine_args.max_num_batched_tokens": 123}),
        ("vllm", "max_num_seqs=5", {"max_num_seqs": 5}),
        ("vllm", "prompt_length=100", {"max_model_len": 116}),
        ("vllm", "max_model_len=77", {"max_model_len": 77}),
        ("vllm", "seed=9", {"seed": 9}),
        ("vllm", "engine_kwargs.hotbunk_vllm={seed: 8}", {"seed": 8}),
    ],
)
def test_verls_keys_keep_their_meaning(
    backend: str, override: str, wanted: dict[str, object]
) -> None:
    config = composed(
        "+verl=[grpo,cpu,tiny]",
        f"{ROLLOUT}.name=hotbunk_{backend}",
        f"{ROLLOUT}.max_num_seqs=256",
        f"++{ROLLOUT}.{override}",
    )
    rollout = prepared(config, "sync").actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    OmegaConf.set_struct(model, False)
    model.local_path = "/x/model"
    device = "cuda:0" if backend == "vllm" else "cpu"
    spec = replica_spec(rollout, model, name="r", deployment=Deployment.HYBRID, device=device)
    for name, value in wanted.items():
        found: object = spec.options
        for part in name.split("."):
            assert isinstance(found, dict)
            found = found[part]
        assert found == value, name


def test_what_verl_logs_in_a_way_that_raises_is_not_logged() -> None:
    """``info(..., flush=True)`` in verl 0.9.1's separate_async is a TypeError where INFO is on."""
    logger = logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with _sober_logger():
            assert not logger.isEnabledFor(logging.INFO)
            assert logger.isEnabledFor(logging.WARNING)
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)
