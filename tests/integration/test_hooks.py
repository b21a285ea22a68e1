"""The trainer's hooks: wrong orders are typed errors, and giving memory away changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.source import module_source
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import Tag, Version
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.memory import HostPool
from hotbunk.rollout.replica import Health
from hotbunk.trainer_hooks.hooks import TrainerHooks
from hotbunk.trainer_hooks.recipes.models import load_model
from hotbunk.trainer_hooks.share import PooledTrainer

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    made = HostPool(tmp_path)
    yield made
    made.close()


class Share:
    """A trainer's share that only says what was asked of it; ``broken`` makes the next one fail."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken: Exception | None = None

    async def offload(self) -> None:
        if self.broken is not None:
            raise self.broken
        self.log.append("offload")

    async def restore(self) -> None:
        self.log.append("restore")


async def hooked(target: Any, **options: Any) -> tuple[TrainerHooks, Share]:
    share = Share()
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(), **options)
    return TrainerHooks(manager, share), share


def resident(target: Any) -> int:
    report = target.backend._runner.pool.audit()
    return int(report.resident())


# -- orders -----------------------------------------------------------------------------------


async def test_a_whole_step_in_order(tiny: Any, kit: Any, replica: Any) -> None:
    target = await replica(tiny(seed=0))
    hooks, share = await hooked(target)
    for step, model in enumerate((tiny(seed=1), tiny(seed=0)), 1):
        await hooks.on_rollout_begin()
        await kit.complete(target, PROMPT)
        await hooks.on_rollout_end()
        assert resident(target) == 0
        await hooks.on_train_begin()
        await hooks.on_train_end()
        await hooks.on_weights_ready(kit.source(model), Version(0, step))
        done = await kit.complete(target, PROMPT)
        assert list(done.token_ids) == kit.golden(model, PROMPT)
    assert share.log == ["restore", "restore", "offload"] * 2
    await hooks.on_shutdown()
    assert (await target.status()).health is Health.LOST


@pytest.mark.parametrize("how", ["asleep", "asleep and woken without weights", "never loaded"])
async def test_a_rollout_that_nobody_could_serve_does_not_begin(
    tiny: Any, replica: Any, how: str
) -> None:
    load = "empty" if how == "never loaded" else "disk"
    target = await replica(tiny(), load=load)
    hooks, _ = await hooked(target)
    if how != "never loaded":
        await hooks.on_rollout_end()
    if how == "asleep and woken without weights":
        await hooks.manager.wake_replicas()
    with pytest.raises(errors.SessionError, match="on_weights_ready"):
        await hooks.on_rollout_begin()


async def test_validating_before_anything_was_synced_is_an_order_error(
    tiny: Any, replica: Any
) -> None:
    target = await replica(tiny())
    hooks, _ = await hooked(target)
    await hooks.on_validation_begin()  # awake with what it loaded: it can serve
    await hooks.on_validation_end()
    with pytest.raises(errors.SessionError, match="on_weights_ready"):
        await hooks.on_validation_begin()


async def test_init_validate_train_begin_leaves_the_engine_released_m19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    hooks, share = await hooked(target)
    await hooks.on_weights_ready(kit.source(tiny(seed=1)), Version(0, 0))
    await hooks.on_validation_begin()
    await kit.complete(target, PROMPT)
    assert resident(target) > 0
    share.log.clear()
    await hooks.on_train_begin()  # a loop that forgot on_validation_end
    assert resident(target) == 0
    assert share.log == ["restore"]


async def test_validation_serves_the_last_synced_version_again_h19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target, two = await replica(tiny(seed=0)), tiny(seed=1)
    hooks, _ = await hooked(target)
    await hooks.on_weights_ready(kit.source(two), Version(0, 3))
    await hooks.on_rollout_end()
    await hooks.on_validation_begin()
    done = await kit.complete(target, PROMPT)
    assert list(done.token_ids) == kit.golden(two, PROMPT)
    assert [s.version for s in done.spans] == [Version(0, 3)]
    await hooks.on_validation_end()
    assert resident(target) == 0


