"""A module's tensors in an arena: every one of them, with identity, ties and views kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from hotbunk.rollout import native
from hotbunk.rollout.binding import ModuleBinding, dtype_from, dtype_name, parameters_on_meta
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.kernels import fingerprint
from hotbunk.rollout.memory import HostPool

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)


class Rotary(nn.Module):
    """Buffers of both kinds, and caches that are registered nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(5))
        self.register_buffer("inv_freq", torch.randn(7), persistent=False)
        self.register_buffer("absent", None)
        self.cos_cache = torch.randn(3, 4)
        self.listed = [torch.randn(2), (torch.randn(3), {"scale": torch.randn(1)})]
        with torch.inference_mode():
            self.made_while_serving = torch.randn(6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=True)
        self.head.weight = self.embed.weight
        self.rotary = Rotary()
        self.same_rotary = self.rotary
        self.mixed = nn.ParameterList(
            [
                nn.Parameter(torch.randn(3).to(dtype), requires_grad=False)
                for dtype in (torch.bfloat16, torch.float64, torch.float16)
            ]
        )
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.also_empty = nn.Parameter(torch.empty(0))
        self.first_rows = self.head.weight[:2]
        self.columns = self.head.weight.detach()[:, 1]
        self.transposed = self.head.weight.detach().t()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    made = HostPool(tmp_path)
    yield made
    made.close()


def digest(binding: ModuleBinding) -> dict[str, int]:
    return {n: fingerprint(t) for n, t in {**binding.state, **binding.parameters}.items()}


def everything(model: Model) -> dict[str, torch.Tensor]:
    rotary = model.rotary
    return {
        "embed": model.embed.weight,
        "bias": model.head.bias,
        "kept": rotary.kept,
        "inv_freq": rotary.inv_freq,
        "cos": rotary.cos_cache,
        "listed.0": rotary.listed[0],
        "listed.1.0": rotary.listed[1][0],
        "listed.1.1.scale": rotary.listed[1][1]["scale"],
        "serving": rotary.made_while_serving,
        **{f"mixed{i}": p for i, p in enumerate(model.mixed)},
        "scalar": model.scalar,
        "empty": model.empty,
        "rows": model.first_rows,
        "columns": model.columns,
        "transposed": model.transposed,
    }


def test_values_and_objects_are_the_same_and_lie_in_the_arena(pool: HostPool) -> None:
    model = Model()
    before = {name: (id(t), t.clone()) for name, t in everything(model).items()}
    parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    binding = ModuleBinding(model, pool, "weights", "target")
    low = binding.arena.address
    for name, tensor in everything(model).items():
        identity, value = before[name]
        assert id(tensor) == identity, name
        assert torch.equal(tensor, value), name
        assert tensor.dtype == value.dtype
        if tensor.numel():
            assert low <= tensor.data_ptr() < low + binding.arena.size, (
                f"{name} is not in the arena"
            )
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    model.embed.weight.grad = torch.ones(6, 4)
    optimizer.step()
    assert torch.equal(model.embed.weight, before["embed"][1] - 0.1)


def test_ties_and_views_share_bytes_afterwards_g5(pool: HostPool) -> None:
    model = Model()
    binding = ModuleBinding(model, pool, "weights", "target")
    with torch.no_grad():
        binding.tensor("embed.weight").copy_(torch.arange(24.0).view(6, 4))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.first_rows, torch.arange(8.0).view(2, 4))
    assert torch.equal(model.columns, torch.tensor([1.0, 5.0, 9.0, 13.0, 17.0, 21.0]))
    assert torch.equal(model.transposed, torch.arange(24.0).view(6, 4).t())
    with torch.inference_mode():
        model.rotary.made_while_serving.add_(1)  # still of use where it came from


def test_every_kind_of_state_survives_a_discard_and_parameters_do_not_g3_g6(
    pool: HostPool,
) -> None:
    model = Model()
    binding = ModuleBinding(model, pool, "weights", "target")
    before = {name: t.clone() for name, t in everything(model).items()}
    pool.release(["weights"], Retention.DISCARD)
    assert pool.memory().resident() == 0
    pool.resume(["weights"])
    after = everything(model)
    state = {"kept", "inv_freq", "cos", "serving", "listed.0", "listed.1.0", "listed.1.1.scale"}
    for name in state:
        assert torch.equal(after[name], before[name]), name
    for name in after.keys() - state - {"empty"}:
        assert not after[name].any(), f"{name} is content: a sync brings it back"
    assert binding.arena.address <= model.embed.weight.data_ptr()


