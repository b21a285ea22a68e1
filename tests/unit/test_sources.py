"""Sources over directories, name maps and other sources: what comes, how often, and what is refused."""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch as safetensors_torch
import torch

from hotbunk.checkpoint_engine.bucket import Packer
from hotbunk.checkpoint_engine.safetensors_header import INDEX, header, read_header
from hotbunk.checkpoint_engine.source import WeightSource, state_dict_source
from hotbunk.checkpoint_engine.sources.joined import JoinedSource, with_group
from hotbunk.checkpoint_engine.sources.mapped import Drop, Fuse, Keep, MappedSource, Rename
from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
from hotbunk.rollout.contract import Manifest, Placement, TensorSpec, Version
from hotbunk.rollout.errors import (
    ConfigError,
    DuplicateName,
    IncompleteUpdate,
    ShapeMismatch,
    UnknownNames,
)
from hotbunk.rollout.intake import check_offer

Named = dict[str, torch.Tensor]


def walked(source: WeightSource) -> Named:
    return {s.name: t for s, t in zip(source.specs(), source.tensors(), strict=True)}


# -- safetensors ------------------------------------------------------------------------------


def publish(directory: Path, shards: list[Named]) -> None:
    weight_map = {}
    for n, named in enumerate(shards):
        file = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        safetensors_torch.save_file(named, directory / file)
        weight_map.update(dict.fromkeys(named, file))
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_old_shards_beside_a_new_index_are_ignored_n10(tmp_path: Path) -> None:
    old = [{f"w{n}": torch.zeros(3)} for n in range(3)]
    new = [{"w0": torch.ones(3), "w1": torch.ones(3)}, {"w2": torch.ones(3)}]
    publish(tmp_path, old)
    source = SafetensorsSource(tmp_path)
    assert len(source.specs()) == 3
    publish(tmp_path, new)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert all(torch.equal(t, torch.ones(3)) for t in walked(source).values())
    (tmp_path / INDEX).unlink()
    with pytest.raises(DuplicateName):  # without an index nobody knows which of them count
        SafetensorsSource(tmp_path)


def test_specs_of_a_directory_read_headers_only(tmp_path: Path) -> None:
    """A file whose data part is sparse and huge costs nothing until its tensors are wanted."""
    text = header([("big", "float32", (1 << 20, 1 << 10))])
    path = tmp_path / "model.safetensors"
    path.write_bytes(text)
    with path.open("r+b") as file:
        file.truncate(len(text) + (4 << 30))
    (spec,) = SafetensorsSource(tmp_path).specs()
    assert (spec.shape, spec.dtype, spec.nbytes) == ((1 << 20, 1 << 10), "float32", 4 << 30)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"w": "../outside.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": "missing.safetensors"}},
        {"weight_map": {"absent": "model.safetensors"}},
        {"weight_map": {}},
        {"weight_map": 7},
        {},
    ],
)
def test_indices_that_lead_elsewhere_are_refused(tmp_path: Path, index: object) -> None:
    safetensors_torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError):
        SafetensorsSource(tmp_path)


def entry(dtype: object = "F32", shape: object = (2,), at: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


@pytest.mark.parametrize(
    "table",
    [
        {"w": entry(at=(0, 12))},
        {"w": entry(at=(8, 16))},
        {"w": entry(at=(-8, 0))},
        {"w": entry(at=(8, 0))},
        {"w": entry(at=(0, 4))},
        {"w": entry(shape=(-2,))},
        {"w": entry(shape=(1 << 62, 1 << 62), at=(0, 8))},
        {"w": entry(dtype="F31")},
        {"w": entry(shape="2")},
        {"w": entry(), "v": entry()},
        {"w": {"dtype": "F32"}},
        ["w"],
    ],
)
def test_headers_that_lie_are_refused_before_a_byte_is_read(tmp_path: Path, table: object) -> None:
    text = json.dumps(table).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match="not a safetensors file"):
        SafetensorsSource(tmp_path)


