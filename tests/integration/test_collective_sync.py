"""Groups of the collective transport: built once, rebuilt for others, bounded, and nobody else's."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.policy import SyncPolicy
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.transports.collective import CollectiveTransport
from hotbunk.checkpoint_engine.transports.collective.groups import (
    Group,
    Kept,
    backend_for,
    open_store,
)
from hotbunk.checkpoint_engine.transports.receiving import process_id
from hotbunk.rollout.contract import Version
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    SessionError,
    TransferFailed,
    Unsupported,
)
from hotbunk.rollout.handle import LocalHandle

pytestmark = pytest.mark.anyio


@pytest.fixture
def weights(programs: Callable[[str], Any]) -> Any:
    return programs("weights")


@pytest.fixture
async def transport(zygotes: None) -> AsyncIterator[CollectiveTransport]:
    made = CollectiveTransport()
    yield made
    await made.close()


async def sync(
    transport: CollectiveTransport, weights: Any, receivers: list[Any], step: int
) -> list[dict[str, Any]]:
    """One sync to processes that live; how it ended for each."""
    source = state_dict_source(weights.simple(step))
    offer = await transport.offer(
        source, weights.manifest_of(source, step=step), ranks=[len(receivers)], deadline=60.0
    )
    serving = asyncio.create_task(offer.serve())
    ends = await asyncio.gather(
        *(one.take(offer.tickets[0], rank) for rank, one in enumerate(receivers))
    )
    await serving
    await offer.close()
    return list(ends)


async def test_groups_are_built_once_and_again_when_members_change_h15(
    transport: CollectiveTransport, crew: Any, weights: Any, programs: Any
) -> None:
    first, second, third = [await crew.start("receive.py", {}) for _ in range(3)]
    generations = []
    for step, members in enumerate([[first, second]] * 3 + [[first, third]] * 2, 1):
        ends = await sync(transport, weights, members, step)
        expected = programs("crew").digests(weights.simple(step))
        assert [one.get("digests") == expected for one in ends] == [True, True], ends
        generations.append(transport.generation)
    assert generations == [1, 1, 1, 2, 2]


async def test_a_trainer_that_restarts_finds_the_receivers_ready_h15(
    crew: Any, weights: Any, zygotes: None
) -> None:
    living = [await crew.start("receive.py", {})]
    for step in (1, 2):
        transport = CollectiveTransport()
        (end,) = await sync(transport, weights, living, step)
        assert end.get("committed") == f"0.{step}", end
        await transport.close()


async def test_a_receiver_that_was_hit_is_in_a_group_of_the_next_generation(
    transport: CollectiveTransport, crew: Any, weights: Any
) -> None:
    one = await crew.start("receive.py", {"phase": "bucket 2", "how": "raise"})
    (end,) = await sync(transport, weights, [one], 1)
    assert end["error"] == "Raised"
    other = await crew.start("receive.py", {})
    for step in (2, 3):
        (end,) = await sync(transport, weights, [other], step)
        assert end.get("committed") == f"0.{step}"
    assert transport.generation == 2


async def test_building_a_group_ends_at_its_deadline_and_names_who_is_missing_h14() -> None:
    _store, port = open_store("127.0.0.1", 5.0)
    group = Group("jobs/1", 1, 0, 3, backend="gloo", address="127.0.0.1")
    other = Group("jobs/1", 1, 2, 3, backend="gloo", address="127.0.0.1")
    loop = asyncio.get_running_loop()
    building = [
        loop.run_in_executor(one.executor, one.init, "127.0.0.1", port, 1.0)
        for one in (group, other)
    ]
    for error in await asyncio.gather(*building, return_exceptions=True):
        assert isinstance(error, DeadlineExceeded), error
        assert "jobs/1" in str(error)
        assert "ranks present [0, 2], absent [1]" in str(error)
    for one in (group, other):
        one.close()


async def test_a_group_that_was_never_built_says_so_at_once_h16() -> None:
    group = Group("g", 1, 0, 2, backend="gloo", address="127.0.0.1")
    with pytest.raises(SessionError, match="not initialised"):
        group.broadcast(torch.zeros(1, dtype=torch.uint8), 60.0)
    group.close()
    group.close()


async def test_a_member_that_goes_is_an_error_and_its_group_is_over_h15() -> None:
    _store, port = open_store("127.0.0.1", 5.0)
    loop = asyncio.get_running_loop()
    groups = [Group("g/1", 1, r, 2, backend="gloo", address="127.0.0.1") for r in range(2)]
    await asyncio.gather(
        *(loop.run_in_executor(g.executor, g.init, "127.0.0.1", port, 10.0) for g in groups)
    )
    sent, got = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    await asyncio.gather(
        loop.run_in_executor(groups[0].executor, groups[0].broadcast, sent, 10.0),
        loop.run_in_executor(groups[1].executor, groups[1].broadcast, got, 10.0),
    )
    assert torch.equal(sent, got)
    waiting = loop.run_in_executor(groups[1].executor, groups[1].broadcast, got, 30.0)
    await asyncio.sleep(0.1)
    groups[0].close()
    with pytest.raises(TransferFailed, match="g/1"):
        await waiting
    with pytest.raises(SessionError, match="generation 1"):
        await loop.run_in_executor(groups[1].executor, groups[1].broadcast, got, 30.0)
    groups[1].close()


async def test_the_trainers_own_groups_are_not_touched(
    transport: CollectiveTransport, crew: Any, weights: Any, tmp_path: Any
) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before = (dist.group.WORLD, set(dist.distributed_c10d._world.pg_map))
        one = await crew.start("receive.py", {})
        (end,) = await sync(transport, weights, [one], 1)
        assert end.get("committed") == "0.1"
        assert (dist.group.WORLD, set(dist.distributed_c10d._world.pg_map)) == before
        value = torch.ones(3)
        dist.all_reduce(value)
        assert torch.equal(value, torch.ones(3))
    finally:
        dist.destroy_process_group()


async def test_several_replicas_of_one_process_have_a_group_each(
    transport: CollectiveTransport, tiny: Any, kit: Any, replica: Any
) -> None:
    targets = [await replica(tiny(seed=n)) for n in range(3)]
    manager = CheckpointEngineManager(
        [LocalHandle(one) for one in targets], transport, policy=SyncPolicy(bucket_bytes=10_000)
    )
    model = tiny(seed=7)
    for step in (1, 2):
        report = await manager.update_weights(kit.source(model), Version(0, step))
        assert report.ok
    assert transport.generation == 3
    for one in targets:
        completion = await kit.complete(one, [5, 6, 7, 8])
        assert list(completion.token_ids) == kit.golden(model, [5, 6, 7, 8])


def test_groups_that_are_kept_are_few() -> None:
    kept = Kept(2)
    groups = [Group(f"g/{n}", n, 0, 2, backend="gloo", address="127.0.0.1") for n in range(3)]
    for n, one in enumerate(groups):
        kept.put(n, one)
    assert kept.names() == ("g/1", "g/2")
    assert groups[0].broken
    assert kept.get(0) is None
    kept.drop_if(lambda key: key == 1)
    assert kept.names() == ("g/2",)
    kept.close()
    assert kept.names() == ()


def test_a_fork_is_another_process() -> None:
    """Engines are forked from a server that has everything imported."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, process_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 64).decode() != process_id()
    assert process_id() == process_id()
    os.close(read)


