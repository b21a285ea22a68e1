"""An int8 engine behind syncs of full-precision weights: processed once a tensor, equal to a fresh one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager  # noqa: E402
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy  # noqa: E402
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport  # noqa: E402
from hotbunk.conformance.kit import greedy, make_adapter  # noqa: E402
from hotbunk.conformance.transfers import MemoryTransfer  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.backends.reference import quantize  # noqa: E402
from hotbunk.rollout.contract import Scope, Tag, TensorSpec, Version, collect  # noqa: E402
from hotbunk.rollout.handle import LocalHandle  # noqa: E402
from hotbunk.rollout.kernels import as_bytes  # noqa: E402
from hotbunk.rollout.status import Health  # noqa: E402

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
LAYERS = 7 * 2  # linear layers of a block, of two blocks


def manage(target: Any, bucket: int = 10_000) -> CheckpointEngineManager:
    policy = SyncPolicy(bucket_bytes=bucket)
    return CheckpointEngineManager([LocalHandle(target)], NaiveTransport(), policy=policy)


async def tokens(kit: Any, target: Any) -> list[int]:
    return list((await collect(target.generate(kit.request(PROMPT, 12)))).token_ids)


def dequantised(kit: Any, path: Any) -> Any:
    """The model whose weights are what eight bits leave of them: computed here, not by the engine."""
    model = copy.deepcopy(kit.loaded(path))  # that one is shared by all tests
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and ".layers." in name:
            scale = layer.weight.data.abs().amax(1, keepdim=True) / 127
            layer.weight.data = (layer.weight.data / scale).round() * scale
    return model


async def state(target: Any) -> dict[str, int]:
    return dict((await target.digest()).values)


@pytest.mark.parametrize("bucket", [1 << 20, 10_007, 64])
async def test_after_each_update_it_equals_a_fresh_engine_g8(
    tiny: Any, kit: Any, replica: Any, bucket: int
) -> None:
    """Eight bits of eight bits would be other weights: three updates, each from the source's own."""
    target = await replica(tiny(seed=0), quantization="int8")
    for seed in (1, 2, 3):
        report = await manage(target, bucket).update_weights(
            kit.source(tiny(seed=seed)), Version(0, seed)
        )
        assert report.outcomes[0].update.verified == "transfer"
        fresh = await replica(tiny(seed=seed), quantization="int8")
        assert await state(target) == await state(fresh)
        assert await tokens(kit, target) == greedy(dequantised(kit, tiny(seed=seed)), PROMPT, 12)
        await fresh.close()


async def test_post_load_runs_once_an_update_and_never_on_a_wake_g7(
    tiny: Any, kit: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await replica(tiny(seed=0), quantization="int8")
    done: list[int] = []
    quantise = quantize.Int8Linear.quantise

    def counted(self: Any, weight: Any) -> None:
        done.append(1)
        quantise(self, weight)

    monkeypatch.setattr(quantize.Int8Linear, "quantise", counted)
    await manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    assert len(done) == LAYERS
    before = await state(target)
    await target.sleep(1)
    await target.wake_up()
    assert await state(target) == before
    assert len(done) == LAYERS, "a level-1 wake quantised again"


@pytest.mark.parametrize("level", [1, 2])
async def test_cycles_of_both_levels_and_an_update_end_alike_g6(
    tiny: Any, kit: Any, replica: Any, level: int
) -> None:
    target = await replica(tiny(seed=0), quantization="int8")
    await target.sleep(level)
    await manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    fresh = await replica(tiny(seed=1), quantization="int8")
    assert await state(target) == await state(fresh)


async def test_it_takes_a_quarter_of_the_memory_and_an_update_needs_one_tensor_more(
    tiny: Any, kit: Any, replica: Any
) -> None:
    plain, target = await replica(tiny(seed=0)), await replica(tiny(seed=0), quantization="int8")
    sizes = [(await r.memory()).resident(Tag.WEIGHTS) for r in (plain, target)]
    linear = sum(s.nbytes for s in kit.source(tiny(seed=0)).specs() if "_proj" in s.name)
    assert sizes[0] - sizes[1] > linear * 0.6
    writers: list[quantize.QuantisingWriter] = []
    init = quantize.QuantisingWriter.__init__

    def keep(self: Any, *args: Any) -> None:
        init(self, *args)
        writers.append(self)

    live: list[int] = []
    write = quantize.QuantisingWriter.write

    def watching(self: Any, bucket: Any) -> None:
        write(self, bucket)
        begun = {e.index for e in bucket.entries}
        live.append(sum(s.name in self._staged for n, s in enumerate(specs) if n in begun))

    specs = kit.source(tiny(seed=1)).specs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize.QuantisingWriter, "__init__", keep)
        patch.setattr(quantize.QuantisingWriter, "write", watching)
        await manage(target).update_weights(kit.source(tiny(seed=1)), Version(0, 1))
    (writer,) = writers
    assert writer.processed == LAYERS
    assert writer._staged == {}
    assert max(live) <= 1