def test_headers_written_here_are_read_by_the_library_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    named = {"a": torch.randn(3, 2), "b": torch.randn(5).to(torch.bfloat16), "e": torch.empty(0, 2)}
    text = header([(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in named.items()], made="here")
    path = tmp_path / "ours.safetensors"
    body = b"".join(bytes(t.view(torch.uint8).flatten().tolist()) for t in named.values())
    path.write_bytes(text + body)
    assert all(torch.equal(t, named[n]) for n, t in safetensors_torch.load_file(path).items())
    safetensors_torch.save_file(named, tmp_path / "theirs.safetensors")
    with (tmp_path / "theirs.safetensors").open("rb") as file:
        found = read_header(file.fileno(), "theirs")
    assert {n: (s.dtype, s.shape, s.nbytes) for n, s in found.items()} == {
        n: (str(t.dtype)[6:], tuple(t.shape), t.nbytes) for n, t in named.items()
    }


# -- name maps --------------------------------------------------------------------------------


def attention() -> Named:
    return {
        "model.layers.0.q.weight": torch.randn(4, 3),
        "model.layers.0.k.weight": torch.randn(2, 3),
        "model.layers.0.v.weight": torch.randn(2, 3),
        "model.layers.0.o.weight": torch.randn(3, 4),
        "model.norm.weight": torch.randn(3),
        "model.rope.inv_freq": torch.randn(2),
        "head.weight": torch.randn(5, 3),
    }


RULES = [
    Drop(r".*\.inv_freq"),
    Fuse(
        tuple(rf"model\.(layers\.\d+)\.{part}\.weight" for part in "qkv"),
        r"\1.qkv.weight",
    ),
    Rename(r"model\.(.*)", r"\1"),
    Keep(r"head\..*"),
]


def test_rename_drop_fuse_and_identity_are_counted_b16() -> None:
    named = attention()
    source = MappedSource(state_dict_source(named), RULES)
    found = walked(source)
    qkv = torch.cat([named[f"model.layers.0.{part}.weight"] for part in "qkv"])
    assert list(found) == ["layers.0.qkv.weight", "layers.0.o.weight", "norm.weight", "head.weight"]
    assert torch.equal(found["layers.0.qkv.weight"], qkv)
    assert torch.equal(found["norm.weight"], named["model.norm.weight"])
    report = source.report()
    assert (report.dropped, report.fused, report.renamed, report.kept, report.sent) == (
        1,
        3,
        2,
        1,
        4,
    )
    assert [report.matched[rule] for rule in RULES] == [1, 3, 2, 1]
    specs = {s.name: s for s in source.specs()}
    assert (specs["layers.0.qkv.weight"].shape, specs["layers.0.qkv.weight"].nbytes) == (
        (8, 3),
        96,
    )


def test_one_tensor_that_no_rule_matches_is_an_error_b16() -> None:
    named = {**attention(), "model_extra": torch.zeros(1)}
    with pytest.raises(UnknownNames, match="model_extra"):
        MappedSource(state_dict_source(named), RULES).specs()


def test_a_map_that_leaves_nothing_is_an_error_b17() -> None:
    source = MappedSource(state_dict_source(attention()), [Drop(".*")])
    with pytest.raises(IncompleteUpdate):
        source.specs()
    with pytest.raises(IncompleteUpdate):
        MappedSource(state_dict_source({}), [Keep(".*")]).specs()


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model.layers.0.k.weight": None}, IncompleteUpdate),
        ({"model.layers.0.k.weight": torch.zeros(2, 5)}, ShapeMismatch),
        ({"model.layers.0.k.weight": torch.zeros(2, 3).half()}, ShapeMismatch),
        ({"model.layers.0.k.weight": torch.tensor(1.0)}, ShapeMismatch),
        ({"norm.weight": torch.zeros(3)}, UnknownNames),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], error: type[Exception]
) -> None:
    named = {n: t for n, t in {**attention(), **change}.items() if t is not None}
    with pytest.raises(error):
        MappedSource(state_dict_source(named), RULES).specs()


def test_two_tensors_under_one_new_name_are_refused_g19() -> None:
    named = {"a.w": torch.zeros(1), "b.w": torch.ones(1)}
    with pytest.raises(DuplicateName):
        MappedSource(state_dict_source(named), [Rename(r".\.(.*)", r"\1")]).specs()


