"""The host pool when something fails: nothing was released, or nothing was mapped; no file stays."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbunk.rollout import native
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import (
    HostOutOfMemory,
    MemoryFault,
    ReleaseIncomplete,
    ResumeOutOfMemory,
)
from hotbunk.rollout.memory import PAGE, HostPool, NativeArena, NativePool, Survival
from hotbunk.rollout.native_pool import Code

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)

MIB = 1 << 20
CAPACITY = 64 * MIB  # of the fake device
BACKUP, DISCARD = Retention.BACKUP, Retention.DISCARD


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    made = HostPool(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[NativePool]:
    made = NativePool(f"fake:{CAPACITY}", backup_dir=tmp_path, wait=0.05)
    yield made
    made.close()


def filled(pool: NativePool, tag: str, group: str = "", *, size: int = 4 * MIB) -> NativeArena:
    """An arena with 2 MiB of content and two small regions of state, all of it random."""
    arena = pool.arena(tag, size, group)
    arena.add("content", 2 * MIB)
    arena.add("state", 1000, Survival.STATE)
    arena.add("more content", 777)
    arena.add("more state", 3 * PAGE + 1, Survival.STATE)
    arena.view()[: arena.used] = os.urandom(arena.used)
    return arena


def content_of(arena: NativeArena) -> dict[str, bytes]:
    return {name: bytes(arena.view(region)) for name, region in arena.regions.items()}


def unchanged(pool: NativePool, arenas: dict[NativeArena, dict[str, bytes]]) -> None:
    for arena, before in arenas.items():
        assert not arena.released
        assert content_of(arena) == before
    assert pool.memory().backup() == 0
    pool.check_invariants()


def test_a_backup_that_does_not_fit_releases_nothing(pool: HostPool, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the full disk; the first arena's backup fits, the second's not."""
    arenas = {a: content_of(a) for a in (filled(pool, "weights", g) for g in ("small", "target"))}
    small = filled(pool, "kv_cache", size=4 * MIB)
    descriptors = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(HostOutOfMemory) as caught:
            pool.release(["weights", "kv_cache"], {"target": BACKUP})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.needed > 2 * MIB
    unchanged(pool, {**arenas, small: content_of(small)})
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert os.listdir(tmp_path) == []
    pool.release(["weights", "kv_cache"], BACKUP)


@pytest.mark.parametrize("where", ["missing", "a file"])
def test_a_backup_directory_that_cannot_be_written_releases_nothing(
    tmp_path: Path, where: str
) -> None:
    directory = tmp_path / where
    if where == "a file":
        directory.write_text("")
    pool = HostPool(directory)
    arena = filled(pool, "weights")
    before = content_of(arena)
    for retention in (BACKUP, DISCARD):
        with pytest.raises(HostOutOfMemory, match=str(directory)):
            pool.release(["weights"], retention)
        unchanged(pool, {arena: before})
    stateless = pool.arena("kv_cache", MIB)
    assert pool.release(["kv_cache"], DISCARD).resident("kv_cache") == 0  # needs no room
    assert stateless.released
    pool.close()


def test_a_disk_that_filled_up_after_the_reservation_releases_nothing(fake: NativePool) -> None:
    arenas = {a: content_of(a) for a in (filled(fake, "weights", g) for g in ("a", "b"))}
    fake.fail("store_write", 2, Code.HOST_NOMEM)
    with pytest.raises(HostOutOfMemory):
        fake.release(["weights"], BACKUP)
    unchanged(fake, arenas)
    assert fake.count("stores") == 0


def test_locked_pages_are_given_back_or_nothing_is(pool: HostPool) -> None:
    """What the kernel makes of moving locked pages differs; half a release never comes of it."""
    arena = filled(pool, "weights")
    before = content_of(arena)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(arena.address), PAGE):
        pytest.skip(f"this machine locks no memory: {os.strerror(ctypes.get_errno())}")
    try:
        assert pool.release(["weights"], BACKUP).resident() == 0
    except MemoryFault:
        unchanged(pool, {arena: before})
        libc.munlock(ctypes.c_void_p(arena.address), PAGE)
        pool.release(["weights"], BACKUP)
    pool.resume(["weights"])
    unchanged(pool, {arena: before})


def test_memory_that_the_device_goes_on_counting_is_an_error_and_it_is_released_m10_m12(
    fake: NativePool,
) -> None:
    arena = filled(fake, "weights")
    fake.lie(1 << 40, after=1, looks=1 << 20)
    with pytest.raises(ReleaseIncomplete) as caught:
        fake.release(["weights"], DISCARD)
    assert (caught.value.expected, caught.value.measured) == (arena.size, 0)
    assert arena.released


def test_a_release_returns_when_the_device_has_the_memory_back_m7(tmp_path: Path) -> None:
    slow = NativePool("fake", backup_dir=tmp_path, wait=10)
    arena = filled(slow, "weights")
    slow.lie(1 << 40, after=1, looks=3)
    assert slow.release(["weights"], DISCARD).freed == arena.size
    assert slow.count("info") > 4
    slow.close()


@pytest.mark.parametrize("call", [1, 2])
def test_a_restore_that_fails_leaves_everything_released_and_may_be_tried_again(
    fake: NativePool, call: int
) -> None:
    first, second = filled(fake, "weights", "a"), filled(fake, "weights", "b")
    before = [content_of(first), content_of(second)]
    asleep = fake.release(["weights"], BACKUP)
    fake.fail("store_read", call, Code.BACKUP)
    with pytest.raises(MemoryFault, match="store_read") as caught:
        fake.resume(["weights"])
    assert not isinstance(caught.value, ResumeOutOfMemory), "more memory would not help"
    assert fake.memory().arenas == asleep.arenas
    fake.check_invariants()
    fake.resume(["weights"])
    assert [content_of(first), content_of(second)] == before


def test_memory_that_is_not_there_leaves_everything_released_m6(fake: NativePool) -> None:
    """The second of two arenas does not fit: the first is given back, and the error says both."""
    first, second = filled(fake, "weights", "a"), filled(fake, "weights", "b")
    before = [content_of(first), content_of(second)]
    asleep = fake.release(["weights"], BACKUP)
    fake.fail("create", 2, Code.NOMEM)
    with pytest.raises(ResumeOutOfMemory) as caught:
        fake.resume(["weights"])
    assert (caught.value.tag, caught.value.needed) == ("weights", first.size + second.size)
    assert caught.value.free == CAPACITY
    assert fake.memory().arenas == asleep.arenas
    fake.check_invariants()
    fake.resume(["weights"])
    assert [content_of(first), content_of(second)] == before


# -- in a child process -----------------------------------------------------------------------

CHILD = """
import os, sys
from pathlib import Path
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.memory import HostPool
pool = HostPool(Path(sys.argv[1]))
arena = pool.arena("weights", 1 << 20)
arena.add("w", 1 << 20)
view = arena.view()
view[5] = 7
pool.release(["weights"], Retention.BACKUP)
print("asleep", flush=True)
if sys.argv[2] == "touch":
    print(view[5], flush=True)
else:
    sys.stdin.read()
"""


def child(directory: Path, what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asleep\n"
    return process


def test_touching_released_memory_is_a_fault_not_zeros(tmp_path: Path) -> None:
    process = child(tmp_path, "touch")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGSEGV
    assert out == ""


def test_a_killed_sleeper_leaves_no_file_m16(tmp_path: Path) -> None:
    process = child(tmp_path, "wait")
    assert os.listdir(tmp_path) == []
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
