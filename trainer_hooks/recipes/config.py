"""What a training run is made of: plain YAML composed by Hydra, then frozen and checked here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.rollout.contract import Deployment
from hotbunk.rollout.errors import ConfigError, closest
from hotbunk.rollout.options import convert_nested

GROUPS = ("preset", "rollout", "transport", "trainer", "task", "judge")


class TinyModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that is made from nothing. Its tokenizer is byte-level."""

    family: str = "llama"
    hidden: int = 128
    layers: int = 2
    context: int = 1024


class RolloutConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines: a backend by name, and what it is told (see that backend's options).

    ``replicas`` of them share a step's requests. With ``process`` each is a process of its own, of
    ``data_parallel`` ranks. ``threads`` of torch in each such process; 0: as the environment says.
    """

    name: str = "reference"
    deployment: Deployment = Deployment.HYBRID
    free_cache_engine: bool = True
    hold_deadline: float = 600.0
    process: bool = False
    replicas: int = 1
    data_parallel: int = 1
    threads: int = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("replicas", "data_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} must be 1 or more")
        if self.threads < 0:
            raise ConfigError(f"rollout.threads={self.threads} must be 0 or more")


class TransportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How weights travel; ``options`` are the transport's own."""

    name: str = "naive"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


SYNC, ASYNC, PPO = "grpo", "grpo_async", "ppo"


class Overdue(StrEnum):
    """What becomes of responses with a token more than ``max_staleness`` steps old."""

    DROP = "drop"  # with their group
    REWEIGHT = "reweight"  # such tokens count less, see ``grpo.overdue_scale``


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GRPO and PPO. ``prompts`` and ``group_size`` are per step; ``max_response_tokens`` None asks the
    task. ``mini_batches`` optimizer steps an epoch; ``micro_batch`` responses a forward pass.

    ``restarts``: how often each replica is replaced when it is lost; the run ends when none is left.

    Every ``validate_every`` steps (0: never) ``validate_prompts`` prompts, drawn apart from the steps',
    are answered greedily.

    ``gamma``, ``lam``, ``critic_lr`` and ``value_clip`` are ``ppo``'s own, see ``recipes/ppo.py``.

    The last fields are ``grpo_async``'s own. ``max_staleness``: how many steps older than the
    trainer's a token's version may be; generation runs so far ahead. ``partial_rollout``: responses
    that a sync cuts off go on with the new weights, or (False) begin again. ``weight_cap`` truncates
    importance weights. ``patience``: seconds without a whole batch that end a run.
    """

    name: str = SYNC
    prompts: int = 16
    group_size: int = 16
    max_response_tokens: int | None = None
    temperature: float = 1.0
    lr: float = 5e-4
    warmup: int = 10
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    clip: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    epochs: int = 1
    mini_batches: int = 1
    micro_batch: int = 256
    offload: bool = True
    logprob_tolerance: float = 1e-3
    save_every: int = 0
    validate_every: int = 0
    validate_prompts: int = 64
    threads: int = 0
    restarts: int = 3
    gamma: float = 1.0
    lam: float = 0.95
    critic_lr: float = 1e-3
    value_clip: float = 0.2
    max_staleness: int = 0
    overdue: Overdue = Overdue.DROP
    partial_rollout: bool = True
    weight_cap: float = 2.0
    patience: float = 600.0

    @property
    def has_critic(self) -> bool:
        """Whether a critic's values say what a token was worth."""
        return self.name == PPO

    @property
    def decoupled(self) -> bool:
        """Whether responses may be of older versions, so that the loss must tell them apart."""
        return self.name == ASYNC

    def __post_init__(self) -> None:
        if self.name not in (SYNC, ASYNC, PPO):
            raise ConfigError(f"trainer.name={self.name!r} is none of {SYNC}, {ASYNC}, {PPO}")
        if self.max_staleness and not self.decoupled:
            raise ConfigError(
                "trainer.max_staleness needs a trainer that runs beside generation",
                remedy=f"set trainer={ASYNC}",
            )
        if self.max_staleness < 0 or self.restarts < 0:
            raise ConfigError("trainer.max_staleness and trainer.restarts must not be negative")
        if not self.weight_cap >= 1:
            raise ConfigError(f"trainer.weight_cap={self.weight_cap} must be 1 or more")
        if not self.patience > 0:
            raise ConfigError(f"trainer.patience={self.patience} must be above 0 seconds")
        if self.validate_every < 0:
            raise ConfigError("trainer.validate_every must not be negative")
        for name in ("prompts", "epochs", "mini_batches", "micro_batch", "validate_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}={getattr(self, name)} must be 1 or more")
        if self.group_size < (1 if self.has_critic else 2):
            raise ConfigError(
                f"trainer.group_size={self.group_size} must be 2 or more: an advantage is relative"
            )
        if self.temperature <= 0:
            raise ConfigError(f"trainer.temperature={self.temperature} must be above 0")
        if self.clip <= 0 or min(self.lr, self.kl_coef, self.entropy_coef) < 0:
            raise ConfigError("trainer.lr, clip, kl_coef and entropy_coef must not be negative")
        if not (0 < self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ConfigError(f"trainer.gamma={self.gamma} and trainer.lam={self.lam} are shares")
        if self.critic_lr < 0 or self.value_clip <= 0:
            raise ConfigError("trainer.critic_lr must not be negative, and value_clip be above 0")
        if self.max_response_tokens is not None and self.max_response_tokens < 1:
            raise ConfigError("trainer.max_response_tokens must be 1 or more")
        if self.prompts * self.group_size < self.mini_batches:
            raise ConfigError("trainer.mini_batches is more than there are responses a step")


class TaskConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is practised: a built-in, or ``jsonl`` with the user's file and reward."""

    name: str = "copy"
    digits: int | None = None
    path: str | None = None
    reward: str | None = None
    max_response_tokens: int | None = None


class JudgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A generative reward model, or ``none``; see configs/judge/generative.yaml.

    ``template`` is what it is asked. The first group of ``pattern`` in what it says, divided by
    ``scale``, is the response's worth in [0, 1]; ``weight`` is its share of the reward.
    """

    name: str = "none"
    model: str | None = None
    backend: str = "reference"
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    template: str = "{prompt}{completion}"
    pattern: str = r"(\d+(?:\.\d+)?)"
    scale: float = 1.0
    max_tokens: int = 8
    weight: float = 1.0

    @property
    def used(self) -> bool:
        """Whether there is one."""
        return self.name != "none"

    def __post_init__(self) -> None:
        if self.name not in ("none", "generative"):
            raise ConfigError(f"judge.name={self.name!r} is neither none nor generative")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"judge.pattern={self.pattern!r}: {error}") from error
        if groups < 1:
            raise ConfigError(f"judge.pattern={self.pattern!r} has no group to take a number from")
        if "{completion}" not in self.template:
            raise ConfigError("judge.template does not show the judge the {completion}")
        if not self.scale > 0 or self.max_tokens < 1 or not 0 < self.weight <= 1:
            raise ConfigError(
                f"judge.scale={self.scale} and judge.max_tokens={self.max_tokens} must be above 0, "
                f"and judge.weight={self.weight} a share"
            )


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole run. ``model`` is ``tiny``, ``smollm2`` or a directory."""

    out: str
    preset: str = "tiny"
    model: str = "tiny"
    steps: int = 400
    seed: int = 1
    strict: bool = False
    tiny: TinyModel = TinyModel()
    rollout: RolloutConfig = RolloutConfig()
    transport: TransportConfig = TransportConfig()
    sync: SyncPolicy = SyncPolicy()
    trainer: TrainerConfig = TrainerConfig()
    task: TaskConfig = TaskConfig()
    judge: JudgeConfig = JudgeConfig()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be 1 or more")


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration as plain data.

    :raises ConfigError: an override that names no key or no preset, with the closest match.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import ConfigCompositionException, HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_module("hotbunk.configs", version_base="1.3"):
        try:
            # Which options there are depends on the presets that were chosen.
            presets = [o for o in overrides if o.partition("=")[0].lstrip("+") in GROUPS]
            _check_overrides(presets, {})
            base = OmegaConf.to_container(hydra_compose("train", overrides=presets))
            assert isinstance(base, dict)
            _check_overrides(overrides, base)
            made = hydra_compose("train", overrides=list(overrides))
            plain = OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
        except (HydraException, ConfigCompositionException, OmegaConfBaseException) as error:
            raise ConfigError(" ".join(str(error).split())) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


_ELSEWHERE = ("+rollout.options.", "+transport.options.", "+judge.options.")


def _check_overrides(overrides: Sequence[str], base: Mapping[Any, Any]) -> None:
    """Name the mistake before Hydra does: it knows neither a closest match nor our groups."""
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or key.startswith("-"):
            raise ConfigError(f"{text!r} is not of the form key=value")
        key = key.lstrip("+")
        if key in GROUPS:
            known = choices(key)
            if value not in known:
                raise ConfigError(
                    f"there is no {key} {value!r}{closest(value, known)}",
                    remedy=f"{key} is one of {', '.join(known)}",
                )
            continue
        here: Any = base
        for depth, part in enumerate(key.split(".")):
            if text.startswith(_ELSEWHERE) and depth == 2:
                break  # the backend (the transport) knows all its options, and refuses others
            known_keys = _known_keys(here, key.split(".")[:depth])
            if part not in known_keys:
                raise ConfigError(
                    f"unknown key {key!r}{_closest_key(part, key, depth, known_keys)}"
                )
            here = here.get(part) if isinstance(here, Mapping) else None


def _known_keys(here: Any, path: Sequence[str]) -> set[str]:
    structs: dict[tuple[str, ...], type[msgspec.Struct]] = {
        (): RunConfig,
        ("tiny",): TinyModel,
        ("rollout",): RolloutConfig,
        ("transport",): TransportConfig,
        ("sync",): SyncPolicy,
        ("trainer",): TrainerConfig,
        ("task",): TaskConfig,
        ("judge",): JudgeConfig,
    }
    struct = structs.get(tuple(path))
    known = {field.name for field in msgspec.structs.fields(struct)} if struct else set()
    return known | (set(map(str, here)) if isinstance(here, Mapping) else set())


def _closest_key(part: str, key: str, depth: int, known: set[str]) -> str:
    prefix = ".".join(key.split(".")[:depth])
    return closest(f"{prefix}.{part}".strip("."), [f"{prefix}.{k}".strip(".") for k in known])


def choices(group: str) -> list[str]:
    """What a config group offers."""
    from importlib.resources import files

    folder = files("hotbunk.configs") / group
    return sorted(
        p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")
    )


def load(overrides: Sequence[str]) -> RunConfig:
    """Compose and check. :raises ConfigError: see :func:`compose`; or a value that cannot be."""
    return convert_nested(compose(overrides), RunConfig, "configuration")


def save(config: RunConfig, path: Path) -> None:
    """Write ``config.yaml``."""
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(msgspec.to_builtins(config)), path)


def reload(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of an earlier run, with ``overrides`` on top and its folder as ``out``.

    :raises ConfigError: it has none, or an override is unknown.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"nothing to resume in {str(run_dir)!r}: config.yaml is missing")
    stored = OmegaConf.load(path)
    plain = OmegaConf.to_container(stored)
    assert isinstance(plain, dict)
    for text in overrides:
        if text.partition("=")[0] in GROUPS:
            raise ConfigError(f"a resumed run keeps its groups: {text!r} cannot be changed")
    _check_overrides(overrides, plain)
    try:
        merged = OmegaConf.merge(stored, OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    result = OmegaConf.to_container(merged)
    assert isinstance(result, dict)
    result["out"] = str(run_dir)
    return convert_nested({str(k): v for k, v in result.items()}, RunConfig, str(path))