def test_cycle_parity_of_level_1_and_level_2_with_the_same_update_g6(pool: HostPool) -> None:
    """The digest of all state after DISCARD and a full update is that after BACKUP and the same."""
    model = Model()
    binding = ModuleBinding(model, pool, "weights", "target")
    values = {n: torch.randn_like(t) for n, t in binding.parameters.items() if n != "head.weight"}
    digests = []
    for retention in (Retention.BACKUP, Retention.DISCARD):
        pool.release(["weights"], retention)
        pool.resume(["weights"])
        with torch.no_grad():
            for name, value in values.items():
                binding.tensor(name).copy_(value)
        digests.append(digest(binding))
    assert digests[0] == digests[1]
    assert len(digests[0]) == len(binding.parameters) + len(binding.state)


@pytest.mark.parametrize("retention", [Retention.BACKUP, Retention.DISCARD])
def test_host_memory_while_asleep_is_one_copy_or_the_state_alone_m16_m17(
    pool: HostPool, retention: Retention
) -> None:
    model = Model()
    binding = ModuleBinding(model, pool, "weights", "target")
    state = sum(t.numel() * t.element_size() for t in binding.state.values()) - sum(
        t.numel() * 4 for t in (model.first_rows, model.columns, model.transposed)
    )
    # The shared rotary module is there under two names.
    state //= 2
    for _ in range(5):
        kept = pool.release(["weights"], retention).backup()
        assert kept == (state if retention is Retention.DISCARD else binding.arena.used)  # type: ignore[attr-defined]
        assert pool.resume(["weights"]).backup() == 0


def test_names_of_everything(pool: HostPool) -> None:
    binding = ModuleBinding(Model(), pool, "weights", "target")
    assert {"embed.weight", "head.weight", "head.bias", "scalar", "empty"} <= set(
        binding.parameters
    )
    assert {
        "rotary.kept",
        "rotary.inv_freq",
        "rotary.cos_cache",
        "same_rotary.kept",
        "rotary.listed.1.1.scale",
        "first_rows",
    } <= set(binding.state)
    assert "rotary.absent" not in binding.state
    assert binding.tensor("rotary.kept") is binding.tensor("same_rotary.kept")


def test_a_full_update_needs_each_content_once_and_each_empty_tensor_by_name(
    pool: HostPool,
) -> None:
    required = ModuleBinding(Model(), pool, "weights", "target").required()
    assert frozenset({"embed.weight", "head.weight"}) in required
    assert frozenset({"empty"}) in required
    assert frozenset({"also_empty"}) in required
    assert len(required) == 8


def test_a_parameter_that_is_the_beginning_of_another_is_not_tied_to_it(pool: HostPool) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(6, 4))
            self.q = nn.Parameter(self.qkv.data[:2])

    binding = ModuleBinding(Fused(), pool, "weights", "target")
    assert sorted(map(sorted, binding.required())) == [["q"], ["qkv"]]


def test_placements_say_where_and_what(pool: HostPool) -> None:
    binding = ModuleBinding(Model(), pool, "weights", "target")
    placements = binding.placements()
    assert placements["embed.weight"] == placements["head.weight"]
    assert placements["mixed.0"].dtype == "bfloat16"
    assert placements["scalar"].shape == ()
    assert placements["empty"].offset == -1
    assert "columns" not in placements, "a strided view cannot be written as bytes"
    for name, place in placements.items():
        if place.offset >= 0:
            tensor = binding.tensor(name)
            assert binding.arena.address + place.offset == tensor.data_ptr()


@pytest.mark.parametrize(
    "parameter",
    [torch.randn(4, 6).t(), torch.randn(1, 3).expand(4, 3)],
    ids=["transposed", "expanded"],
)
def test_parameters_that_cannot_be_bound_are_refused_and_nothing_changes(
    pool: HostPool, parameter: torch.Tensor
) -> None:
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(parameter)
    address = model.weight.data_ptr()
    with pytest.raises(Unsupported, match="odd"):
        ModuleBinding(model, pool, "weights", "target")
    assert model.weight.data_ptr() == address
    assert pool.memory().arenas == ()


