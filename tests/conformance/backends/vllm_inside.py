"""The suite's own part in vLLM's workers: tickets that say everything, and a word that breaks a verb.

Nothing of vLLM is imported here but where vLLM itself imports it. Where the adapter is in a process of its
own, ``setup`` makes a backend known there that has this part, and tells a folder where everything lies.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.rollout.contract import Engine
from hotbunk.rollout.registry import BACKENDS
from hotbunk.rollout.registry import register as register_backend

EXTENSION = f"{__name__}.SuitesExtension"
NAME, FOLDER = "vllm_seen", "HOTBUNK_SUITE_FOLDER"
POINTS = ("release", "resume", "post_load", "verify")
RECEIVER = ("accept", "bucket")  # of a transfer that is open in the adapter
IN_ADAPTER = {"commit": "forget_old_versions", "label": "label"}
_FILE, _PLACES = "sabotage", "places"


def ask(folder: Path, point: str, how: str = "fail") -> None:
    """Have a worker raise once, the next time it is there, or never return from it (``hang``)."""
    word = point if how == "fail" else f"{point} {how}"
    (folder / _FILE).write_text(word, encoding="ascii")


def forget(folder: Path) -> None:
    """Nobody is to break any more."""
    (folder / _FILE).unlink(missing_ok=True)


def places(folder: Path) -> list[dict[str, Any]]:
    """Of each worker of the engine that was started last: where its memory lies."""
    found: list[dict[str, Any]] = msgspec.json.decode((folder / _PLACES).read_bytes())
    return found


def setup() -> None:
    """Make the backend known in this process."""
    register_backend(BACKENDS, NAME, f"{__name__}:create")


def create(**options: Any) -> Engine:
    """A vLLM engine with the suite's part, which is told and tells in the folder that ``FOLDER`` names."""
    from hotbunk.rollout.backends.vllm import create as create_vllm

    engine: Any = create_vllm(**options)
    engine.worker_extension = EXTENSION
    folder, start = os.environ[FOLDER], engine.start

    async def started() -> None:
        await start()
        found = await engine.everywhere("hotbunk_addresses")
        (Path(folder) / _PLACES).write_bytes(msgspec.json.encode(found))

    engine.start = started
    for point, function in IN_ADAPTER.items():
        setattr(engine, function, _broken_once(folder, point, getattr(engine, function)))
    return engine  # type: ignore[no-any-return]


def _broken_once(folder: str, point: str, inner: Any) -> Any:
    async def call(*args: Any) -> None:
        if _breaks(folder, f"{point} hang"):
            await asyncio.Event().wait()
        if _breaks(folder, point):
            raise RuntimeError(f"{point} breaks")
        await inner(*args)

    return call


def fail_once(point: str) -> bool:
    """Have the receiver in this process raise, the next time it is there."""
    from hotbunk.rollout.backends.vllm.update import Receiver, Staging

    owner: Any = Receiver if point == "accept" else Staging
    function = "_known" if point == "accept" else "write"
    inner = getattr(owner, function)

    def broken(*_: Any) -> None:
        setattr(owner, function, inner)
        raise RuntimeError(f"{point} breaks")

    setattr(owner, function, broken)
    return True


def _meets(folder: str, point: str) -> None:
    """What was asked for there."""
    if _breaks(folder, f"{point} hang"):
        threading.Event().wait()
    if _breaks(folder, point):
        raise RuntimeError(f"{point} breaks")


def _breaks(folder: str, point: str) -> bool:
    path = Path(folder) / _FILE
    with suppress(FileNotFoundError):
        if path.read_text(encoding="ascii") == point:
            path.unlink()
            return True
    return False


def _made() -> type:
    from hotbunk.conformance.tickets import register
    from hotbunk.rollout.backends.vllm.landing import Landing
    from hotbunk.rollout.backends.vllm.worker import WorkerExtension
    from hotbunk.rollout.errors import ResumeOutOfMemory

    class SuitesExtension(WorkerExtension):
        """vLLM mixes it into its worker."""

        _suite_folder = ""
        finish_weight_update: Any  # the worker's own

        def hotbunk_bind(self, folder: str) -> dict[str, Any]:
            register()
            found: dict[str, Any] = super().hotbunk_bind(folder)
            self._suite_folder = os.environ.get(FOLDER, folder)
            finish = self.finish_weight_update

            def finished(*args: Any) -> None:
                finish(*args)
                _meets(self._suite_folder, "post_load")

            self.finish_weight_update = finished
            # This process is the suite's.
            for owner, function, point in (
                (self.hotbunk_engine.weights, "_places", "accept"),
                (Landing, "write", "bucket"),
                (Landing, "differing", "verify"),
            ):
                setattr(owner, function, self._suite_met(getattr(owner, function), point))
            for verb, point in {
                "release": "release",
                "resume": "resume",
                "digest": "verify",
            }.items():
                setattr(self.hotbunk_engine, verb, self._suite_broken(verb, point))
            if (pool := getattr(self, "hotbunk_pool", None)) is not None:
                self._suite_starved(pool.pool)
            return found

        def hotbunk_load(self, path: str, table: list[list[Any]]) -> None:
            super().hotbunk_load(path, table)
            _meets(self._suite_folder, "post_load")

        def _suite_met(self, inner: Any, point: str) -> Any:
            def call(*args: Any) -> Any:
                _meets(self._suite_folder, point)
                return inner(*args)

            return call

        def _suite_starved(self, pool: Any) -> None:
            mapped = pool.resume

            def resume(tags: Any) -> Any:
                for tag in tags:
                    if _breaks(self._suite_folder, f"starve {tag}"):
                        needed = sum(a.reserved for a in pool.memory().arenas if a.tag == tag)
                        raise ResumeOutOfMemory(str(tag), needed, 0)
                return mapped(tags)

            pool.resume = resume

        def _suite_broken(self, verb: str, point: str) -> Any:
            inner = getattr(self.hotbunk_engine, verb)

            async def call(*args: Any, **kwargs: Any) -> Any:
                done = await inner(*args, **kwargs)
                if _breaks(self._suite_folder, f"{point} hang"):
                    await asyncio.Event().wait()
                _meets(self._suite_folder, point)
                return done

            return call

    return SuitesExtension


def __getattr__(name: str) -> Any:
    if name != "SuitesExtension":
        raise AttributeError(name)
    return globals().setdefault(name, _made())
