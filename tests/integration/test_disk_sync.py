"""Weights in a directory: whole sets or none, kept while they are read, checked before they are used."""

# ruff: noqa: ASYNC240 - tests may touch files where they stand
from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch as safetensors_torch
import torch

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.published import (
    RECORD,
    ROOTS_VARIABLE,
    SetName,
    newest,
    sets,
)
from hotbunk.checkpoint_engine.publishing import Writing, prune
from hotbunk.checkpoint_engine.source import state_dict_source
from hotbunk.checkpoint_engine.sources.safetensors import SafetensorsSource
from hotbunk.checkpoint_engine.transports.disk import DiskTransport, Published, latest
from hotbunk.rollout.contract import Scope, Ticket, Transfer, Version
from hotbunk.rollout.errors import (
    ConfigError,
    SessionError,
    TransferFailed,
    VerifyFailed,
)
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.kernels import fingerprint
from hotbunk.rollout.registry import open_transfer
from hotbunk.trainer_hooks.recipes.models import load_state

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def weights(programs: Callable[[str], Any]) -> Any:
    return programs("weights")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


async def publish(weights: Any, root: Path, step: int, **options: Any) -> Published:
    scope = options.pop("scope", Scope())
    source = state_dict_source(weights.simple(step))
    transport = DiskTransport(root, shard_bytes=30_000, **options)
    return await transport.publish(source, weights.manifest_of(source, step=step, scope=scope))


def names(root: Path) -> list[str]:
    return [str(one) for one in sets(root)]


async def content(transfer: Transfer) -> dict[str, bytes]:
    """Everything that a transfer brings, committed."""
    await transfer.accept(None)
    got = {spec.name: bytearray(spec.nbytes) for spec in transfer.manifest.tensors}
    async for bucket in transfer.buckets():
        for entry in bucket.entries:
            piece = bucket.data[entry.offset : entry.offset + entry.nbytes]
            name = transfer.manifest.tensors[entry.index].name
            got[name][entry.start : entry.start + entry.nbytes] = piece
    for name, value in (await transfer.fingerprints()).items():
        assert fingerprint(torch.frombuffer(got[name], dtype=torch.uint8)) == value
    await transfer.commit()
    return {name: bytes(one) for name, one in got.items()}


def expected(weights: Any, step: int) -> dict[str, bytes]:
    return {
        n: bytes(t.view(torch.uint8).flatten().tolist()) for n, t in weights.simple(step).items()
    }


# -- what is published ------------------------------------------------------------------------


async def test_a_set_is_private_and_any_safetensors_reader_takes_it(
    weights: Any, root: Path
) -> None:
    found = await publish(weights, root, 3)
    home = Path(found.ticket.address.removeprefix("set:"))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in home.iterdir())
    shards = sorted(home.glob("*.safetensors"))
    assert len(shards) == 6
    loaded = {n: t for path in shards for n, t in safetensors_torch.load_file(path).items()}
    assert all(torch.equal(loaded[n], t) for n, t in weights.simple(3).items())
    source = SafetensorsSource(home)
    assert {s.name for s in source.specs()} == weights.simple(3).keys()


async def test_the_newest_version_is_found_in_the_directory_alone(weights: Any, root: Path) -> None:
    for step in (1, 10, 9):  # by version, not by time or by letter
        await publish(weights, root, step, keep=5)
    found = latest(root)
    assert found.manifest.version == Version(0, 10)
    assert await content(await open_transfer(found.ticket)) == expected(weights, 10)


async def test_the_same_version_again_is_a_set_of_its_own(weights: Any, root: Path) -> None:
    await publish(weights, root, 4)
    source = state_dict_source(weights.simple(99))
    await DiskTransport(root).publish(source, weights.manifest_of(source, step=4))
    assert names(root) == ["full-0.4-1", "full-0.4-2"]
    assert await content(await open_transfer(latest(root).ticket)) == expected(weights, 99)


async def test_adapters_and_full_weights_are_kept_apart(weights: Any, root: Path) -> None:
    await publish(weights, root, 1, keep=1)
    adapter = Scope.adapter("../../odd name", Version(0, 1))
    for step in (2, 3):
        await publish(weights, root, step, keep=1, scope=adapter)
    assert latest(root).manifest.version == Version(0, 1)
    assert latest(root, adapter).manifest.version == Version(0, 3)
    assert len(names(root)) == 2
    with pytest.raises(TransferFailed, match="no adapter"):
        latest(root, Scope.adapter("another", Version(0, 1)))


def test_a_root_without_sets_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match="no full weights"):
        latest(tmp_path)
    with pytest.raises(ConfigError):
        latest(tmp_path / "missing")


# -- interrupted, n10 -------------------------------------------------------------------------


