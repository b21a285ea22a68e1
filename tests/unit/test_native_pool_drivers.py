"""The native pool's drivers, lifetimes and processes, and an install without it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.rollout import native, plain
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import ConfigError, MemoryFault, Unsupported
from hotbunk.rollout.memory import HostPool, NativePool, Survival, host_pool
from hotbunk.rollout.native_pool import Code

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)

MIB = 1 << 20
BACKUP, DISCARD = Retention.BACKUP, Retention.DISCARD


# -- drivers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["shared", "shared:memfd"])
def test_shared_memory_is_seen_by_whoever_has_the_file(tmp_path: Path, driver: str) -> None:
    pool = NativePool(driver, backup_dir=tmp_path)
    arena = pool.arena("weights", MIB, persistent=4096)
    arena.add("content", MIB // 2)
    before = os.urandom(MIB // 2)
    arena.write(0, before)
    assert arena.fd is not None
    code = "import os, sys; sys.stdout.buffer.write(os.pread(int(sys.argv[1]), 524288, 0))"
    asleep = pool.release(["weights"], BACKUP)
    assert asleep.resident() == arena.info.persistent
    pool.resume(["weights"])
    done = subprocess.run(
        [sys.executable, "-c", code, str(arena.fd)],
        check=True,
        pass_fds=[arena.fd],
        stdout=subprocess.PIPE,
    )
    assert done.stdout == before
    pool.check_invariants()
    pool.close()


def test_drivers_that_are_not_here_say_why_and_others_are_no_drivers() -> None:
    for driver in ("cuda:0", "acl:0"):
        with pytest.raises(Unsupported, match="no-such"):
            NativePool(driver, library=Path("/no-such.so"))
    for name in (
        "gpu",
        "",
        "cuda:x",
        "cuda:-1",
        f"cuda:{1 << 32}",
        f"acl:{1 << 31}",
        f"fake:{1 << 64}",
    ):
        with pytest.raises(ConfigError, match="there are host"):
            NativePool(name, library=Path("/no-such.so"))


def test_the_cuda_library_may_be_named_by_the_environment(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    pool = NativePool("cuda:0")
    assert (pool.device, pool.measured_by, pool.kind) == ("cuda:0", "device", "cuda:0")
    pool.close()
    with pytest.raises(Unsupported, match="cuDeviceGet"):
        NativePool("cuda:7")


def test_device_memory_gives_torch_an_array_interface_and_no_view(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = NativePool("cuda:0", library=fake_cuda)
    arena = pool.arena("weights", MIB)
    arena.add("first", 256)
    region, empty = arena.add("w", 4096), arena.add("nothing", 0)
    with pytest.raises(Unsupported, match="read and write"):
        arena.view(region)
    seen: list[dict[str, Any]] = []

    def as_tensor(holder: Any, device: str) -> torch.Tensor:
        assert device == "cuda:0"
        seen.append(holder.__cuda_array_interface__)
        kept.append(holder)
        return torch.zeros(holder.__cuda_array_interface__["shape"], dtype=torch.uint8)

    kept: list[Any] = []
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert tensor_over(pool, arena, region, torch.float32).shape == (1024,)
    tensor_over(pool, arena, empty)
    assert seen[0]["data"] == (arena.address + 256, False)
    assert (seen[0]["shape"], seen[0]["typestr"]) == ((4096,), "|u1")
    assert seen[1]["data"] == (0, False)
    count = ctypes.CDLL(str(fake_cuda)).fake_cuda_count
    pool.drop(arena)
    del arena
    gc.collect()
    assert count(b"ranges") == 1, "a tensor keeps the addresses"
    kept.clear()
    gc.collect()
    assert count(b"ranges") == 0
    pool.close()


def test_tensors_over_fake_memory_survive_a_cycle(tmp_path: Path) -> None:
    pool = NativePool("fake", backup_dir=tmp_path)
    arena = pool.arena("weights", MIB)
    tensor = tensor_over(pool, arena, arena.add("w", 4096), torch.float32)
    assert not tensor.any(), "new memory of a device is no rubbish"
    tensor.copy_(torch.arange(1024.0))
    pool.release(["weights"], BACKUP)
    pool.resume(["weights"])
    assert torch.equal(tensor, torch.arange(1024.0))
    assert tensor_over(pool, arena, arena.add("none", 0)).numel() == 0
    pool.close()


# -- processes --------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.memory import NativePool
pool = NativePool(sys.argv[1], backup_dir=Path(sys.argv[2]))
arena = pool.arena("weights", 64 << 20)
arena.add("w", 1 << 20)
view = arena.view()
view[5] = 7
pool.release(["weights"], Retention.BACKUP)
print("asleep", flush=True)
sys.stdin.readline()
print(view[5], flush=True)
"""