async def test_the_same_version_again_is_compared_and_skipped_h19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0), quantization="int8")
    manager, source = manage(target), kit.source(tiny(seed=1))
    await manager.update_weights(source, Version(0, 1))
    again = await manager.update_weights(source, Version(0, 1))
    assert again.outcomes[0].update.skipped
    assert again.outcomes[0].update.verified == "applied"
    name = "model.layers.0.mlp.up_proj.weight"
    target.backend._runner.binding.tensor(name)[0, 0] ^= 1
    healed = await manager.update_weights(source, Version(0, 1))
    assert not healed.outcomes[0].update.skipped


async def test_what_arrives_changed_is_caught_before_the_commit(
    tiny: Any, kit: Any, replica: Any
) -> None:
    class Flipping(MemoryTransfer):
        async def spoil(self, k: int, bucket: Any) -> Any:
            if k == 0:
                bucket.data[100] ^= 1
            return bucket

    target = await replica(tiny(seed=0), quantization="int8")
    named = kit.loaded(tiny(seed=1)).named_parameters()
    content = [
        (TensorSpec(n, tuple(p.shape), "float32", p.numel() * 4), bytes(as_bytes(p).tolist()))
        for n, p in named
        if "_proj" in n or "norm" in n or "embed" in n or "head" in n
    ]
    content.sort(key=lambda c: "q_proj" not in c[0].name)
    transfer = Flipping(content, version=Version(0, 1))
    with pytest.raises(errors.VerifyFailed, match="q_proj"):
        await target.update_weights(transfer, version=Version(0, 1))
    assert (await target.status()).health is Health.POISONED


@pytest.mark.parametrize("change", ["scale", "int8", "shape"])
async def test_offers_that_do_not_fit_are_refused(
    tiny: Any, kit: Any, replica: Any, change: str
) -> None:
    target = await replica(tiny(seed=0), quantization="int8")
    before = await state(target)
    values = {n: p.detach() for n, p in kit.loaded(tiny(seed=1)).named_parameters()}
    name = "model.layers.0.self_attn.q_proj.weight"
    if change == "scale":
        values[name + "_scale"] = torch.ones(values[name].shape[0])
    elif change == "int8":
        values[name] = values[name].to(torch.int8)
    else:
        values[name] = values[name][:1]
    from hotbunk.checkpoint_engine.source import state_dict_source

    with pytest.raises(errors.SyncFailed) as caught:
        await manage(target).update_weights(state_dict_source(values), Version(0, 1))
    assert caught.value.report.outcomes[0].outcome is Outcome.ROLLED_BACK
    assert await state(target) == before


async def test_adapters_add_to_quantised_layers(tiny: Any, kit: Any, replica: Any) -> None:
    from hotbunk.conformance.kit import merged

    target = await replica(tiny(seed=0), quantization="int8")
    model = dequantised(kit, tiny(seed=0))
    tensors = make_adapter(model, "a", 1)
    content = [
        (
            TensorSpec(n, tuple(t.shape), "float32", t.numel() * 4, "adapter:a"),
            bytes(as_bytes(t).tolist()),
        )
        for n, t in tensors.items()
    ]
    scope = Scope.adapter("a", Version(0, 0))
    transfer = MemoryTransfer(content, version=Version(0, 1), scope=scope)
    await target.update_weights(transfer, version=Version(0, 1), scope=scope)
    asked = replace(kit.request(PROMPT, 10), adapter="a")
    done = await collect(target.generate(asked))
    assert list(done.token_ids) == greedy(merged(model, tensors), PROMPT, 10)