async def test_a_writer_killed_in_the_middle_leaves_the_old_set_and_the_next_one_cleans_up_n10(
    weights: Any, root: Path, crew: Any
) -> None:
    """Killed at every tensor; then published again in fewer shards."""
    await publish(weights, root, 1)
    for at in (0, 5, 11):
        options = {"root": str(root), "shard_bytes": 10_000}
        sender = await crew.start(
            "send.py",
            {
                "transport": "disk",
                "options": options,
                "ranks": [1],
                "step": 2,
                "at": at,
                "how": "die",
            },
        )
        await sender.until("reached")
        assert await sender.gone()
        assert names(root) == ["full-0.1-1"]
        assert latest(root).manifest.version == Version(0, 1)
    assert len([n for n in os.listdir(root) if n.startswith(".new-")]) == 3
    source = state_dict_source(weights.simple(2))
    await DiskTransport(root).publish(source, weights.manifest_of(source, step=2))
    assert sorted(os.listdir(root)) == ["full-0.1-1", "full-0.2-1"]
    assert len(list((root / "full-0.2-1").glob("*.safetensors"))) == 1
    assert await content(await open_transfer(latest(root).ticket)) == expected(weights, 2)


def test_a_set_that_another_writes_now_is_not_cleaned_away(weights: Any, root: Path) -> None:
    root.mkdir(mode=0o700)
    source = state_dict_source(weights.simple(1))
    writing = Writing(root, weights.manifest_of(source))
    prune(root, 1, 600.0)
    assert len(os.listdir(root)) == 1
    writing.discard()
    assert os.listdir(root) == []


async def test_no_room_is_a_typed_error_and_nothing_stays(
    weights: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotbunk.checkpoint_engine.published.os.posix_fallocate", full)
    with pytest.raises(TransferFailed, match="No space left"):
        await publish(weights, root, 1)
    assert os.listdir(root) == []


# -- kept while it is read, n9 ----------------------------------------------------------------


async def test_a_set_stays_while_a_slow_consumer_reads_it_n9(
    weights: Any, root: Path, crew: Any, programs: Any
) -> None:
    first = await publish(weights, root, 1, keep=1)
    slow = await crew.start(
        "receive.py",
        {"ticket": programs("crew").plain(first.ticket), "phase": "bucket 3", "how": "stop"},
    )
    while (await slow.until("reached")).get("reached") != "bucket 3":
        pass
    for step in (2, 3):
        await publish(weights, root, step, keep=1)
    assert names(root) == ["full-0.1-1", "full-0.3-1"]
    slow.signal(signal.SIGCONT)
    end = await slow.end()
    assert end["digests"] == programs("crew").digests(weights.simple(1))
    await slow.gone()
    await publish(weights, root, 4, keep=1)
    assert names(root) == ["full-0.4-1"]


@pytest.mark.parametrize("how", ["dies", "outstays its lease"])
async def test_a_set_is_not_kept_for_the_dead_nor_for_ever_n9(
    weights: Any, root: Path, crew: Any, programs: Any, how: str
) -> None:
    first = await publish(weights, root, 1, keep=1)
    reader = await crew.start(
        "receive.py",
        {"ticket": programs("crew").plain(first.ticket), "phase": "bucket 3", "how": "stop"},
    )
    while (await reader.until("reached")).get("reached") != "bucket 3":
        pass
    if how == "dies":
        reader.kill()
        await reader.gone()
        await publish(weights, root, 2, keep=1)
    else:
        await publish(weights, root, 2, keep=1)
        assert len(names(root)) == 2
        await publish(weights, root, 2, keep=1, lease=0.001)
    assert [n for n in names(root) if n.startswith("full-0.1")] == []


async def test_an_offers_own_set_stays_until_its_end(weights: Any, root: Path) -> None:
    """A receiver that has not opened it yet has no lock on it."""
    source = state_dict_source(weights.simple(1))
    offer = await DiskTransport(root, keep=1).offer(
        source, weights.manifest_of(source), deadline=20
    )
    serving = asyncio.create_task(offer.serve())
    transfer = await open_transfer(offer.tickets[0])
    while not names(root):  # noqa: ASYNC110 - a directory has no event
        await asyncio.sleep(0.01)
    for step in (2, 3):
        await publish(weights, root, step, keep=1)
    assert "full-0.1-1" in names(root)
    assert await content(transfer) == expected(weights, 1)
    await serving
    await offer.close()
    assert names(root) == ["full-0.3-1"]


# -- hostile sets -----------------------------------------------------------------------------


def rewritten(home: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads((home / RECORD).read_text())
    change(record)
    (home / RECORD).write_text(json.dumps(record))


def shard(home: Path) -> Path:
    return sorted(home.glob("*.safetensors"))[0]


def cut_short(home: Path) -> None:
    os.truncate(shard(home), shard(home).stat().st_size - 1)


def linked(home: Path) -> None:
    path, elsewhere = shard(home), home.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def fifo(home: Path) -> None:
    path = shard(home)
    path.unlink()
    os.mkfifo(path)


def other_header(home: Path) -> None:
    path = shard(home)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"w0"', b'"w9"', 1))


def set_field(**fields: Any) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        rewritten(home, lambda record: record.update(fields))

    return change


def in_manifest(**fields: Any) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        rewritten(home, lambda record: record["manifest"].update(fields))

    return change


def in_tensor(**fields: Any) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        rewritten(home, lambda record: record["manifest"]["tensors"][0].update(fields))

    return change


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(cut_short, id="cut short"),
        pytest.param(linked, id="a link instead of a file"),
        pytest.param(fifo, id="a pipe instead of a file"),
        pytest.param(lambda home: shard(home).unlink(), id="a file missing"),
        pytest.param(lambda home: shard(home).write_bytes(b"\xff" * 64), id="no header"),
        pytest.param(other_header, id="another name in the header"),
        pytest.param(lambda home: (home / RECORD).unlink(), id="no record"),
        pytest.param(lambda home: (home / RECORD).write_bytes(b"{"), id="half a record"),
        pytest.param(lambda home: (home / "lock").unlink(), id="no lock"),
        pytest.param(set_field(files=["/etc/passwd"] * 12), id="a path outside"),
        pytest.param(set_field(files=["../root/full-0.1-1/x"] * 12), id="a path up"),
        pytest.param(set_field(files=[]), id="too few files"),
        pytest.param(set_field(format=2), id="another format"),
        pytest.param(in_tensor(dtype="float16"), id="another type"),
        pytest.param(in_tensor(dtype="complex129"), id="no type"),
        pytest.param(in_tensor(shape=[64, 40]), id="another shape"),
        pytest.param(in_tensor(nbytes=1 << 50), id="another size"),
        pytest.param(in_tensor(name="w1"), id="another name"),
        pytest.param(in_manifest(bucket_bytes=1 << 60), id="a bucket of an exabyte"),
        pytest.param(in_manifest(bucket_bytes=-5), id="a negative bucket"),
    ],
)
async def test_hostile_sets_are_refused_before_they_are_used(
    weights: Any, root: Path, attack: Callable[[Path], None]
) -> None:
    found = await publish(weights, root, 1)
    attack(root / "full-0.1-1")

    async def use() -> None:
        transfer = await open_transfer(found.ticket)
        try:
            await transfer.accept(None)
        finally:
            await transfer.abort(RuntimeError())

    with pytest.raises(TransferFailed):
        await asyncio.wait_for(use(), 10)