async def test_a_step_that_left_the_weights_alone_needs_no_transfer_h19(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """The engine never released: it is asked, verified, and serves the old version."""
    target, source = await replica(tiny(seed=0)), kit.source(tiny(seed=1))
    hooks, _ = await hooked(target, free_cache_engine=False)
    await hooks.on_weights_ready(source, Version(0, 3))
    await hooks.on_rollout_end()
    await hooks.on_train_begin()
    await hooks.on_train_end(updated=False)
    report = await hooks.on_weights_ready(source, Version(0, 3))
    assert report.nbytes == 0
    assert report.outcomes[0].update is not None
    assert report.outcomes[0].update.skipped
    await hooks.on_rollout_begin()
    done = await kit.complete(target, PROMPT)
    assert [s.version for s in done.spans] == [Version(0, 3)]


@pytest.mark.parametrize("steps", [[True], [True, False], [False, True, False]])
async def test_weights_that_moved_are_not_sent_under_the_old_label(
    tiny: Any, kit: Any, replica: Any, steps: list[bool]
) -> None:
    """One step that updated is enough, whatever later steps say about themselves."""
    target, source = await replica(tiny(seed=0)), kit.source(tiny(seed=1))
    hooks, _ = await hooked(target)
    await hooks.on_weights_ready(source, Version(0, 1))
    for updated in steps:
        await hooks.on_train_begin()
        await hooks.on_train_end(updated=updated)
    with pytest.raises(errors.SessionError, match="not the last synced"):
        await hooks.on_validation_begin()
    assert (await target.status()).is_sleeping
    await hooks.on_weights_ready(source, Version(0, 2))
    await hooks.on_train_begin()
    await hooks.on_train_end(updated=False)
    await hooks.on_validation_begin()


async def test_a_fenced_sleeper_gives_its_weights_back_before_the_trainer_comes(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """After a sync whose trainer did not let go, the engine sleeps with its weights mapped."""
    target = await replica(tiny(seed=0))
    hooks, share = await hooked(target)
    await hooks.on_rollout_end()
    share.broken = RuntimeError("no room to offload")
    with pytest.raises(errors.SyncFailed, match="no room to offload"):
        await hooks.on_weights_ready(kit.source(tiny(seed=1)), Version(0, 1))
    assert (await target.status()).is_sleeping
    assert resident(target) > 0
    await hooks.on_train_begin()
    assert resident(target) == 0
    share.broken = None
    await hooks.on_weights_ready(kit.source(tiny(seed=1)), Version(0, 1))
    done = await kit.complete(target, PROMPT)
    assert list(done.token_ids) == kit.golden(tiny(seed=1), PROMPT)


async def test_a_failed_sync_does_not_become_the_last_synced_one(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0))
    hooks, _ = await hooked(target)
    await hooks.on_weights_ready(kit.source(tiny(seed=1)), Version(0, 1))
    await hooks.on_rollout_end()
    with pytest.raises(errors.SyncFailed):
        await hooks.on_weights_ready(kit.source(tiny("qwen3")), Version(0, 2))
    await hooks.on_validation_begin()
    done = await kit.complete(target, PROMPT)
    assert [s.version for s in done.spans] == [Version(0, 1)]


# -- the trainer's share ----------------------------------------------------------------------


def step(model: Any, optimizer: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 256, (4, 12), generator=generator)
    optimizer.zero_grad(set_to_none=False)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("tied", [False, True])
async def test_training_with_and_without_offload_is_bitwise_equal(
    tiny: Any, pool: HostPool, tied: bool
) -> None:
    plain = load_model(tiny(tied=tied))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    pooled = load_model(tiny(tied=tied))
    optimizer = torch.optim.AdamW(pooled.parameters(), lr=1e-3)
    share = PooledTrainer(pooled, optimizer, pool, offload=True)
    for number in range(6):
        assert step(pooled, optimizer, number) == step(plain, reference, number)
        await share.offload()
        await share.offload()
        assert pool.audit().resident() == 0
        await share.restore()
        await share.restore()
    for ours, theirs in zip(pooled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[ours][key], reference.state[theirs][key])


async def test_the_share_lies_in_the_pool_and_gradients_come_back_as_zeros(
    tiny: Any, pool: HostPool
) -> None:
    model = load_model(tiny())
    optimizer = torch.optim.AdamW(model.parameters())
    share = PooledTrainer(model, optimizer, pool, offload=True)
    step(model, optimizer, 0)
    ranges = [(a.address, a.address + a.size) for a in pool.arenas()]
    size = sum(p.numel() for p in model.parameters()) * 4
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]):
            assert any(low <= tensor.data_ptr() < high for low, high in ranges)
    await share.offload()
    assert 3 * size <= share.memory().backup() < 3 * size + 65536, "gradients are not backed up"
    await share.restore()
    assert not any(p.grad.any() for p in model.parameters())


async def test_a_share_that_stays_is_never_released(tiny: Any, pool: HostPool) -> None:
    model = load_model(tiny())
    share = PooledTrainer(model, torch.optim.AdamW(model.parameters()), pool, offload=False)
    before = pool.memory().arenas
    await share.offload()
    await share.restore()
    assert pool.memory().arenas == before


async def test_a_cancelled_offload_is_finished_before_anything_else_happens(
    tiny: Any, pool: HostPool
) -> None:
    """Its thread goes on: a restore that did not wait would leave training to a fault."""
    model = load_model(tiny())
    optimizer = torch.optim.AdamW(model.parameters())
    share = PooledTrainer(model, optimizer, pool, offload=True)
    for number in range(20):
        task = asyncio.ensure_future(share.offload())
        await asyncio.sleep(0.0005 * (number % 4))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await share.restore()
        step(model, optimizer, number)


async def test_no_room_for_the_backup_keeps_the_share_and_fences_the_engine(
    tiny: Any, kit: Any, replica: Any, tmp_path: Path
) -> None:
    target = await replica(tiny(seed=0))
    full = HostPool(tmp_path / "missing")
    model = load_model(tiny(seed=1))
    optimizer = torch.optim.AdamW(model.parameters())
    share = PooledTrainer(model, optimizer, full, offload=True)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport(full))
    hooks = TrainerHooks(manager, share)
    await hooks.on_rollout_end()
    with pytest.raises(errors.SyncFailed, match="did not let go"):
        await hooks.on_weights_ready(module_source(model), Version(0, 1))
    step(model, optimizer, 0)  # all of it is still there
    assert (await target.memory()).resident(Tag.KV_CACHE) == 0
    full.close()


async def test_optimizers_whose_state_would_lie_elsewhere_are_refused(pool: HostPool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(errors.Unsupported, match="amsgrad"):
        PooledTrainer(model, optimizer, pool, offload=True)
    assert pool.memory().arenas == ()


async def test_parameters_without_elements_or_gradients_are_no_obstacle(pool: HostPool) -> None:
    model = nn.Linear(2, 2)
    model.nothing = nn.Parameter(torch.empty(0, 3))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    share = PooledTrainer(model, optimizer, pool, offload=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    await share.offload()
    await share.restore()
    assert torch.equal(model.frozen, torch.ones(2))
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2}
