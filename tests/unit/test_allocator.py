"""Torch's allocator beside a pool: expandable segments found and turned off, the cache emptied."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotbunk.rollout import allocator, native
from hotbunk.rollout.allocator import EXPANDABLE, VARIABLES, ExpandableSegments, is_on, preflight
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import MemoryFault, ReleaseIncomplete
from hotbunk.rollout.memory import NativePool
from hotbunk.rollout.native_pool import Code

MIB = 1 << 20
ON = (
    "expandable_segments:True",
    "expandable_segments:true",
    " expandable_segments : True ",
    "max_split_size_mb:128, expandable_segments:TRUE",
    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]",
    "expandable_segments:False,expandable_segments:True",
)
OFF = (
    "",
    "expandable_segments:False",
    "max_split_size_mb:128",
    "expandable_segments:True,expandable_segments:False",
    "not_expandable_segments:True",
    "expandable_segments",
)


@pytest.mark.parametrize("variable", VARIABLES)
def test_preflight_finds_the_setting_in_any_variable_and_spelling_m14(variable: str) -> None:
    for settings in ON:
        assert preflight({variable: settings}) == variable, settings
    for settings in OFF:
        assert preflight({variable: settings}) == "", settings
    assert preflight({}) == ""


class Fake:
    """An allocator's settings, and everything they were."""

    def __init__(self, settings: str) -> None:
        self.seen = [settings]
        self.expandable = ExpandableSegments(lambda: self.seen[-1], self.seen.append)


@pytest.mark.parametrize("settings", ON)
def test_a_scope_turns_it_off_and_restores_what_was_set_m14(settings: str) -> None:
    fake = Fake(settings)
    for _ in range(2):
        with fake.expandable.off():
            assert not is_on(fake.seen[-1])
            with fake.expandable.off():
                assert not is_on(fake.seen[-1])
            assert not is_on(fake.seen[-1]), "an inner scope does not end the outer one"
        assert is_on(fake.seen[-1])
    others = [s.strip() for s in settings.split(",") if "expandable" not in s and "512" not in s]
    assert all(o in s for o in others for s in fake.seen), "other settings stay"


def test_a_scope_restores_under_exceptions_and_leaves_off_what_was_off_m14() -> None:
    fake = Fake("expandable_segments:True")
    with pytest.raises(MemoryFault), fake.expandable.off(), fake.expandable.off():
        raise MemoryFault("in the middle")
    assert is_on(fake.seen[-1])
    off = Fake("max_split_size_mb:64")
    with off.expandable.off():
        pass
    assert off.seen == ["max_split_size_mb:64"], "it was never touched"


def test_scopes_of_two_threads_overlap_m14() -> None:
    fake = Fake("expandable_segments:True")
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with fake.expandable.off():
            inside.set()
            assert leave.wait(20)

    thread = threading.Thread(target=other)
    with fake.expandable.off():
        thread.start()
        assert inside.wait(20)
    assert not is_on(fake.seen[-1]), "the other one is still inside"
    leave.set()
    thread.join()
    assert is_on(fake.seen[-1])


def test_torch_itself_is_told_m14() -> None:
    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if put is None:
        pytest.skip("a torch that has no setter for every build")
    get = torch._C._accelerator_getAllocatorSettings
    put("expandable_segments:True")
    try:
        with EXPANDABLE.off():
            assert not is_on(get())
        assert is_on(get())
    finally:
        put("expandable_segments:False")


needs_native = pytest.mark.skipif(
    not native.available(), reason="installed without the native library"
)


@needs_native
def test_the_cache_is_emptied_once_after_each_release_that_gave_memory_back_m11(
    tmp_path: Path,
) -> None:
    calls: list[int] = []
    pool = NativePool(
        "fake", backup_dir=tmp_path, wait=0.05, after_release=lambda: calls.append(pool.count("*"))
    )
    for group in ("a", "b"):
        pool.arena("weights", MIB, group).add("w", 1000)
    for n in range(1, 4):
        pool.release(["weights"], Retention.BACKUP)
        assert len(calls) == n
        assert pool.count("*") == calls[-1] + 1, "afterwards only what is free is asked for"
        pool.release(["weights"], Retention.BACKUP)
        pool.release(["kv_cache"], Retention.DISCARD)
        assert len(calls) == n, "nothing was given back"
        pool.resume(["weights"])
    pool.fail("unmap", 1)
    with pytest.raises(MemoryFault):
        pool.release(["weights"], Retention.DISCARD)
    assert len(calls) == 3, "it was undone"
    pool.fail("destroy", 1, Code.DRIVER)
    with pytest.raises(ReleaseIncomplete):
        pool.release(["weights"], Retention.DISCARD)
    assert len(calls) == 4, "released, if not all of it"
    pool.close()


@pytest.mark.parametrize("device", ["cuda:1", "npu:0"])
def test_which_cache_a_device_has_m11(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an NPU is, torch_npu puts ``torch.npu`` beside ``torch.cuda``."""
    emptied: list[str] = []
    for kind in ("cuda", "npu"):
        its = SimpleNamespace(empty_cache=partial(emptied.append, kind))
        monkeypatch.setattr(torch, kind, its, raising=False)
    assert allocator.empty_cache("cpu") is None
    hook = allocator.empty_cache(device)
    assert hook is not None
    hook()
    assert emptied == [device.split(":", maxsplit=1)[0]]


@needs_native
def test_an_engine_on_a_gpu_has_torchs_cache_emptied_m11(
    fake_cuda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotbunk.rollout.device_pool import device_pool

    emptied: list[str] = []
    monkeypatch.setenv("HOTBUNK_CUDA_LIBRARY", str(fake_cuda))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    pool = device_pool("cuda")
    assert (pool.device, device_pool("cpu").device) == ("cuda:0", "cpu")
    pool.arena("weights", MIB)
    pool.release(["weights"], Retention.DISCARD)
    assert emptied == ["cuda"]
    pool.close()
