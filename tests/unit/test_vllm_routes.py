"""Following a loader: fused, padded, tied and sharded parameters, and what cannot be followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import nn

from hotbunk.rollout.backends.vllm.landing import Landing, placement_of, slices_of
from hotbunk.rollout.backends.vllm.routes import Named, Piece, Route, Routes
from hotbunk.rollout.backends.vllm.update import merged
from hotbunk.rollout.binding import dtype_name
from hotbunk.rollout.contract import Bucket, BucketEntry, Manifest, TensorSpec, Version
from hotbunk.rollout.errors import ConfigError, TiedMismatch
from hotbunk.rollout.fingerprint import fingerprint_bytes
from hotbunk.rollout.kernels import as_bytes, fingerprint
from hotbunk.rollout.process.grid import DIFFERENT, union_of

HIDDEN, VOCABULARY, PADDED = 8, 11, 16


class Engine(nn.Module):
    """Keeps weights as engines do: q, k and v in one matrix, a padded vocabulary, column shards."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN // ranks, HIDDEN, dtype=dtype))
        self.out = nn.Parameter(torch.zeros(HIDDEN, HIDDEN // ranks, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))
        self.embed = nn.Embedding(PADDED, HIDDEN, dtype=dtype)
        self.head = nn.Linear(HIDDEN, PADDED, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def load_weights(self, weights: Named) -> None:
        for name, tensor in weights:
            if name in ("q", "k", "v"):
                rows = HIDDEN // self.ranks
                at = "qkv".index(name) * rows
                into = self.qkv.data.narrow(0, at, rows)
                into.copy_(tensor.narrow(0, self.rank * rows, rows))
            elif name == "out":
                columns = HIDDEN // self.ranks
                self.out.data.copy_(tensor.narrow(1, self.rank * columns, columns))
            elif name == "embed.weight":
                self.embed.weight.data[:VOCABULARY].copy_(tensor)
                self.embed.weight.data[VOCABULARY:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    square = {name: random(HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")}
    return {**square, "norm": random(HIDDEN), "embed.weight": random(VOCABULARY, HIDDEN)}


def routed(model: Engine, tensors: dict[str, torch.Tensor]) -> Routes:
    model.load_weights(tensors.items())
    before = {name: p.clone() for name, p in model.named_parameters()}
    routes = Routes(model, model.load_weights, tensors.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), f"watching changed {name}"
    return routes


def test_what_is_read_back_is_what_was_loaded() -> None:
    tensors = checkpoint()
    routes = routed(Engine(), tensors)
    assert routes.transformed() == []
    assert routes.uncovered(Engine()) != []  # another engine's parameters are none of ours
    for name, tensor in tensors.items():
        assert torch.equal(routes[name].read(), tensor)
        assert routes[name].elements == tensor.numel()


def test_what_is_written_is_what_the_loader_would_write() -> None:
    model, fresh, new = Engine(), Engine(), checkpoint(1)
    routes = routed(model, checkpoint())
    assert routes.uncovered(model) == []
    fresh.load_weights(new.items())
    for name, tensor in new.items():
        routes[name].write(tensor)
    for (name, got), (_, want) in zip(
        model.named_parameters(), fresh.named_parameters(), strict=True
    ):
        assert torch.equal(got, want), name


def test_one_of_three_fused_tensors_leaves_the_others_alone() -> None:
    old, new = checkpoint(), checkpoint(1)
    routes = routed(Engine(), old)
    routes["k"].write(new["k"])
    assert torch.equal(routes["k"].read(), new["k"])
    for name in ("q", "v", "out", "norm", "embed.weight"):
        assert torch.equal(routes[name].read(), old[name]), name


def test_ties_are_found_by_the_models_own_names() -> None:
    routes = routed(Engine(), checkpoint())
    assert set(routes["head.weight"].shape) == {VOCABULARY, HIDDEN}
    assert ["embed.weight", "head.weight"] in [sorted(names) for names in routes.ties()]
    new = torch.randn(VOCABULARY, HIDDEN)
    routes["head.weight"].write(new)
    assert torch.equal(routes["embed.weight"].read(), new)


def together(ranks: Sequence[Routes]) -> dict[str, int]:
    return union_of(
        [{n: fingerprint(r.read()) for n, r in it.items()} for it in ranks],
        [{n: part for n, r in it.items() if (part := slices_of(r))} for it in ranks],
    )


def test_shards_add_up_to_the_whole() -> None:
    tensors = checkpoint()
    ranks = [routed(Engine(rank, 2), tensors) for rank in range(2)]
    bound = merged(
        [
            {
                "tensors": {n: (dtype_name(r.dtype), r.shape, r.elements) for n, r in it.items()},
                "ties": it.ties(),
                "transformed": it.transformed(),
                "uncovered": [],
                "adaptable": None,
            }
            for it in ranks
        ],
        2,
    )
    assert set(bound.placements) == {*tensors, "head.weight"}
    joined = together(ranks)
    for name, tensor in tensors.items():
        assert joined[name] == fingerprint_bytes(as_bytes(tensor).numpy().tobytes()), name
    ranks[1]["norm"].write(torch.ones(HIDDEN))
    assert together(ranks)["norm"] == DIFFERENT, "two ranks differ and nobody noticed"


def specs(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(n, tuple(t.shape), dtype_name(t.dtype), t.numel() * t.element_size())
        for n, t in tensors.items()
    )


def sent(tensors: Mapping[str, torch.Tensor], routes: Routes) -> Iterator[Bucket]:
    """Small buckets of what a rank asks for, each spoiled once the next is asked for."""
    for index, (name, tensor) in enumerate(tensors.items()):
        box = placement_of(routes[name], None).slices or [(0, n) for n in tensor.shape]
        part = tensor[tuple(slice(start, start + size) for start, size in box)]
        content = as_bytes(part.contiguous()).numpy().tobytes()
        for start in range(0, len(content), 48):
            piece = bytearray(content[start : start + 48])
            yield Bucket(memoryview(piece), (BucketEntry(index, start, len(piece), 0),))
            piece[:] = bytes(len(piece))


def land(landing: Landing, buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        landing.write(bucket)


@pytest.mark.parametrize("shards", [1, 2])
def test_each_rank_takes_its_part_and_it_lands_where_the_loader_puts_it(shards: int) -> None:
    old, new = checkpoint(), checkpoint(1)
    for rank in range(shards):
        model, fresh = Engine(rank, shards), Engine(rank, shards)
        routes = routed(model, old)
        landing = Landing(Manifest(Version(0, 1), specs(new)), routes)
        land(landing, sent(new, routes))
        assert landing.finish() == len(new)
        fresh.load_weights(new.items())
        for (name, got), (_, want) in zip(
            model.named_parameters(), fresh.named_parameters(), strict=True
        ):
            assert torch.equal(got, want), name
        expected = {}
        for name, tensor in new.items():
            box = placement_of(routes[name], None).slices or [(0, n) for n in tensor.shape]
            part = tensor[tuple(slice(start, start + size) for start, size in box)]
            expected[name] = fingerprint(part.contiguous())
        assert landing.differing(expected) == []
        routes["k"].write(old["k"])
        assert landing.differing(expected) == ["k"]


def test_tied_tensors_of_two_contents_are_found_out() -> None:
    old = checkpoint()
    routes = routed(Engine(), old)
    both = {"embed.weight": old["embed.weight"], "head.weight": old["embed.weight"] + 1}
    landing = Landing(Manifest(Version(0, 1), specs(both)), routes)
    with pytest.raises(TiedMismatch):
        land(landing, sent(both, routes))


def test_what_lies_in_pieces_is_sent_whole() -> None:
    """Every second row, say: no box, so it is collected first and then scattered."""
    parameter = torch.zeros(3, 4)
    whole = torch.arange(24.0).view(6, 4)
    route = Route((6, 4), [Piece(parameter, 0, (3, 4), (8, 1))])
    assert placement_of(route, None).slices == ()
    assert placement_of(route, None).shape == (6, 4)
    routes = {"w": route}
    landing = Landing(Manifest(Version(0, 1), specs({"w": whole})), routes)
    land(landing, sent({"w": whole}, routes))  # type: ignore[arg-type]
    assert landing.finish() == 1
    assert torch.equal(parameter, whole[::2])
    assert landing.differing({"w": fingerprint(whole)}) == []
    assert landing.differing({"w": 1}) == ["w"]


def test_a_cast_is_followed_and_seen() -> None:
    tensors = checkpoint()
    routes = routed(Engine(dtype=torch.bfloat16), tensors)
    assert routes.transformed() == []
    assert routes["q"].dtype == torch.bfloat16
    assert torch.equal(routes["q"].read(), tensors["q"].bfloat16())


def test_what_was_transformed_after_loading_is_seen() -> None:
    model, tensors = Engine(), checkpoint()
    model.load_weights(tensors.items())
    model.out.data = model.out.data.t().contiguous()
    routes = Routes(model, model.load_weights, tensors.items())
    assert routes.transformed() == ["out"]


def test_a_loader_that_goes_other_ways_is_found_out() -> None:
    class Crooked(Engine):
        def load_weights(self, weights: Named) -> None:
            def rest() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    if name == "norm":
                        self.norm.data = tensor + 1.0
                    else:
                        yield name, tensor

            super().load_weights(rest())

    model, tensors = Crooked(), checkpoint()
    routes = Routes(model, model.load_weights, tensors.items())
    assert "norm" not in routes
    assert routes.uncovered(model) == ["norm"]


@pytest.mark.parametrize(
    "change",
    [{"transformed": ["q"]}, {"uncovered": ["norm"]}, {"tensors": {"q": ("float32", (8, 8), 9)}}],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_that_cannot_be_updated_does_not_start(change: dict[str, object]) -> None:
    said = {"tensors": {"q": ("float32", (8, 8), 64)}, "ties": [], "transformed": []}
    with pytest.raises(ConfigError, match=r"q|norm"):
        merged([{**said, "uncovered": [], **change}], 1)


def test_an_empty_engine_does_not_start() -> None:
    with pytest.raises(ConfigError, match="nothing"):
        merged([{"tensors": {}, "ties": [], "transformed": [], "uncovered": []}], 1)