def test_options_that_cannot_be_meant() -> None:
    for options in ({"device": "tpu"}, {"address": "0.0.0.0"}, {"address": "host"}, {"stall": 0}):
        with pytest.raises(ConfigError):
            CollectiveTransport(**options)  # type: ignore[arg-type]
    assert [backend_for(d) for d in ("cpu", "cuda:1", "npu")] == ["gloo", "nccl", "hccl"]


async def test_an_address_that_is_not_ours_is_a_config_error(weights: Any) -> None:
    source = state_dict_source(weights.simple(1))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await CollectiveTransport(address="192.0.2.1").offer(source, weights.manifest_of(source))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
async def test_a_backend_that_torch_lacks_is_unsupported() -> None:
    _store, port = open_store("127.0.0.1", 5.0)
    for backend in ("nccl", "hccl"):
        group = Group("g", 1, 0, 1, backend=backend, address="127.0.0.1")
        with pytest.raises(Unsupported, match=backend):
            await asyncio.get_running_loop().run_in_executor(
                group.executor, group.init, "127.0.0.1", port, 5.0
            )
        group.close()


# -- two network namespaces -------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace that reaches us by one cable alone: its name, and our address there."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the ip command and root")
    tag = uuid.uuid4().hex[:6]
    name, ours, theirs = f"hb-{tag}", f"hb-{tag}-a", f"hb-{tag}-b"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        try:
            ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no virtual cables here: {error.stderr.decode().strip()}")
        ip("addr", "add", "10.213.77.1/30", "dev", ours)
        ip("link", "set", ours, "up")
        ip("-n", name, "addr", "add", "10.213.77.2/30", "dev", theirs)
        ip("-n", name, "link", "set", theirs, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield name, "10.213.77.1"
    finally:
        for words in (["netns", "delete", name], ["link", "delete", ours]):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=10)


async def test_two_network_namespaces(
    namespace: tuple[str, str], crew: Any, weights: Any, programs: Any
) -> None:
    name, address = namespace
    program = programs("crew")
    there = program.Zygote(program.HEAVY, ["ip", "netns", "exec", name])
    transport = CollectiveTransport(address=address)
    try:
        living = [await crew.start("receive.py", {}, under=there) for _ in range(2)]
        for step in (1, 2):
            ends = await sync(transport, weights, living, step)
            expected = program.digests(weights.simple(step))
            assert [one.get("digests") == expected for one in ends] == [True, True], ends
        assert transport.generation == 1
    finally:
        await transport.close()
        for one in living:
            one.kill()
        there.close()


async def test_what_was_made_for_a_party_that_is_out_is_cancelled_not_forgotten() -> None:
    """It left just before it was to be heard: a coroutine that nobody awaits would warn, later."""
    import gc

    from hotbunk.checkpoint_engine.transports.parties import Left, Party

    party = Party(0, 1)
    party.done = True

    async def never() -> None:
        raise AssertionError

    coroutine = never()
    with pytest.raises(Left):
        await party.wait(coroutine, 1.0)
    await asyncio.sleep(0)
    assert coroutine.cr_frame is None, "it is neither run nor closed"
    del coroutine
    gc.collect()