async def test_a_flipped_bit_on_the_disk_is_caught(weights: Any, root: Path) -> None:
    found = await publish(weights, root, 1)
    path = shard(root / "full-0.1-1")
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    transfer = await open_transfer(found.ticket)
    with pytest.raises(AssertionError):  # the receiver's own comparison
        await content(transfer)
    await transfer.abort(RuntimeError())


async def test_a_flipped_bit_is_caught_where_it_is_cast_too(
    tiny: Any, kit: Any, replica: Any, root: Path
) -> None:
    """The receiver's fingerprints are those of the cast bytes, so the read ones are checked here."""
    target = await replica(tiny(seed=0), dtype="bfloat16")
    transport = DiskTransport(root)
    source = kit.source(tiny(seed=1))
    manager = CheckpointEngineManager([LocalHandle(target)], transport)
    await manager.update_weights(source, Version(0, 1))
    found = latest(root)
    path = shard(root / "full-0.1-1")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    await target.sleep(2)
    await target.wake_up(["weights"])
    with pytest.raises(VerifyFailed):
        await target.update_weights(found.ticket, version=Version(0, 1))


@pytest.mark.parametrize(
    "address",
    ["set:/etc", "set:/etc/full-0.1-1", "set:relative/full-0.1-1", "set:", "set:{root}/.new-1"],
)
async def test_tickets_that_lead_elsewhere_are_refused(root: Path, address: str) -> None:
    root.mkdir(mode=0o700)
    with pytest.raises(TransferFailed):
        await open_transfer(Ticket("disk", address.format(root=root)))


