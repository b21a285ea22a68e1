"""Every configuration that the groups can be put together to is one that is understood, or refused
with the way out before anything exists."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.options import convert_nested
from hotbunk.rollout.registry import BACKENDS, TRANSPORTS
from hotbunk.trainer_hooks.recipes.config import GROUPS, RunConfig, choices, load
from hotbunk.trainer_hooks.recipes.preflight import plan_run

FOLDER = Path(__file__).parents[2] / "configs"
TO_COME = ("sglang", "trtllm", "vllm_ascend")


@pytest.fixture
def _hydra() -> Iterator[None]:
    with initialize_config_module("hotbunk.configs", version_base="1.3"):
        yield


def composed(**groups: str) -> RunConfig:
    told = [f"{kind}={name}" for kind, name in groups.items()]
    if groups.get("task") == "jsonl":
        told.append("task.path=no/such.jsonl")
        told.append("task.reward=no.py:score")
    made = compose("train", overrides=["out=x", *told])
    plain = OmegaConf.to_container(made, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    return convert_nested({str(k): v for k, v in plain.items()}, RunConfig, "configuration")


def understood(groups: Mapping[str, str], where: Path) -> None:
    """It means what its groups say; and what cannot run says how it could."""
    config = composed(**groups)
    if "rollout" in groups:
        assert config.rollout.name == groups["rollout"]
    if "transport" in groups:
        assert config.transport.name == groups["transport"].replace("onecopy", "shm")
        assert config.transport.options.get("one_copy", False) is (groups["transport"] == "onecopy")
    if "trainer" in groups:
        assert config.trainer.name == groups["trainer"]
    if "preset" in groups:
        assert config.preset == groups["preset"]
    refused = ""
    try:
        plan_run(config)
    except HotbunkError as error:
        refused = str(error)
        said = error.remedy or re.search(r"[a-z_$]+\.[a-z_]+", error.what)  # the key, or the file
    assert not refused or said, f"{groups}: {refused}"
    assert not list(where.iterdir())


# What depends on one another; presets choose among these, too.
COUPLED = [
    dict(zip(("rollout", "transport", "trainer"), chosen, strict=True))
    for chosen in itertools.product(choices("rollout"), choices("transport"), choices("trainer"))
]
PRESETS = [
    {"preset": preset, kind: one}
    for preset in choices("preset")
    for kind in GROUPS
    if kind != "preset" and (preset == "tiny" or kind in COUPLED[0])
    for one in choices(kind)
]


@pytest.mark.parametrize("rollout", choices("rollout"))
@pytest.mark.usefixtures("_hydra")
@pytest.mark.timeout(240)
def test_every_combination_of_engine_transport_and_trainer(
    rollout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for groups in COUPLED:
        if groups["rollout"] == rollout:
            understood(groups, tmp_path)


@pytest.mark.parametrize("preset", choices("preset"))
@pytest.mark.usefixtures("_hydra")
@pytest.mark.timeout(240)
def test_every_preset_with_every_choice_over_it(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command line chooses wins over a preset."""
    monkeypatch.chdir(tmp_path)
    for groups in PRESETS:
        if groups["preset"] == preset:
            understood(groups, tmp_path)


@pytest.mark.parametrize("name", TO_COME)
def test_an_engine_without_an_adapter_is_said_with_the_way_out(name: str, tmp_path: Path) -> None:
    config = load([f"rollout={name}", f"out={tmp_path / 'x'}"])
    with pytest.raises(HotbunkError, match=f"no backend named '{name}': this hotbunk has no") as e:
        plan_run(config)
    assert "hotbunk.backends" in e.value.remedy
    assert "reference" in e.value.remedy


def test_there_is_a_group_for_whatever_is_registered() -> None:
    backends = {point.name for point in entry_points(group=BACKENDS)} - {"oracle"}  # for tests
    assert set(choices("rollout")) == backends | set(TO_COME)
    transports = {point.name for point in entry_points(group=TRANSPORTS)}
    assert set(choices("transport")) == transports | {"onecopy"}


def undocumented(text: str) -> list[str]:
    """Keys with a value and no word about them; what a heading or its group's first line says, is."""
    found = []
    for line in text.splitlines():
        key, colon, rest = line.strip().partition(":")
        if colon and rest.strip() and "#" not in line and not line.strip().startswith(("-", "#")):
            found.append(key)
    return found


@pytest.mark.parametrize("group", ["", "judge", "rollout", "task", "trainer", "transport"])
def test_keys_are_documented_in_place(group: str) -> None:
    """But in presets and for verl, which set keys that are documented where they come from."""
    obvious = {"name", "seed", "random_seed"}
    for file in sorted((FOLDER / group).glob("*.yaml")):
        text = file.read_text().split("template: |-")[0]  # what a judge is asked is no key
        assert any(line.startswith("# ") and "@" not in line for line in text.splitlines()), file
        assert set(undocumented(text)) <= obvious, file.name


@pytest.mark.usefixtures("_hydra")
def test_one_copy_makes_the_reference_engine_show_its_memory() -> None:
    shares: dict[str, Any] = {
        name: composed(transport=name, rollout="reference").rollout.options["share_weights"]
        for name in choices("transport")
    }
    assert {name for name, one in shares.items() if one} == {"onecopy"}
