"""Where weights come from: ties, renames, duplicates, and walks that follow the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch as safetensors_torch
import torch
from torch import nn

from hotbunk.checkpoint_engine.source import (
    TensorSource,
    WeightSource,
    module_source,
    state_dict_source,
)
from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
from hotbunk.rollout.errors import ConfigError, DuplicateName


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))


def walked(source: WeightSource) -> dict[str, torch.Tensor]:
    return {s.name: t for s, t in zip(source.specs(), source.tensors(), strict=True)}


def test_tied_names_are_one_content_under_all_of_them() -> None:
    model = Tied()
    specs = module_source(model).specs()
    assert [s.names for s in specs] == [
        ("embed.weight", "head.weight"),
        ("norm.weight",),
        ("norm.bias",),
    ]
    assert (specs[0].shape, specs[0].dtype, specs[0].nbytes) == ((5, 3), "float32", 60)
    assert specs[0].group == "target"


def test_equal_bytes_that_are_two_tensors_are_not_tied() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert [s.aliases for s in module_source(model).specs()] == [()] * 4


def test_views_that_look_at_one_memory_differently_are_not_tied() -> None:
    whole = torch.randn(4, 4)
    named = {
        "whole": whole,
        "flat": whole.view(16),
        "transposed": whole.t(),
        "half": whole[:2],
        "as ints": whole.view(torch.int32),
        "same": whole.view(4, 4),
    }
    specs = state_dict_source(named).specs()
    assert specs[0].names == ("whole", "same")
    assert len(specs) == 5


def test_empty_tensors_are_never_tied() -> None:
    specs = state_dict_source({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(0, 2)})
    assert [s.names for s in specs.specs()] == [("a",), ("b",), ("c",)]


def test_walks_follow_the_trainer() -> None:
    """An optimizer that works in place and one that replaces tensors are both seen."""
    model = Tied()
    source = module_source(model)
    first = {n: t.clone() for n, t in walked(source).items()}
    with torch.no_grad():
        model.embed.weight.add_(1)
    model.norm.bias = nn.Parameter(torch.ones(3))
    second = walked(source)
    assert torch.equal(second["embed.weight"], first["embed.weight"] + 1)
    assert torch.equal(second["norm.bias"], torch.ones(3))
    assert not any(t.requires_grad for t in second.values())
    assert torch.equal(walked(source)["norm.bias"], torch.ones(3)), "and again"


def test_renaming_and_dropping_b16() -> None:
    def rename(name: str) -> str | None:
        return None if name.startswith("norm") else f"model.{name}"

    specs = module_source(Tied(), rename=rename, group="draft").specs()
    assert [(s.names, s.group) for s in specs] == [
        (("model.embed.weight", "model.head.weight"), "draft")
    ]


def test_two_tensors_under_one_name_are_refused_and_one_twice_is_not_g19() -> None:
    model = Tied()
    with pytest.raises(DuplicateName, match="same"):
        module_source(model, rename=lambda n: "same" if "norm" in n else n).specs()
    specs = module_source(model, rename=lambda n: "w" if "norm" not in n else n).specs()
    assert [s.names for s in specs] == [("w",), ("norm.weight",), ("norm.bias",)]


def test_a_state_dict_is_read_when_walked() -> None:
    state = {"w": torch.zeros(2)}
    source = state_dict_source(state)
    state["w"] = torch.ones(2)
    state["b"] = torch.ones(1)
    assert walked(source).keys() == {"w", "b"}
    assert torch.equal(walked(source)["w"], torch.ones(2))


def test_tensors_come_one_at_a_time() -> None:
    asked: list[str] = []

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            asked.append(name)
            yield name, torch.zeros(1)

    source = TensorSource(named)
    assert asked == []
    assert len(source.specs()) == 3
    assert asked == ["a", "b", "c"]


# -- safetensors ------------------------------------------------------------------------------


def test_safetensors_directories_are_read_file_by_file_and_again(tmp_path: Path) -> None:
    one = {"a": torch.randn(3, 2), "b": torch.randn(4).to(torch.bfloat16)}
    two = {"c": torch.tensor(5), "d": torch.empty(0, 2)}
    safetensors_torch.save_file(one, tmp_path / "model-1.safetensors")
    safetensors_torch.save_file(two, tmp_path / "model-2.safetensors")
    source = SafetensorsSource(tmp_path)
    for _ in range(2):
        found = walked(source)
        assert found.keys() == {"a", "b", "c", "d"}
        assert all(torch.equal(found[n], t) for n, t in {**one, **two}.items())
    specs = {s.name: s for s in source.specs()}
    assert (specs["b"].dtype, specs["b"].shape, specs["b"].nbytes) == ("bfloat16", (4,), 8)
    assert (specs["c"].dtype, specs["c"].shape) == ("int64", ())


def test_directories_that_cannot_be_used_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path / "missing")
    broken = tmp_path / "broken.safetensors"
    for content in (b"", b"not safetensors at all", b"\xff" * 64):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match="broken"):
            SafetensorsSource(tmp_path)
    broken.unlink()
    broken.mkdir()
    with pytest.raises(ConfigError, match="broken"):
        SafetensorsSource(tmp_path)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        safetensors_torch.save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(DuplicateName, match="w"):
        SafetensorsSource(tmp_path)
