"""Real verl and real vLLM in one job, each with its own pins: two environments, one Ray."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

VLLM = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not VLLM.exists(), reason="make engine-venv ENGINE=vllm makes the other one"
    ),
]


@pytest.mark.slow
def test_taking_turns_with_vllm_in_an_environment_of_its_own(
    jobs: ModuleType, assets: Path
) -> None:
    """It sleeps at level 2 while the trainer trains. Two packed syncs fail: one at the trainer, one
    where a tensor is changed on its way, which is found before vLLM may use it."""
    faults = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.hotbunk_faulty"
    job = jobs.run(
        assets,
        "+verl=[grpo,vllm,cpu,tiny]",
        f"hotbunk.rollout_python={VLLM}",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=hotbunk_faulty",
        f"+{faults}.cut=[1]",
        f"+{faults}.scale=[2]",
        steps=4,
        seconds=800,
    )
    assert len(job.steps) == 4, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6
    assert job.column("checkpoint_engine/failed_attempts") == [1, 1, 0, 0]
    assert job.column("checkpoint_engine/committed") == [1] * 4


def test_requests_in_flight_live_through_syncs_in_an_environment_of_vllms_own(
    jobs: ModuleType, assets: Path
) -> None:
    """lr=0: the schedule is off-policy, and the oracle compares with the trainer's weights of now."""
    job = jobs.run(
        assets,
        "+verl=[separate_async,cpu,tiny]",
        "actor_rollout_ref.rollout.name=hotbunk_vllm",
        f"+hotbunk.rollout_python={VLLM}",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        steps=3,
        seconds=800,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6
    assert job.column("checkpoint_engine/committed") == [1] * 3


@pytest.mark.slow
def test_an_adapter_reaches_vllm_apart_from_its_base(jobs: ModuleType, assets: Path) -> None:
    """Its base is never sent again, and survives the turns; merged weights are another test's."""
    job = jobs.run(
        assets,
        "+verl=[grpo,lora,vllm,cpu,tiny]",
        f"hotbunk.rollout_python={VLLM}",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj,down_proj]",
        steps=3,
        seconds=800,
    )
    assert len(job.steps) == 3, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6
    sent = job.column("checkpoint_engine/bytes")
    assert sent == [4 * 2 * 8 * ((64 + 64) + (64 + 32) + (128 + 64))] * 3


@pytest.mark.slow
def test_vllm_and_its_server_die_at_any_time(
    jobs: ModuleType, assets: Path, tmp_path: Path
) -> None:
    """vLLM's own core in the middle of an answer, then the process around it, its server's actor, and one
    that sleeps. What died is replaced, and the answers go on."""
    due = ("core", "engine", "actor", "asleep")
    job = jobs.run(
        assets,
        "+verl=[grpo,vllm,cpu,tiny]",
        f"hotbunk.rollout_python={VLLM}",
        "+hotbunk.setup=hotbunk_deaths:arm",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        steps=8,
        seconds=800,
        env={"HOTBUNK_DEATHS": str(tmp_path), "HOTBUNK_DEATHS_DUE": ",".join(due)},
    )
    assert {one.name for one in tmp_path.iterdir()} == set(due), jobs.explain(job)
    assert len(job.steps) == 8, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    assert max(job.column("training/rollout_probs_diff_max")) <= 1e-6
    assert job.column("checkpoint_engine/committed") == [1] * 8
    replaced = (
        job.column("checkpoint_engine/healed"),
        job.column("checkpoint_engine/failed_attempts"),
    )
    assert sum(map(sum, replaced)) >= len(due), replaced


@pytest.mark.slow
def test_a_judge_over_vllm_takes_turns_with_the_policy(jobs: ModuleType, assets: Path) -> None:
    """A generative reward model with pins of its own on the policy's device: it sleeps at level 1, and its
    weights come back by themselves. Validation is judged, too."""
    judge, manager = "reward.reward_model", "reward.reward_manager"
    judging = Path(__file__).with_name("judging.py")
    job = jobs.run(
        assets,
        "+verl=[ppo,cpu,tiny]",
        f"{judge}.enable=true",
        f"{judge}.model_path={assets / 'model'}",
        f"{judge}.rollout.name=hotbunk_vllm",
        f"+{judge}.rollout.custom.hotbunk.rollout_python={VLLM}",
        f"{judge}.rollout.tensor_model_parallel_size=1",
        f"{judge}.rollout.dtype=float32",
        f"{judge}.rollout.prompt_length=128",
        f"{judge}.rollout.response_length=16",
        f"{judge}.rollout.max_num_seqs=32",
        f"{manager}.source=importlib",
        f"{manager}.name=Judging",
        f"{manager}.module.path={judging}",
        "trainer.val_before_train=true",
        "data.val_max_samples=4",
        steps=3,
        seconds=800,
    )
    validated = job.steps[:1]
    assert len(job.steps) == 4, jobs.explain(job)
    assert job.code == 0, jobs.explain(job)
    trained = job.steps[1:]
    assert max(one["training/rollout_probs_diff_max"] for one in trained) <= 1e-6
    assert [one["checkpoint_engine/committed"] for one in trained] == [1] * 3
    assert "the judge said" in job.output
    assert all(1 / 7 <= one["val-core/tiny/reward/mean@1"] <= 1 for one in validated)
    assert all(1 / 7 <= one["critic/score/mean"] <= 1 for one in trained)