def test_tied_tensors_stay_tied_and_may_be_fused_too() -> None:
    tied = torch.randn(4, 3)
    named = {"embed": tied, "head": tied, "rest": torch.randn(2, 3)}
    rules = [Rename("embed", "e"), Fuse(("head", "rest"), "all"), Keep("rest")]
    source = MappedSource(state_dict_source(named), rules)
    found = walked(source)
    assert torch.equal(found["e"], tied)
    assert torch.equal(found["all"], torch.cat([tied, named["rest"]]))
    both = MappedSource(state_dict_source(named), [Keep("rest"), Rename("(.*)", r"m.\1")])
    assert both.specs()[0].names == ("m.embed", "m.head")


def test_patterns_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="regular"):
        MappedSource(state_dict_source({}), [Drop("(")])


# -- several sources --------------------------------------------------------------------------

MODEL = {"a": torch.randn(3), "b": torch.randn(2, 2), "c": torch.randn(1), "d": torch.randn(4)}
KNOWN = {n: Placement("float32", tuple(t.shape)) for n, t in MODEL.items()}


def offer(source: WeightSource) -> None:
    check_offer(Manifest(Version(), source.specs()), KNOWN, [{n} for n in MODEL])


def half(names: str) -> WeightSource:
    return state_dict_source({n: MODEL[n] for n in names})


def test_two_sources_with_half_the_names_each_are_complete_together_only_b19() -> None:
    offer(JoinedSource([half("ac"), half("bd")]))
    assert all(
        torch.equal(t, MODEL[n]) for n, t in walked(JoinedSource([half("ac"), half("bd")])).items()
    )
    for some in ("ac", "bd"):
        with pytest.raises(IncompleteUpdate):
            offer(half(some))
    with pytest.raises(IncompleteUpdate):
        offer(JoinedSource([half("ac"), half("b")]))


def test_a_name_twice_with_the_same_bytes_is_sent_once_g19() -> None:
    source = JoinedSource(
        [half("abc"), state_dict_source({"c": MODEL["c"].clone(), "d": MODEL["d"]})]
    )
    assert [s.name for s in source.specs()] == list("abcd")
    assert source.deduplicated == 1
    assert all(torch.equal(t, MODEL[n]) for n, t in walked(source).items())
    offer(source)


@pytest.mark.parametrize("other", [torch.zeros(1), torch.zeros(2), torch.zeros(1).half()])
def test_a_name_twice_with_different_contents_is_refused_g19(other: torch.Tensor) -> None:
    source = JoinedSource([half("abc"), state_dict_source({"c": other})])
    with pytest.raises(DuplicateName, match="c"):
        source.specs()


def test_sources_of_other_groups() -> None:
    specs = with_group(half("ab"), "draft").specs()
    assert {s.group for s in specs} == {"draft"}


# -- live bytes -------------------------------------------------------------------------------


class Counting:
    """Gathers a tensor when it is asked for, and counts what is still alive of those before."""

    def __init__(self, specs: list[TensorSpec]) -> None:
        self._specs, self.live, self.peak = specs, dict[int, int](), 0
        self.count = 0

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs)

    def tensors(self) -> Iterator[torch.Tensor]:
        for spec in self._specs:
            memory = (ctypes.c_char * spec.nbytes)()  # lives as long as any view of it
            number = self.count = self.count + 1
            self.live[number] = spec.nbytes
            weakref.finalize(memory, self.live.pop, number)
            self.peak = max(self.peak, sum(self.live.values()))
            tensor = torch.frombuffer(memory, dtype=torch.float32).view(spec.shape)
            del memory
            yield tensor
            del tensor


def counted(names: str) -> Counting:
    return Counting([TensorSpec(n, (40, 50), "float32", 8000) for n in names])


@pytest.mark.parametrize("how", ["as it is", "mapped", "joined", "fused"])
def test_live_bytes_of_sources_over_sources_are_one_tensor_m5(how: str) -> None:
    inner = counted("abcdefgh")
    source: WeightSource = {
        "as it is": inner,
        "mapped": MappedSource(inner, [Drop("c"), Rename("(.)", r"m.\1")]),
        "joined": JoinedSource([inner, counted("xyz")]),
        "fused": MappedSource(inner, [Fuse(("a", "b"), "ab"), Keep(".")]),
    }[how]
    specs = source.specs()
    packer = Packer(specs, source.tensors(), torch.empty(1000, dtype=torch.uint8))
    while packer.next() is not None:
        pass
    assert inner.peak == 8000
    assert not inner.live
