"""Our groups in verl's own configuration: they compose, and say what they mean to."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from hotbunk.rollout.contract import PauseMode
from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.verl.settings import settings, sync_policy
from hotbunk.trainer_hooks.verl.trainers import prepared


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
        ("+hotbunk.retrys=1", "retrys"),
        ("+hotbunk.policy.paus=keep", "paus"),
        ("actor_rollout_ref.rollout.name=vllm", "vllm"),
    ],
)
def test_mistakes_are_named_before_anything_starts(override: str, word: str) -> None:
    config = composed("+verl=[grpo,cpu,tiny]", override)
    with pytest.raises(ConfigError, match=word):
        prepared(config, "sync")


def test_a_run_without_our_section_has_our_defaults() -> None:
    config = made("grpo", "cpu", "tiny")
    OmegaConf.set_struct(config, False)
    config.pop("hotbunk")
    rollout = prepared(config, "sync").actor_rollout_ref.rollout
    assert settings(rollout).retries == 1
