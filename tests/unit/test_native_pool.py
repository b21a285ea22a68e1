"""The native pool from Python: every driver, failures at every call, the CUDA path without a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout import native
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import (
    HostOutOfMemory,
    MemoryFault,
    ReleaseIncomplete,
    ResumeOutOfMemory,
)
from hotbunk.rollout.memory import HostPool, NativeArena, NativePool, Survival

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BACKUP, DISCARD = Retention.BACKUP, Retention.DISCARD


class Device:
    """A pool on a fake device, and the device's controls."""

    def __init__(self, pool: NativePool, library: Path | None) -> None:
        self.pool = pool
        self._cuda: Any = None if library is None else ctypes.CDLL(str(library))
        if self._cuda is not None:
            self._cuda.fake_cuda_count.restype = ctypes.c_int64
            self._cuda.fake_cuda_fail.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)

    def fail(self, nth: int) -> None:
        if self._cuda is None:
            self.pool.fail("*", nth)
        else:
            self._cuda.fake_cuda_fail(b"*", nth, 700)

    def count(self, what: str) -> int:
        if self._cuda is None:
            return self.pool.count(what)
        return int(self._cuda.fake_cuda_count(what.encode()))

    def handles(self) -> list[int]:
        return [self.count(what) for what in ("ranges", "memory", "maps", "bytes")]


