"""Unmodified verl trains with the reference engine, and goes on when syncs fail.

``training/rollout_probs_diff_max`` is the oracle: the engine's probability of each token against the
trainer's, in float32 about 1e-9 where the engine has the trainer's weights, 1e-5 where one tensor
came times 1.05.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

ORACLE = "training/rollout_probs_diff_max"
EXACT = 1e-6


@pytest.mark.timeout(900)
def test_grpo_learns_through_three_kinds_of_failed_syncs(jobs: ModuleType, assets: Path) -> None:
    """A trainer that fails mid-sync, a tensor changed on its way, an engine killed at a bucket."""
    faults = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.hotbunk_faulty"
    job = jobs.run(
        assets,
        "+verl=[grpo,cpu,tiny]",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_faulty",
        f"+{faults}.cut=[3]",
        f"+{faults}.scale=[5]",
        f"+{faults}.kill=[7]",
        steps=14,
        seconds=800,
    )
    assert len(job.steps) == 14, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    failed = [int(n) for n in job.column("checkpoint_engine/failed_attempts")]
    assert failed == [0, 0, 1, 0, 1, 0, 1, *[0] * 7]
    assert job.column("checkpoint_engine/committed") == [1] * 14
    reward = job.column("critic/score/mean")
    assert sum(reward[-4:]) / 4 > 2 * sum(reward[:2]) / 2, reward
    for step, came_of_it in ((3, "rolled back"), (5, "poisoned"), (7, "lost")):
        assert re.search(rf"attempt 1: version 0\.{step} .*{came_of_it}", job.output), came_of_it


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode",
    [
        "grpo",
        pytest.param("colocate_async", marks=pytest.mark.slow),
        pytest.param("separate_async", marks=pytest.mark.slow),
    ],
)
def test_engines_and_servers_die_at_any_time(
    mode: str, jobs: ModuleType, assets: Path, tmp_path: Path
) -> None:
    """An engine in the middle of an answer, then its server's actor, and (where they sleep) one asleep.

    Nobody syncs then: what died is replaced while verl waits for responses, and those go on."""
    job = jobs.run(
        assets,
        f"+verl=[{mode},cpu,tiny]",
        "+hotbunk.setup=hotbunk_deaths:arm",
        "actor_rollout_ref.actor.optim.lr=0",  # the async schedules are off-policy
        steps=6,
        seconds=800,
        env={"HOTBUNK_DEATHS": str(tmp_path)},
    )
    died = {one.name for one in tmp_path.iterdir()}
    assert died == {"engine", "actor"} | ({"asleep"} if mode != "separate_async" else set())
    assert len(job.steps) == 6, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [1] * 6
    replaced = (
        job.column("checkpoint_engine/healed"),
        job.column("checkpoint_engine/failed_attempts"),
    )
    assert sum(map(sum, replaced)) >= len(died), replaced


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_die_between_local_updates_too(
    jobs: ModuleType, assets: Path, tmp_path: Path
) -> None:
    """Two trainer steps a sync, two engines: who is left goes on until the sync that replaces the dead."""
    job = jobs.run(
        assets,
        "+verl=[separate_async,cpu,tiny]",
        "+hotbunk.setup=hotbunk_deaths:arm",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.actor.optim.lr=0",
        steps=6,
        seconds=800,
        env={"HOTBUNK_DEATHS": str(tmp_path), "HOTBUNK_DEATHS_DUE": "engine,actor"},
    )
    assert {one.name for one in tmp_path.iterdir()} == {"engine", "actor"}, jobs.explain(job)
    assert len(job.steps) == 6, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [2] * 6
    replaced = (
        job.column("checkpoint_engine/healed"),
        job.column("checkpoint_engine/failed_attempts"),
    )
    assert sum(map(sum, replaced)) >= 2, replaced


ADAPTER = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.model.target_modules=[q_proj,v_proj,down_proj]",
)
# Elements of the two matrices of each target: rank x (in + out), two layers, four bytes each.
ADAPTER_BYTES = 4 * 2 * 4 * ((64 + 64) + (64 + 32) + (128 + 64))


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_an_adapter_reaches_the_engine_apart_from_its_base(jobs: ModuleType, assets: Path) -> None:
    """verl's engine wakes without its base where nobody said that it must survive (NaN at step 2)."""
    job = jobs.run(assets, "+verl=[grpo,cpu,tiny]", *ADAPTER, steps=4, seconds=600)
    assert len(job.steps) == 4, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/bytes") == [ADAPTER_BYTES] * 4


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "apart"])
def test_an_adapter_of_two_trainer_ranks_reaches_both_replicas(
    merged: bool, jobs: ModuleType, assets: Path
) -> None:
    """FSDP2 over two ranks, each with an engine beside it; weights in the type they are trained in."""
    job = jobs.run(
        assets,
        "+verl=[grpo,cpu,tiny]",
        *ADAPTER,
        f"actor_rollout_ref.model.lora.merge={str(merged).lower()}",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_collective",
        steps=3,
        seconds=600,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [2] * 3
    if not merged:
        assert job.column("checkpoint_engine/bytes") == [2 * ADAPTER_BYTES] * 3


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_engines_elsewhere_get_the_adapter_while_requests_are_in_flight(
    jobs: ModuleType, assets: Path
) -> None:
    """In verl 0.9.1 an adapter never reaches them. lr=0: the schedule is off-policy."""
    job = jobs.run(
        assets,
        "+verl=[separate_async,cpu,tiny]",
        *ADAPTER,
        "actor_rollout_ref.actor.optim.lr=0",
        steps=3,
        seconds=600,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [1] * 3
    assert job.column("checkpoint_engine/bytes") == [ADAPTER_BYTES] * 3


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_responses_that_a_turn_cut_off_go_on_after_it_and_after_failed_ones(
    jobs: ModuleType, assets: Path
) -> None:
    """``colocate_async``: more responses are asked for than a step takes, and the rest is cut off when
    the trainer's turn comes. lr=0: a response of two versions is compared with the newer one."""
    faults = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.hotbunk_faulty"
    job = jobs.run(
        assets,
        "+verl=[grpo,cpu,tiny]",
        "trainer.v1.trainer_mode=hotbunk_colocate_async",
        "actor_rollout_ref.actor.optim.lr=0",
        "data.max_response_length=256",
        "actor_rollout_ref.rollout.max_num_seqs=8",  # so that a turn finds some of them half done
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_faulty",
        f"+{faults}.cut=[1]",
        f"+{faults}.scale=[2]",
        f"+{faults}.kill=[3]",
        steps=5,
        seconds=600,
    )
    assert len(job.steps) == 5, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/failed_attempts") == [1, 1, 1, 0, 0]
    assert job.column("checkpoint_engine/committed") == [1] * 5
    assert (
        max(job.column("training/off_policy/trajectory_spans/max")) >= 2
    )  # some lived through one


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_nothing_is_released_where_nothing_is_to_be_freed(jobs: ModuleType, assets: Path) -> None:
    """``free_cache_engine=false``: updates go to engines that stay awake."""
    job = jobs.run(
        assets,
        "+verl=[grpo,cpu,tiny]",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        steps=3,
        seconds=600,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [1] * 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ppo_with_a_critic_and_a_kl_reference(jobs: ModuleType, assets: Path) -> None:
    """Actor, critic, reference and engine take turns on one device."""
    job = jobs.run(
        assets,
        "+verl=[ppo,cpu,tiny]",
        "actor_rollout_ref.actor.use_kl_loss=true",
        steps=3,
        seconds=800,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert all(loss > 0 for loss in job.column("critic/vf_loss"))
    assert all(kl >= 0 for kl in job.column("actor/kl_loss"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alone", [False, True], ids=["takes turns", "has a device of its own"])
def test_a_generative_judge(alone: bool, jobs: ModuleType, assets: Path) -> None:
    """Actor, critic, judge and engine on one device, validation included; or a judge that never sleeps."""
    judge, model = "reward.reward_model", Path(__file__).with_name("judging.py")
    manager = "reward.reward_manager"
    turns = (
        f"{manager}.source=importlib",
        f"{manager}.name=Judging",
        f"{manager}.module.path={model}",
        "trainer.val_before_train=true",
        "data.val_max_samples=4",
    )
    apart = (
        f"{judge}.enable_resource_pool=true",
        f"{judge}.n_gpus_per_node=1",
        f"{judge}.nnodes=1",
        f"{judge}.rollout.free_cache_engine=false",
        f"reward.custom_reward_function.path={model}",
        "reward.custom_reward_function.name=judged",
    )
    job = jobs.run(
        assets,
        "+verl=[ppo,cpu,tiny]",
        f"{judge}.enable=true",
        f"{judge}.model_path={assets / 'model'}",
        f"{judge}.rollout.name=hotbunk_reference",
        f"{judge}.rollout.tensor_model_parallel_size=1",
        f"{judge}.rollout.dtype=float32",
        f"{judge}.rollout.prompt_length=128",
        f"{judge}.rollout.response_length=16",
        *(apart if alone else turns),
        steps=3,
        seconds=800,
    )
    validated = [job.steps.pop(0)] if not alone else []
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column(ORACLE)) <= EXACT
    assert job.column("checkpoint_engine/committed") == [1] * 3
    assert "the judge said" in job.output
    assert all(1 / 7 <= one["val-core/tiny/reward/mean@1"] <= 1 for one in validated)
    assert all(1 / 7 <= score <= 1 for score in job.column("critic/score/mean"))
