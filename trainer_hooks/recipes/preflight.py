"""What would fail later fails here, in one sentence, before anything exists on disk."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbunk.rollout.contract import Deployment
from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.registry import BACKENDS, TRANSPORTS, create_backend, find, names
from hotbunk.trainer_hooks.recipes import checkpoint
from hotbunk.trainer_hooks.recipes.config import RunConfig
from hotbunk.trainer_hooks.recipes.judge import judge_model
from hotbunk.trainer_hooks.recipes.models import (
    ByteTokenizer,
    Tokenizer,
    encode_sample,
    ensure_smollm2,
    load_bundle,
)
from hotbunk.trainer_hooks.recipes.replicas import HTTP, http_options
from hotbunk.trainer_hooks.recipes.tasks import Task, make_task

IN_PROCESS = "naive"  # the transport that passes memory by reference
SERVERS = (HTTP, "vllm_http")  # they run already
# Most engines cannot begin without weights: theirs are the model directory's until the first sync.
FIRST_LOAD = {"reference": {"load": "empty"}}
TINY = "model"  # folder of the run directory in which a tiny model is made


@dataclass(frozen=True)
class Plan:
    """A run that can begin. ``model_dir`` is None for a tiny model that is still to be made;
    ``resumed`` is the checkpoint to go on from."""

    config: RunConfig
    run_dir: Path
    task: Task
    response_tokens: int
    model_dir: Path | None
    first_step: int = 0
    incarnation: int = 0
    resumed: Path | None = None


def plan_run(config: RunConfig, *, resume: bool = False) -> Plan:
    """Check a configuration against the world.

    :raises ConfigError: a task, model, checkpoint or length that cannot work; a folder in use.
    :raises BackendNotFound: no such backend or transport.
    """
    find(BACKENDS, config.rollout.name)
    find(TRANSPORTS, config.transport.name)
    _check_processes(config)
    if config.trainer.decoupled:
        _check_beside(config)
    if config.judge.used:
        _check_judge(config)
    run_dir = Path(config.out)
    task = make_task(config.task)
    tokens = config.trainer.max_response_tokens or task.max_response_tokens
    if resume:
        resumed = checkpoint.latest_checkpoint(run_dir)
        state = checkpoint.read_state(resumed)
        if state.step >= config.steps:
            raise ConfigError(
                f"{config.out!r} has {state.step} steps already", remedy="set steps= higher"
            )
        # A new incarnation: steps after the checkpoint may have been served before.
        plan = Plan(
            config, run_dir, task, tokens, resumed, state.step, state.incarnation + 1, resumed
        )
    else:
        if (run_dir / "metrics.jsonl").exists():
            raise ConfigError(
                f"{config.out!r} already holds a run",
                remedy=f"choose another out=, or resume={config.out}",
            )
        plan = Plan(config, run_dir, task, tokens, _model_dir(config.model))
    _check_lengths(plan)
    options = backend_options(plan)
    for one in http_options(options) if config.rollout.name == HTTP else [options]:
        create_backend(config.rollout.name, **one)  # built, never started
    return plan


def backend_options(plan: Plan) -> dict[str, Any]:
    """What the engine is told: the model, and that the first sync brings its weights.

    A server knows its model already.
    """
    name, options = plan.config.rollout.name, dict(plan.config.rollout.options)
    if name in SERVERS:
        return options
    model = plan.model_dir or plan.run_dir / TINY
    return {"model": str(model), **FIRST_LOAD.get(name, {}), **options}


def _check_beside(config: RunConfig) -> None:
    """Generation that goes on while the trainer trains needs a place of its own."""
    name, rollout = config.trainer.name, config.rollout
    if config.transport.name == IN_PROCESS or not rollout.process:
        raise ConfigError(
            f"trainer={name} generates while it trains, so engines need processes of their own; "
            f"transport={IN_PROCESS} works within one process, where they would take turns"
            if config.transport.name == IN_PROCESS
            else f"trainer={name} generates while it trains: one process would make them take turns",
            remedy="set rollout.process=true and transport=shm, disk or collective",
        )
    if rollout.deployment is not Deployment.STANDALONE:
        raise ConfigError(
            f"rollout.deployment={rollout.deployment.value}: an engine that sleeps while the "
            f"trainer trains cannot generate meanwhile, as trainer={name} does",
            remedy="set rollout.deployment=standalone",
        )
    if config.trainer.offload:
        raise ConfigError(
            f"trainer.offload=true gives the trainer's memory away while engines generate, and with "
            f"trainer={name} they always do",
            remedy="set trainer.offload=false",
        )


def _check_judge(config: RunConfig) -> None:
    """A judge takes turns, so everybody must."""
    judge = config.judge
    if config.trainer.decoupled:
        raise ConfigError(
            f"trainer={config.trainer.name} leaves a judge no turn: engines never sleep",
            remedy="set judge=none, or trainer=grpo",
        )
    load_bundle(judge_model(judge))
    create_backend(judge.backend, model=str(judge_model(judge)), **judge.options)


def _check_processes(config: RunConfig) -> None:
    """What is in another process must be reachable there."""
    rollout = config.rollout
    if rollout.name == HTTP and not rollout.process:
        raise ConfigError("rollout.process=false, and a server is a process of its own")
    if rollout.process and config.transport.name == IN_PROCESS:
        known = [name for name in names(TRANSPORTS) if name != IN_PROCESS]
        better = "shm" if "shm" in known or not known else known[0]
        raise ConfigError(
            f"transport={IN_PROCESS} works within one process, and rollout.process=true puts the "
            "engine into another",
            remedy=f"set transport={better}",
        )
    if rollout.data_parallel > 1 and not rollout.process:
        raise ConfigError(
            f"rollout.data_parallel={rollout.data_parallel} needs a process for each rank",
            remedy="set rollout.process=true, and transport=shm",
        )


def _model_dir(model: str) -> Path | None:
    if model == "tiny":
        return None
    return ensure_smollm2() if model == "smollm2" else Path(model)


def _check_lengths(plan: Plan) -> None:
    """One request must fit the KV pool and the model's context."""
    tokenizer: Tokenizer
    if plan.model_dir is None:
        tokenizer, context = ByteTokenizer(), plan.config.tiny.context
    else:
        bundle = load_bundle(plan.model_dir)
        tokenizer, context = bundle.tokenizer, int(bundle.config.max_position_embeddings)
    samples = plan.task.sample(random.Random(0), 256)
    longest = max(len(encode_sample(tokenizer, s)) for s in samples) + plan.response_tokens
    capacity = plan.config.rollout.options.get("kv_cache_tokens")
    if isinstance(capacity, int) and longest > capacity:
        raise ConfigError(
            f"the KV pool holds {capacity} tokens and one request may need {longest}",
            remedy=f"set rollout.options.kv_cache_tokens to {longest} or more",
        )
    if longest > context:
        raise ConfigError(
            f"one request may need {longest} tokens and the model's context is {context}",
            remedy="shorten the prompts, or lower trainer.max_response_tokens",
        )
