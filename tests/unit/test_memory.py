"""The host pool: what is released is gone, what must survive does, and failures change nothing."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbunk.rollout import native
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import (
    MemoryFault,
    ReleaseIncomplete,
    SessionError,
)
from hotbunk.rollout.memory import ALIGN, PAGE, HostPool, NativeArena, NativePool, Survival

if not native.available():
    pytest.skip("installed without the native library", allow_module_level=True)

MIB = 1 << 20
BACKUP, DISCARD, RESIDENT = Retention.BACKUP, Retention.DISCARD, Retention.RESIDENT


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    made = HostPool(tmp_path)
    yield made
    made.close()


def filled(pool: HostPool, tag: str, group: str = "", *, size: int = 4 * MIB) -> NativeArena:
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


def counts(pool: HostPool) -> dict[tuple[str, str], int]:
    return {(a.tag, a.group): a.resident for a in pool.memory().arenas}


# -- what a release and a resume do -----------------------------------------------------------


def test_resident_drops_to_zero_for_the_tag_alone_by_both_counts(pool: HostPool) -> None:
    filled(pool, "weights", "target")
    filled(pool, "weights", "draft")
    filled(pool, "kv_cache")
    before = pool.memory()
    assert before.resident("weights") == 8 * MIB
    report = pool.release(["weights"], BACKUP)
    for counted in (report, pool.memory(), pool.audit()):
        assert counted.resident("weights") == 0
        assert counted.resident("kv_cache") == before.resident("kv_cache")
    assert report.freed == before.resident("weights")
    pool.check_invariants()


def test_backup_restores_bit_for_bit_at_the_same_address(pool: HostPool) -> None:
    arena = filled(pool, "weights")
    before, address, view = content_of(arena), arena.address, arena.view()
    assert pool.release(["weights"], BACKUP).backup() == arena.used
    report = pool.resume(["weights"])
    assert report.mapped == report.resident("weights")
    assert report.mapped > 0
    assert arena.address == address
    assert content_of(arena) == before
    assert bytes(view[: arena.used]) == bytes(arena.view()[: arena.used]), "old views still work"
    view[0] ^= 1
    assert arena.view()[0] == view[0]


def test_discard_keeps_state_and_nothing_else_m17(pool: HostPool) -> None:
    arena = filled(pool, "weights")
    before = content_of(arena)
    report = pool.release(["weights"], DISCARD)
    state = len(before["state"]) + len(before["more state"])
    assert report.backup() == state, "no host memory for content that will be overwritten"
    pool.resume(["weights"])
    after = content_of(arena)
    assert after["state"] == before["state"]
    assert after["more state"] == before["more state"]
    assert not any(after["content"])
    assert not any(after["more content"])


def test_discard_after_backup_drops_the_content_and_keeps_the_state(pool: HostPool) -> None:
    arena = filled(pool, "weights")
    before = content_of(arena)
    pool.release(["weights"], BACKUP)
    report = pool.release(["weights"], DISCARD)
    assert report.backup() == len(before["state"]) + len(before["more state"])
    assert pool.release(["weights"], BACKUP).backup() == report.backup(), "it cannot come back"
    pool.check_invariants()
    pool.resume(["weights"])
    after = content_of(arena)
    assert (after["state"], after["more state"]) == (before["state"], before["more state"])
    assert not any(after["content"])


def test_large_state_far_behind_moves_forward_intact(pool: HostPool) -> None:
    arena = pool.arena("weights", 12 * MIB)
    arena.add("content", 1234)
    state = arena.add("state", 5 * MIB + 3, Survival.STATE)  # overlaps itself on its way
    arena.add("content2", 4 * MIB)
    last = arena.add("last", 99, Survival.STATE)
    arena.view()[: arena.used] = os.urandom(arena.used)
    before = content_of(arena)
    pool.release(["weights"], BACKUP)
    pool.release(["weights"], DISCARD)
    pool.resume(["weights"])
    assert bytes(arena.view(state)) == before["state"]
    assert bytes(arena.view(last)) == before["last"]


def test_resident_retention_changes_nothing(pool: HostPool) -> None:
    arena = filled(pool, "weights")
    before, count = content_of(arena), counts(pool)
    report = pool.release(["weights"], RESIDENT)
    assert (report.freed, report.backup(), counts(pool)) == (0, 0, count)
    assert content_of(arena) == before


def test_retention_may_differ_per_group_and_others_are_discarded(pool: HostPool) -> None:
    groups = {name: filled(pool, "weights", name) for name in ("target", "draft", "encoder")}
    before = {name: content_of(arena) for name, arena in groups.items()}
    pool.release(["weights"], {"draft": BACKUP, "encoder": RESIDENT})
    assert {k[1]: v > 0 for k, v in counts(pool).items()} == {
        "target": False,
        "draft": False,
        "encoder": True,
    }
    pool.resume(["weights"])
    assert content_of(groups["draft"]) == before["draft"]
    assert content_of(groups["encoder"]) == before["encoder"]
    assert not any(content_of(groups["target"])["content"])


def test_releasing_and_resuming_twice_is_a_no_op_m9(pool: HostPool) -> None:
    arena = filled(pool, "weights")
    before = content_of(arena)
    first = pool.release(["weights"], BACKUP)
    second = pool.release(["weights"], BACKUP)
    assert second.arenas == first.arenas
    assert second.freed == 0
    pool.resume(["weights"])
    again = pool.resume(["weights"])
    assert (again.mapped, content_of(arena)) == (0, before)
    nothing = pool.release([], DISCARD)
    assert (nothing.freed, content_of(arena)) == (0, before)
    pool.release(["kv_cache"], DISCARD)  # a tag without arenas
    assert content_of(arena) == before


def test_tags_are_honoured_one_by_one_m3(pool: HostPool) -> None:
    for tag in ("weights", "kv_cache"):
        filled(pool, tag)
    pool.release(["kv_cache", "weights"], BACKUP)
    pool.resume(["weights"])
    assert counts(pool)["weights", ""] > 0
    assert counts(pool)["kv_cache", ""] == 0
    with pytest.raises(SessionError):
        pool.release("weights", BACKUP)


@pytest.mark.parametrize("retention", [BACKUP, DISCARD])
def test_200_cycles_leave_memory_and_descriptors_as_they_were_m9_m16(
    pool: HostPool, retention: Retention
) -> None:
    arena = filled(pool, "weights")
    state = content_of(arena)["state"]
    asleep, descriptors, rss = set(), set(), []
    for _ in range(200):
        asleep.add(pool.release(["weights"], retention).arenas)
        awake = pool.resume(["weights"])
        assert awake.backup() == 0, "host and device do not both hold it"
        descriptors.add(len(os.listdir("/proc/self/fd")))
        statm = Path("/proc/self/statm").read_text().split()
        rss.append(int(statm[1]) * PAGE)
    assert len(asleep) == 1
    assert len(descriptors) == 1
    assert max(rss[20:]) - min(rss[20:]) < 2 * MIB
    assert content_of(arena)["state"] == state
    pool.check_invariants()


def test_pages_that_were_only_read_cost_nothing_and_break_no_invariant(pool: HostPool) -> None:
    arena = pool.arena("kv_cache", MIB)
    pool.release(["kv_cache"], DISCARD)
    pool.resume(["kv_cache"])
    assert not any(bytes(arena.view()))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(arena.address), arena.size, mmap.MADV_DONTNEED)
    assert not any(bytes(arena.view()))  # maps the kernel's page of zeros
    assert pool.audit().resident() == 0
    pool.check_invariants()


# -- arenas -----------------------------------------------------------------------------------


def test_regions_are_aligned_disjoint_and_bounded(pool: HostPool) -> None:
    arena = pool.arena("weights", 3 * PAGE)
    sizes = {"a": 1, "b": 0, "c": ALIGN, "d": PAGE}
    regions = [arena.add(name, size) for name, size in sizes.items()]
    assert all(r.offset % ALIGN == 0 for r in regions)
    ends = [r.offset + r.nbytes for r in regions]
    assert all(end <= r.offset for end, r in zip(ends, regions[1:], strict=False))
    with pytest.raises(MemoryFault, match="already"):
        arena.add("a", 1)
    with pytest.raises(MemoryFault, match="left"):
        arena.add("e", 2 * PAGE)
    assert "e" not in arena.regions
    with pytest.raises(MemoryFault, match="already"):
        pool.arena("weights", 1)


def test_a_view_outlives_its_arena_without_a_fault(pool: HostPool) -> None:
    """A thread of a cancelled sync may still write into a bucket that was given back."""
    for released in (False, True):
        arena = filled(pool, "bucket")
        view = arena.view()
        if released:
            pool.release(["bucket"], BACKUP)
            pool.resume(["bucket"])
        pool.drop(arena)
        assert pool.memory().arenas == ()
        view[:] = b"\1" * len(view)
        assert view[-1] == 1
        with pytest.raises(MemoryFault, match="given back"):
            arena.view()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def test_addresses_and_pages_of_dropped_arenas_come_back(pool: HostPool) -> None:
    def cycle() -> None:
        for _ in range(50):
            pool.drop(filled(pool, "bucket", size=8 * MIB))

    cycle()
    gc.collect()
    before = mappings()
    cycle()
    gc.collect()
    assert mappings() - before < 10


def test_counting_goes_on_while_arenas_come_and_go(pool: HostPool) -> None:
    filled(pool, "weights")
    stop, faults = threading.Event(), list[BaseException]()

    def count() -> None:
        try:
            while not stop.is_set():
                assert pool.memory().resident("weights") == 4 * MIB
        except BaseException as error:  # noqa: BLE001 - told to the test
            faults.append(error)

    counter = threading.Thread(target=count)
    counter.start()
    for n in range(300):
        pool.drop(pool.arena("bucket", 64 * PAGE, str(n)))
    stop.set()
    counter.join()
    assert not faults


def test_a_release_names_who_still_holds_memory_m10(pool: HostPool) -> None:
    """An engine with memory that no tag owns: it is named, and strict callers get an error."""
    filled(pool, "weights", "target", size=8 * MIB)
    filled(pool, "kv_cache")
    before = pool.release(["nothing"], DISCARD).outside
    untagged = mmap.mmap(-1, 64 * MIB)
    untagged[:] = b"\1" * len(untagged)
    report = pool.release(["weights"], DISCARD)
    held = report.residual()
    assert list(held) == ["outside", "kv_cache"], "most first"
    assert held["kv_cache"] == 4 * MIB
    assert 60 * MIB < held["outside"] - before < 70 * MIB
    assert "kv_cache" not in report.residual(["weights"])
    report.require_residual(held["outside"] + 4 * MIB)
    with pytest.raises(ReleaseIncomplete, match=f"outside {held['outside']}, kv_cache {4 * MIB}"):
        report.require_residual(64 * MIB)
    untagged.close()
    assert pool.release(["kv_cache"], DISCARD).residual().keys() == {"outside"}


def test_persistent_memory_is_residual_by_its_owner_m10(tmp_path: Path) -> None:
    pool = NativePool(f"fake:{16 * MIB}", backup_dir=tmp_path)
    pool.arena("weights", 2 * MIB, "target", persistent=MIB)
    report = pool.release(["weights"], DISCARD)
    assert report.residual() == {"weights/target": MIB}
    assert report.freed == 2 * MIB
    tenant = NativePool(f"fake:{16 * MIB}", backup_dir=tmp_path)
    assert tenant.release(["weights"], DISCARD).residual() == {}
    tenant.close()
    pool.resume(["weights"])
    pool.lie(3 * MIB, after=0, looks=1 << 20)  # somebody else takes some
    report = pool.release(["weights"], DISCARD)
    assert report.residual() == {"outside": 3 * MIB, "weights/target": MIB}
    pool.resume(["weights"])
    pool.close()


def test_a_release_that_is_done_does_not_fail_over_its_report_m10(tmp_path: Path) -> None:
    pool = NativePool("fake", backup_dir=tmp_path, after_release=lambda: pool.fail("info", 1))
    pool.arena("weights", MIB)
    report = pool.release(["weights"], DISCARD)
    assert (report.freed, report.outside) == (MIB, 0)
    pool.close()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_a_backup_in_memory_is_one_copy_and_goes_with_the_resume_m16() -> None:
    """Asleep, host memory holds one copy; awake, none beside the arena; a discard shrinks it."""
    pool = NativePool("host", backup_dir=None)
    arena = pool.arena("weights", 64 * MIB)
    arena.add("content", 48 * MIB)
    arena.add("state", 8 * MIB, Survival.STATE)
    arena.view()[: arena.used] = os.urandom(MIB) * 56
    before, awake = bytes(arena.view()), rss()
    for _ in range(5):
        assert pool.release(["weights"], BACKUP).backup() == 56 * MIB
        asleep = rss()
        assert abs(awake - 64 * MIB + 56 * MIB - asleep) < 4 * MIB
        pool.resume(["weights"])
        assert abs(rss() - awake) < 4 * MIB
        assert arena.view() == before
    pool.release(["weights"], BACKUP)
    assert pool.release(["weights"], DISCARD).backup() == 8 * MIB
    assert asleep - rss() > 44 * MIB, "content that was forgotten is still held"
    pool.resume(["weights"])
    state = arena.regions["state"]
    assert bytes(arena.view(state)) == before[state.offset : state.offset + state.nbytes]
    assert not any(arena.view()[: 48 * MIB])
    pool.close()