@pytest.fixture(params=["fake", "cuda:0"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    library = request.getfixturevalue("fake_cuda") if request.param == "cuda:0" else None
    pool = NativePool(request.param, backup_dir=tmp_path, library=library, wait=0.05)
    made = Device(pool, library)
    yield made
    made.fail(0)
    pool.close()
    gc.collect()


def filled(pool: NativePool, tag: str = "weights", group: str = "") -> NativeArena:
    arena = pool.arena(tag, MIB, group, persistent=4096)
    arena.add("content", MIB // 2)
    arena.add("state", 5000, Survival.STATE)
    arena.add("zero", 1000, Survival.ZERO)
    arena.add("persist", 100, Survival.PERSIST)
    arena.write(0, os.urandom(arena.size))
    return arena


def content_of(arena: NativeArena) -> dict[str, bytes]:
    return {name: arena.read(r.offset, r.nbytes) for name, r in arena.regions.items()}


# -- failures at every call -------------------------------------------------------------------


def every_call(
    device: Device, verb: Callable[[], object], undone: Callable[[MemoryFault], None]
) -> int:
    """Fail the nth driver call of a verb for every n; ``undone`` checks, and makes ready again."""
    nth = 1
    while True:
        before = device.count("*")
        device.fail(nth)
        try:
            verb()
        except MemoryFault as error:
            device.fail(0)
            undone(error)
        else:
            device.fail(0)
            assert device.count("*") - before < nth, f"failure {nth} was passed over"
            return nth - 1
        nth += 1


@pytest.mark.parametrize("retention", [BACKUP, DISCARD])
def test_a_release_that_fails_at_any_call_is_undone(device: Device, retention: Retention) -> None:
    pool = device.pool
    arenas = [filled(pool, group=group) for group in ("a", "b")]
    pool.release(["weights"], BACKUP)
    pool.resume(["weights"])
    for arena in arenas:
        arena.write(arena.regions["zero"].offset, bytes(1000))
    before, awake = [content_of(a) for a in arenas], device.handles()

    def undone(error: MemoryFault) -> None:
        if isinstance(error, ReleaseIncomplete):  # past what can be undone; a retry gives it back
            assert all(a.released for a in arenas)
            pool.release(["weights"], retention)
            assert not any(a.info.residue for a in arenas)
            pool.resume(["weights"])
            for arena, content in zip(arenas, before, strict=True):
                now = content_of(arena)
                assert {n: now[n] for n in ("state", "zero", "persist")} == {
                    n: content[n] for n in ("state", "zero", "persist")
                }
                arena.write(0, content["content"])
        assert not any(a.released for a in arenas)
        assert [content_of(a) for a in arenas] == before
        assert device.handles() == awake
        assert pool.memory().backup() == 0
        pool.check_invariants()

    assert every_call(device, lambda: pool.release(["weights"], retention), undone) >= 10
    assert all(a.released for a in arenas)


def test_a_resume_that_fails_at_any_call_is_undone_and_the_backup_is_intact(device: Device) -> None:
    pool = device.pool
    arenas = [filled(pool, group=group) for group in ("a", "b")]
    before = [content_of(a) for a in arenas]
    asleep = pool.release(["weights"], BACKUP)
    handles = device.handles()

    def undone(error: MemoryFault) -> None:
        assert all(a.released for a in arenas)
        assert device.handles() == handles
        assert pool.memory().arenas == asleep.arenas
        pool.check_invariants()

    assert every_call(device, lambda: pool.resume(["weights"]), undone) >= 10
    for arena, content in zip(arenas, before, strict=True):
        assert content_of(arena) == {**content, "zero": bytes(1000)}


def test_200_cycles_leave_handles_descriptors_and_maps_as_they_were_m9(device: Device) -> None:
    arena = filled(device.pool)
    state = content_of(arena)["state"]
    seen = set()
    for n in range(200):
        device.pool.release(["weights"], BACKUP if n % 2 else DISCARD)
        asleep = (*device.handles(), len(os.listdir("/proc/self/fd")))
        device.pool.resume(["weights"])
        awake = (*device.handles(), len(os.listdir("/proc/self/fd")))
        maps = Path("/proc/self/maps").read_text().count("\n")
        if n >= 2:  # what a pool keeps for its life is there
            seen.add((n % 2, asleep, awake, maps // 4))
    assert len(seen) <= 4
    assert content_of(arena)["state"] == state


@pytest.mark.parametrize("size", [4 * MIB, 64 * MIB])
@pytest.mark.parametrize("driver", ["host", "shared"])
def test_200_cycles_on_the_host_leave_rss_and_maps_flat_m9_m16(
    tmp_path: Path, driver: str, size: int
) -> None:
    pool = NativePool(driver, backup_dir=tmp_path)
    arena = pool.arena("weights", size)
    arena.add("w", 4096, Survival.STATE)
    rss, maps = [], []
    for _ in range(200):
        pool.release(["weights"], DISCARD)
        asleep = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        pool.resume(["weights"])
        rss.append(asleep)
        maps.append(Path("/proc/self/maps").read_text().count("\n"))
    assert max(rss[20:]) - min(rss[20:]) < 2 * MIB
    assert max(maps[20:]) - min(maps[20:]) <= 2
    pool.close()


# -- memory that is short ---------------------------------------------------------------------


def test_a_host_that_is_short_makes_no_arena() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    pool = NativePool("host", backup_dir=None)
    with pytest.raises(MemoryFault, match="bytes of host memory"):
        pool.arena("weights", 2 * total)
    pool.close()


def test_a_device_that_is_full_says_what_it_needs_and_has(tmp_path: Path) -> None:
    pool = NativePool(f"fake:{2 * MIB}", backup_dir=tmp_path)
    arena = pool.arena("weights", 3 * MIB // 2)
    with pytest.raises(MemoryFault, match=f"{MIB} bytes are needed and {MIB // 2} are free"):
        pool.arena("kv_cache", MIB)
    pool.release(["weights"], DISCARD)
    tenant = pool.arena("kv_cache", MIB)
    with pytest.raises(ResumeOutOfMemory) as caught:
        pool.resume(["weights"])
    assert (caught.value.needed, caught.value.free) == (3 * MIB // 2, MIB)
    assert caught.value.retryable
    pool.drop(tenant)
    pool.resume(["weights"])
    assert not arena.released
    pool.close()


def test_a_host_without_room_for_a_backup_releases_nothing(tmp_path: Path) -> None:
    """As where the host's memory is short: csrc/tests/ asks that of the store itself."""
    missing = NativePool("fake", backup_dir=tmp_path / "missing")
    arena = filled(missing)
    with pytest.raises(HostOutOfMemory) as caught:
        missing.release(["weights"], BACKUP)
    assert caught.value.needed > MIB // 2
    assert not arena.released
    assert missing.count("unmap") == 0
    missing.close()


@pytest.mark.parametrize("nbytes", [-1, 1 << 62, 1 << 63, 1 << 64])
def test_sizes_that_cannot_be(nbytes: int) -> None:
    pool = HostPool()
    with pytest.raises(MemoryFault):
        pool.arena("weights", nbytes)
    assert pool.arena("weights", 0).size > 0
    pool.close()


def test_numbers_and_names_that_c_would_take_for_others_are_refused(tmp_path: Path) -> None:
    """ctypes takes integers modulo 2**64, and C ends a name at a NUL."""
    pool = HostPool(tmp_path)
    arena = pool.arena("weights", 4096)
    arena.add("w", 100)
    arena.write(0, b"content")
    for wrong in (-1, 1 << 63, 1 << 64, (1 << 64) + 4096, -(1 << 64)):
        with pytest.raises(MemoryFault, match="no number of bytes"):
            arena.add("x", wrong)
        with pytest.raises(MemoryFault, match="no number of bytes"):
            arena.read(wrong, 1)
        with pytest.raises(MemoryFault, match="no number of bytes"):
            arena.read(0, wrong)
        with pytest.raises(MemoryFault, match="no number of bytes"):
            arena.write(wrong, b"x")
        with pytest.raises(MemoryFault, match="no number of bytes"):
            pool.arena("kv_cache", 1, persistent=wrong)
    with pytest.raises(MemoryFault, match="beyond the end"):
        arena.read(0, 1 << 62)
    for verb in (
        lambda: arena.add("a\0b", 1),
        lambda: pool.arena("a\0b", 1),
        lambda: pool.arena("a", 1, "b\0"),
        lambda: pool.release(["weights\0"], BACKUP),
        lambda: pool.release(["weights"], {"\0": BACKUP}),
        lambda: pool.resume(["weights\0"]),
    ):
        with pytest.raises(MemoryFault, match="NUL"):
            verb()
    assert not arena.released
    assert arena.read(0, 7) == b"content"
    assert list(arena.regions) == ["w"]
    pool.close()


def test_eight_threads_at_once(device: Device) -> None:
    faults: list[BaseException] = []
    device.pool.arena("weights", 1000, "shared").add("w", 10)

    def work(number: int) -> None:
        try:
            for _ in range(10):
                arena = device.pool.arena("weights", 1000, str(number))
                arena.add("w", 500, Survival.STATE)
                device.pool.release(["weights"], BACKUP)
                device.pool.memory()
                device.pool.resume(["weights"])
                device.pool.drop(arena)
        except BaseException as error:  # noqa: BLE001 - told to the test
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    device.pool.check_invariants()