async def test_roots_that_others_may_use_are_refused(
    weights: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await publish(weights, root, 1)
    root.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        DiskTransport(root)
    with pytest.raises(TransferFailed, match="alone"):
        await open_transfer(found.ticket)
    root.chmod(0o700)
    monkeypatch.setenv(ROOTS_VARIABLE, f"/somewhere:{root.parent}")
    with pytest.raises(TransferFailed, match=ROOTS_VARIABLE):
        await open_transfer(found.ticket)
    monkeypatch.setenv(ROOTS_VARIABLE, f"/somewhere:{root}")
    await (await open_transfer(found.ticket)).abort(RuntimeError())
    root.rename(root.parent / "moved")
    root.symlink_to(root.parent / "moved")
    with pytest.raises(TransferFailed):
        await open_transfer(found.ticket)


def test_set_names() -> None:
    assert SetName.parse("full-0.7-1") == SetName(Version(0, 7), 1, "full")
    for name in ("full-0.7", "full-0.7-1/..", "full-a.7-1", ".new-1", "full-0.7-1\n", ""):
        assert SetName.parse(name) is None


async def test_transfers_want_their_verbs_in_order(weights: Any, root: Path) -> None:
    found = await publish(weights, root, 1)
    transfer = await open_transfer(found.ticket)
    with pytest.raises(SessionError):
        async for _ in transfer.buckets():
            pass
    await transfer.accept(None)
    async for _ in transfer.buckets():
        pass
    with pytest.raises(SessionError, match="before"):
        async for _ in transfer.buckets():
            pass
    await transfer.abort(RuntimeError())


def test_options_that_cannot_be_meant(tmp_path: Path) -> None:
    for options in (
        {"keep": 0},
        {"lease": 0},
        {"shard_bytes": 0},
        {"address": "0.0.0.0"},
        {"address": "x"},
    ):
        with pytest.raises(ConfigError):
            DiskTransport(tmp_path / "r", **options)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        DiskTransport(tmp_path / "file")


# -- engines ----------------------------------------------------------------------------------


async def test_an_engine_that_lost_its_weights_takes_them_from_the_directory(
    tiny: Any, kit: Any, replica: Any, root: Path
) -> None:
    """Level 2, with nobody there to send; an engine that starts late likewise."""
    model = tiny(seed=1)
    target = await replica(tiny(seed=0))
    transport = DiskTransport(root)
    manager = CheckpointEngineManager([LocalHandle(target)], transport)
    report = await manager.update_weights(kit.source(model), Version(0, 5))
    assert report.ok
    await target.sleep(2)
    await target.wake_up(["weights"])
    late = await replica(tiny(seed=2))
    for engine in (target, late):
        found = latest(root)
        done = await engine.update_weights(found.ticket, version=found.manifest.version)
        assert (done.verified, done.applied) == ("applied", len(found.manifest.tensors))
        if engine is target:
            await engine.wake_up(None)
        assert list((await kit.complete(engine, PROMPT)).token_ids) == kit.golden(model, PROMPT)
        assert (await engine.status()).versions == {"target": Version(0, 5)}


async def test_a_changed_file_is_a_new_digest_g15(
    tiny: Any, replica: Any, root: Path, tmp_path: Path
) -> None:
    """A directory whose file changes, published, and read back by an engine each time."""
    target = await replica(tiny(seed=0))
    directory = tmp_path / "model"
    directory.mkdir()
    probe = "model.layers.0.mlp.down_proj.weight"
    transport = DiskTransport(root)
    source = None
    seen = []
    for step, seed in ((1, 1), (2, 2)):
        content = (tiny(seed=seed) / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(content)
        source = source or SafetensorsSource(directory)
        manifest = msgspec.structs.replace(
            latest(root).manifest if step > 1 else _manifest(source), version=Version(0, step)
        )
        await transport.publish(source, manifest)
        found = latest(root)
        await target.update_weights(found.ticket, version=found.manifest.version)
        seen.append((await target.digest([probe])).values[probe])
    assert seen == [fingerprint(load_state(tiny(seed=seed))[probe]) for seed in (1, 2)]
    assert seen[0] != seen[1]


def _manifest(source: Any) -> Any:
    from hotbunk.rollout.contract import Manifest
    from hotbunk.rollout.fingerprint import KIND

    return Manifest(Version(0, 1), source.specs(), bucket_bytes=10_000, fingerprint=KIND)


def test_reading_holds_one_buffer_and_never_the_model(weights: Any, root: Path) -> None:
    """Bytes that one walk allocates stay near one bucket, however large the set is."""
    import tracemalloc

    from hotbunk.checkpoint_engine.transports.reading import SetReader

    source = state_dict_source({f"w{n}": torch.zeros(1 << 18) for n in range(32)})
    transport = DiskTransport(root)
    transport.write(source, weights.manifest_of(source, bucket_bytes=1 << 16)).close()
    held = newest(root)
    tracemalloc.start()
    try:
        reader = SetReader(held, None)
        reader.start()
        while reader.next() is not None:
            pass
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        held.close()