def test_modules_that_keep_lists_of_their_parameters_stay_whole(pool: HostPool) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(3, 4), torch.randn(2, 3)
    expected = model(x)[0]
    ModuleBinding(model, pool, "weights", "target")
    pool.release(["weights"], Retention.BACKUP)
    pool.resume(["weights"])
    assert torch.equal(model(x)[0], expected)


# -- built on meta ------------------------------------------------------------------------------


def test_a_module_built_on_meta_first_exists_in_the_arena(pool: HostPool) -> None:
    """Parameters are zeros of the arena, buffers and attributes are there, ties and objects hold."""
    with parameters_on_meta():
        model = Model.__new__(Model)
        nn.Module.__init__(model)
        model.embed = nn.Embedding(6, 4)
        model.head = nn.Linear(4, 6, bias=True)
        model.head.weight = model.embed.weight
        model.rotary = Rotary()
        model.scalar = nn.Parameter(torch.tensor(2.5), requires_grad=False)
        model.empty = nn.Parameter(torch.empty(0, 3))
        model.rows = model.head.weight[:2].detach()
    assert all(p.is_meta for p in model.parameters())
    state = {n: t.clone() for n, t in model.rotary.named_buffers()}
    objects = {n: id(p) for n, p in model.named_parameters()}
    binding = ModuleBinding(model, pool, "weights", "target")
    low, high = binding.arena.address, binding.arena.address + binding.arena.size
    for name, parameter in model.named_parameters():
        assert id(parameter) == objects[name]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.device.type == "cpu"
        assert not parameter.any()
        assert not parameter.numel() or low <= parameter.data_ptr() < high
    assert not model.scalar.requires_grad
    assert model.embed.weight.requires_grad
    assert model.head.weight is model.embed.weight
    for name, tensor in model.rotary.named_buffers():
        assert torch.equal(tensor, state[name])
    with torch.no_grad():
        binding.tensor("embed.weight").copy_(torch.arange(24.0).view(6, 4))
    assert torch.equal(model.rows, torch.arange(8.0).view(2, 4))
    assert torch.equal(model.head.weight, torch.arange(24.0).view(6, 4))


def test_building_on_meta_never_holds_more_than_one_parameter() -> None:
    held: list[int] = []

    class Counting(nn.Linear):
        def reset_parameters(self) -> None:
            held.append(sum(p.numel() for p in self.parameters() if not p.is_meta))

    with parameters_on_meta():
        model = nn.Sequential(*(Counting(8, 8) for _ in range(4)))
    assert held == [0] * 4
    assert all(p.is_meta for p in model.parameters())
    assert not nn.Linear(2, 2).weight.is_meta, "outside of it nothing is different"


def test_only_the_thread_that_asked_builds_on_meta() -> None:
    with parameters_on_meta():
        other: list[nn.Module] = []
        thread = threading.Thread(target=lambda: other.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert not other[0].weight.is_meta
    with pytest.raises(RuntimeError, match="in the middle"), parameters_on_meta():
        raise RuntimeError("in the middle")
    assert not nn.Linear(2, 2).weight.is_meta


def test_meta_tensors_that_nothing_would_bring_back_are_refused(pool: HostPool) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("lost", torch.empty(3, device="meta"))
    with pytest.raises(Unsupported, match="lost"):
        ModuleBinding(model, pool, "weights", "target")
    with parameters_on_meta():
        lstm = nn.LSTM(3, 4)  # holds its parameters weakly, too
    with pytest.raises(Unsupported, match="weakly held"):
        ModuleBinding(lstm, pool, "weights", "target")
    assert pool.memory().arenas == ()


def test_names_of_element_types_go_both_ways() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        assert dtype_from(dtype_name(dtype)) is dtype
    for name in ("foo", "nn", "Tensor"):
        with pytest.raises(Unsupported):
            dtype_from(name)


def test_state_that_its_holder_rebuilds_is_not_kept(pool: HostPool) -> None:
    """Slots that are filled before each use would else be saved and restored for nothing."""
    module = Rotary()
    binding = ModuleBinding(module, pool, "weights", "m", rebuilt=lambda name: "cos" in name)
    other, address = module.listed[0].clone(), module.cos_cache.data_ptr()
    module.cos_cache.fill_(3.0)
    pool.release(["weights"], Retention.BACKUP)
    pool.resume(["weights"])
    assert module.cos_cache.data_ptr() == address
    assert not module.cos_cache.any()
    assert torch.equal(module.listed[0], other)
    assert binding.arena.regions["cos_cache"].survival == "zero"