@pytest.mark.parametrize("driver", ["host", "shared", "fake"])
@pytest.mark.parametrize("touch", [True, False])
def test_a_sleeper_that_touches_faults_and_a_killed_one_leaves_nothing(
    tmp_path: Path, driver: str, touch: bool
) -> None:
    shm = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, driver, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asleep\n"
    if not touch:
        process.kill()
    out, _ = process.communicate("\n" if touch else None, timeout=30)
    assert process.returncode == (-signal.SIGSEGV if touch else -signal.SIGKILL)
    assert out == ""
    assert os.listdir(tmp_path) == []
    assert not {n for n in set(os.listdir("/dev/shm")) - shm if "hotbunk" in n}


CYCLING = """
import sys
from pathlib import Path
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.memory import NativePool
pool = NativePool(sys.argv[1], backup_dir=Path(sys.argv[2]))
pool.arena("weights", 64 << 20).add("w", 64 << 20)
while True:
    pool.release(["weights"], Retention.BACKUP)
    pool.resume(["weights"])
    print(end=".", flush=True)
"""


@pytest.mark.parametrize("driver", ["host", "shared", "fake"])
def test_a_process_killed_between_two_instructions_leaves_nothing(
    tmp_path: Path, driver: str
) -> None:
    shm = set(os.listdir("/dev/shm"))
    for cycles in (1, 2, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", CYCLING, driver, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.read(cycles) == b"." * cycles
        process.kill()
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert not {n for n in set(os.listdir("/dev/shm")) - shm if "hotbunk" in n}


# -- lifetimes --------------------------------------------------------------------------------


def test_a_pool_that_is_forgotten_gives_everything_back(tmp_path: Path) -> None:
    pool = NativePool("fake", backup_dir=tmp_path)
    arena = pool.arena("weights", MIB)
    arena.add("state", MIB, Survival.STATE)
    pool.release(["weights"], BACKUP)
    descriptors = len(os.listdir("/proc/self/fd"))
    lib, number = pool.lib, pool.number
    del pool, arena
    gc.collect()
    assert lib.hb_fake_count(number, b"memory") == Code.INVALID, "it is gone"
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_verbs_of_a_closed_pool_are_errors_not_crashes() -> None:
    pool = HostPool()
    arena = pool.arena("weights", 1)
    pool.close()
    pool.close()
    for verb in (
        lambda: pool.arena("kv_cache", 1),
        lambda: pool.release(["weights"], BACKUP),
        lambda: pool.resume(["weights"]),
        lambda: pool.drop(arena),
        lambda: arena.add("w", 1),
        arena.view,
        lambda: arena.released,
    ):
        with pytest.raises(MemoryFault):
            verb()
    assert pool.memory().arenas == ()


# -- without the native library ---------------------------------------------------------------


def test_a_pure_install_allocates_and_refuses_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> native.Native:
        raise native.NativeUnavailable("no library", remedy="reinstall it")

    monkeypatch.setattr(native, "load", missing)
    pool = host_pool()
    assert isinstance(pool, plain.PlainPool)
    assert "reinstall it" in pool.cannot_release
    arena = pool.arena("weights", 1000, "target")
    region = arena.add("w", 1000)
    tensor = tensor_over(pool, arena, region, torch.float32)
    tensor.fill_(3)
    for retention in Retention:
        with pytest.raises(Unsupported, match="reinstall it"):
            pool.release(["weights"], retention)
    assert pool.release(["kv_cache"], DISCARD).freed == 0
    report = pool.resume(["weights"])
    assert (report.resident(), report.measured_by) == (arena.size, "accounting")
    assert tensor.eq(3).all()
    assert not arena.released
    with pytest.raises(MemoryFault, match="already"):
        pool.arena("weights", 1, "target")
    with pytest.raises(MemoryFault, match="already"):
        arena.add("w", 1)
    with pytest.raises(MemoryFault, match="left"):
        arena.add("x", arena.size)
    pool.check_invariants()
    pool.drop(arena)
    assert pool.audit().arenas == ()
    assert tensor.eq(3).all(), "a view outlives its arena"
    pool.close()


def test_the_reference_engine_of_a_pure_install_declares_what_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hotbunk.rollout.backends.reference.engine import ReferenceEngine
    from hotbunk.rollout.backends.reference.options import ReferenceOptions

    options = ReferenceOptions(model="unread")
    whole = ReferenceEngine(options).capabilities
    assert whole.release
    assert whole.retentions == frozenset(Retention)

    def missing() -> native.Native:
        raise native.NativeUnavailable("no library", remedy="reinstall it")

    monkeypatch.setattr(native, "load", missing)
    pure = ReferenceEngine(options).capabilities
    assert not pure.release
    assert not pure.release_kv_cache
    assert "reinstall it" in pure.release.how
    assert pure.retentions == {Retention.RESIDENT}
    assert pure.memory_measured_by == "accounting"
