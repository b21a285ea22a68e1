"""A run's checkpoints: a model directory anyone can load, and what the trainer needs to go on.

Each is written beside its final name and renamed, so a directory that exists is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from hotbunk.rollout.errors import ConfigError

KEPT = 2
OTHERS = "beside"  # a folder of its own: engines read every safetensors file beside config.json
Trained = tuple[torch.nn.Module, torch.optim.Optimizer]
_PREFIX = "step-"


class TrainerState(msgspec.Struct, frozen=True):
    """Where the trainer stands: ``step`` steps are done, in this ``incarnation`` of the policy."""

    step: int
    incarnation: int


def model_files(model_dir: Path) -> dict[str, bytes]:
    """What makes a model directory besides weights: configuration and tokenizer, by name.

    Read once: a resumed run's own model directory is a checkpoint that will be dropped.
    """
    weights = (".safetensors", ".safetensors.index.json")
    ours = ("state.json",)
    return {
        path.name: path.read_bytes()
        for path in model_dir.iterdir()
        if path.is_file() and not path.name.endswith(weights) and path.name not in ours
    }


def save_checkpoint(
    run_dir: Path,
    files: Mapping[str, bytes],
    model: Any,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    others: Mapping[str, Trained] | None = None,
) -> Path:
    """Write ``checkpoints/step-N`` and drop all but the newest few.

    ``others`` are trained beside the policy (a critic): ``NAME.safetensors`` and its optimizer's.
    """
    from safetensors.torch import save_file

    folder = run_dir / "checkpoints"
    final = folder / f"{_PREFIX}{state.step:06d}"
    partial = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    save_file(_untied(model.state_dict()), partial / "model.safetensors", {"format": "pt"})
    save_file(_moments(optimizer), partial / "optimizer.safetensors")
    (partial / OTHERS).mkdir()
    for name, (module, its_optimizer) in (others or {}).items():
        save_file(_untied(module.state_dict()), partial / OTHERS / f"{name}.safetensors")
        save_file(_moments(its_optimizer), partial / OTHERS / f"{name}.optimizer.safetensors")
    (partial / "state.json").write_bytes(msgspec.json.encode(state))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in _all(run_dir)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def latest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint. :raises ConfigError: there is none."""
    found = _all(run_dir)
    if not found:
        raise ConfigError(f"nothing to resume in {str(run_dir)!r}: it has no checkpoint")
    return found[-1]


def read_state(checkpoint: Path) -> TrainerState:
    """Where that checkpoint stands. :raises ConfigError: it is not one of ours."""
    try:
        return msgspec.json.decode((checkpoint / "state.json").read_bytes(), type=TrainerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"checkpoint {str(checkpoint)!r} cannot be read: {error}") from error


def load_other(checkpoint: Path, name: str, module: torch.nn.Module, optimizer: Any) -> None:
    """Fill what was trained beside the policy in place.

    :raises ConfigError: the checkpoint is of a run that had none.
    """
    from safetensors.torch import load_file

    path = checkpoint / OTHERS / f"{name}.safetensors"
    if not path.is_file():
        raise ConfigError(f"checkpoint {str(checkpoint)!r} has no {name}")
    module.load_state_dict(load_file(path), strict=False)  # tied names are there once
    load_optimizer(checkpoint, optimizer, f"{OTHERS}/{name}.optimizer.safetensors")


def load_optimizer(
    checkpoint: Path, optimizer: torch.optim.Optimizer, name: str = "optimizer.safetensors"
) -> None:
    """Fill the optimizer's state in place: its tensors stay where they lie."""
    from safetensors.torch import load_file

    stored = load_file(checkpoint / name)
    with torch.no_grad():
        for index, entry in enumerate(_states(optimizer)):
            for key, value in entry.items():
                value.copy_(stored[f"{index}.{key}"])


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": value.detach().clone()
        for index, entry in enumerate(_states(optimizer))
        for key, value in entry.items()
    }


def _states(optimizer: torch.optim.Optimizer) -> list[Mapping[str, torch.Tensor]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied tensors once, under their first name; the model ties them again."""
    seen: set[int] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            kept[name] = tensor.detach().clone()
    return kept


def _all(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob(f"{_PREFIX}*"))
