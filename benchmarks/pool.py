"""Releasing and resuming a pool's memory, against what one does without a pool.

All in one process and one run, on the same random bytes. Backups lie in memory of the host, and in
files of a tmpfs in the rows ``_file``. Peers: for a release and a bare resume, ``munmap`` and
``mmap`` with the page faults of the first touch (an allocator without a pool); for a resume that
restores, reading the same bytes from a safetensors file in the page cache into fresh memory, in
this process or in a fresh one. Limits: the kernel taking back huge pages (``munmap``), one pass of
page faults over huge pages, and one plain copy into fresh huge pages.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

from hotbunk.benchmarks.rows import Row
from hotbunk.rollout import native
from hotbunk.rollout.binding import tensor_over
from hotbunk.rollout.contract import Retention
from hotbunk.rollout.errors import Unsupported
from hotbunk.rollout.memory import NativeArena, NativePool, Survival

GIB = 1 << 30
NBYTES = GIB
SMALL = 64 << 20  # of the cycles that must not grow
CYCLES, REPEATS = 200, 5
_PROT_RW, _PRIVATE_ANONYMOUS, _NORESERVE = 3, 0x22, 0x4000
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE = 14, 15, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


class _Plain:
    """A mapping of one's own, in huge pages or ordinary ones."""

    def __init__(self, nbytes: int, *, huge: bool) -> None:
        self.nbytes, self.huge = nbytes, huge
        self.address = 0

    def map_and_populate(self) -> None:
        self.map()
        self.populate()

    def map(self) -> None:
        span = self.nbytes + (2 << 20)
        self._base = _libc.mmap(None, span, _PROT_RW, _PRIVATE_ANONYMOUS | _NORESERVE, -1, 0)
        self.address = -(-self._base // (2 << 20)) * (2 << 20)
        advice = _MADV_HUGEPAGE if self.huge else _MADV_NOHUGEPAGE
        _libc.madvise(self._base, span, advice)

    def populate(self) -> None:
        if _libc.madvise(self.address, self.nbytes, _MADV_POPULATE):
            ctypes.memset(self.address, 0, self.nbytes)

    def unmap(self) -> None:
        _libc.munmap(self._base, self.nbytes + (2 << 20))


def _arena(pool: NativePool, nbytes: int) -> NativeArena:
    arena = pool.arena("weights", nbytes)
    region = arena.add("w", nbytes, Survival.CONTENT)
    tensor_over(pool, arena, region, torch.int64).random_()
    return arena


def _times(
    pool: NativePool, nbytes: int, folder: Path, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds per GiB of everything, in turns, so that a busy moment hits all of them."""
    names = ("release", "resume", "backup", "restore")
    plain = ("munmap_4k", "touch_4k", "munmap_huge", "touch_huge", "copy", "reload")
    took: dict[str, list[float]] = {name: [] for name in (*names, *plain)}
    arena = _arena(pool, nbytes)
    source = torch.empty(nbytes // 8, dtype=torch.int64).random_()
    _save(source, folder / "model.safetensors")

    def keep(name: str, work: Callable[[], object]) -> None:
        took[name].append(_timed(work) * GIB / nbytes)

    for repeat in range(REPEATS):
        tell(f"{pool.kind}, {repeat + 1} of {REPEATS}")
        keep("backup", lambda: pool.release(["weights"], Retention.BACKUP))
        keep("restore", lambda: pool.resume(["weights"]))
        _plain(nbytes, source, keep)
        keep("release", lambda: pool.release(["weights"], Retention.DISCARD))
        keep("resume", lambda: pool.resume(["weights"]))
        keep("reload", lambda: _reload(folder / "model.safetensors"))
        tensor_over(pool, arena, arena.regions["w"], torch.int64).random_()
    return took


def _plain(nbytes: int, source: torch.Tensor, keep: Callable[..., None]) -> None:
    """What one does without a pool, and the limits."""
    for huge, kind in ((False, "4k"), (True, "huge")):
        mapping = _Plain(nbytes, huge=huge)
        keep(f"touch_{kind}", mapping.map_and_populate)
        keep(f"munmap_{kind}", mapping.unmap)
    mapping = _Plain(nbytes, huge=True)
    mapping.map()
    keep("copy", lambda: ctypes.memmove(mapping.address, source.data_ptr(), nbytes))
    mapping.unmap()


def _save(source: torch.Tensor, path: Path) -> None:
    """As many tensors as a small model has."""
    save_file({f"layer.{n}": part.clone() for n, part in enumerate(source.chunk(256))}, path)


def _reload(path: Path) -> None:
    loaded = load_file(path)
    kept = [torch.empty_like(tensor).copy_(tensor) for tensor in loaded.values()]
    assert len(kept) == 256


def _reload_afresh(path: Path) -> None:
    """What starting the engine anew costs at least."""
    code = "import sys; from safetensors.torch import load_file; load_file(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def _growth(pool: NativePool) -> list[float]:
    """Bytes by which this process, asleep, grew over 200 cycles; warm after a tenth of them.

    A cycle with a backup is compared with another of its kind: the backup is in this memory.
    """
    rss = []
    for n in range(CYCLES):
        pool.release(["weights"], Retention.BACKUP if n % 2 else Retention.DISCARD)
        rss.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        pool.resume(["weights"])
    warm = CYCLES // 10
    return [float(max(0, rss[-1] - rss[warm + 1], rss[-2] - rss[warm]))]


def _row(name: str, ours: list[float], peer: list[float], limit: list[float], who: str) -> Row:
    """Times: less is better, so the ratios are the other way round than those of rates."""
    mine, other, least = median(ours), median(peer), median(limit)
    spread = [min(ours), max(ours), min(peer), max(peer)]
    return Row(
        name, mine, other, least, "ms/GiB", other / mine, least / mine, len(ours), spread, who
    )


def _rows(t: dict[str, list[float]], suffix: str) -> list[Row]:
    """Of one kind of memory, or of one kind of backup."""
    backup = t["backup"]
    spread = [min(backup), max(backup)]
    kept = Row(
        f"pool_backup{suffix}",
        median(backup),
        None,
        None,
        "ms/GiB",
        None,
        None,
        len(backup),
        spread,
    )
    reload = "safetensors from the page cache into fresh tensors"
    rows = [_row(f"pool_restore{suffix}", t["restore"], t["reload"], t["copy"], reload), kept]
    if suffix == "_file":  # nothing else is different
        return rows
    first = "mmap and first touch of ordinary pages"
    return [
        _row(
            f"pool_release{suffix}",
            t["release"],
            t["munmap_4k"],
            t["munmap_huge"],
            "munmap of ordinary pages",
        ),
        _row(f"pool_resume{suffix}", t["resume"], t["touch_4k"], t["touch_huge"], first),
        *rows,
    ]


def run(tell: Callable[[str], None]) -> tuple[list[Row], str]:
    """The rows, and the settings they were measured with. ``tell`` hears what comes next.

    :raises Unsupported: there is no native library.
    """
    if not native.available():
        raise Unsupported("releasing memory", "this install", "reinstall without HOTBUNK_PURE")
    rows: list[Row] = []
    kinds = []
    # Files in memory: a disk would go on writing for seconds, and disturb whatever is measured next.
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hotbunk-bench-", dir=where) as temporary:
        folder = Path(temporary)
        for driver, suffix in (("host", ""), ("host", "_file"), ("shared", "_shared")):
            pool = NativePool(driver, backup_dir=folder if suffix == "_file" else None)
            kinds.append(pool.kind)
            t = _times(pool, NBYTES, folder, tell)
            rows += _rows(t, suffix)
            pool.close()
            if not suffix:
                tell("a fresh process")
                fresh = [
                    _timed(lambda: _reload_afresh(folder / "model.safetensors")) * GIB / NBYTES
                    for _ in range(REPEATS)
                ]
                who = "a fresh process that imports torch and reads the safetensors"
                rows.append(_row("pool_restore_process", t["restore"], fresh, t["copy"], who))
        tell(f"{CYCLES} cycles")
        pool = NativePool("host")
        _arena(pool, SMALL)
        grown = _growth(pool)
        pool.close()
    rows.append(Row("pool_growth", grown[0], None, None, "bytes", None, None, CYCLES, grown * 2))
    threads = min(len(os.sched_getaffinity(0)), 8)
    settings = (
        f"{NBYTES / GIB:g} GiB, {' and '.join(dict.fromkeys(kinds))} memory, `_file` backups in "
        f"{where or 'the temporary folder'}, up to {threads} "
        f"threads of ours and {torch.get_num_threads()} of torch; limits: munmap, page faults and "
        "one plain copy into fresh memory, each over huge pages, by one thread"
    )
    return rows, settings
