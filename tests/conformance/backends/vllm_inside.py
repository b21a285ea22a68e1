"""The suite's own part in vLLM's workers: tickets that say everything, and a word that breaks a verb.

Nothing of vLLM is imported here but where vLLM itself imports it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

EXTENSION = f"{__name__}.SuitesExtension"
POINTS = ("release", "resume", "post_load", "verify")
_FILE = "sabotage"


def ask(folder: Path, point: str) -> None:
    """Have a worker raise once, the next time it is there."""
    (folder / _FILE).write_text(point, encoding="ascii")


def _breaks(folder: str, point: str) -> bool:
    path = Path(folder) / _FILE
    with suppress(FileNotFoundError):
        if path.read_text(encoding="ascii") == point:
            path.unlink()
            return True
    return False


def _made() -> type:
    from hotbunk.conformance.tickets import register
    from hotbunk.rollout.backends.vllm.worker import WorkerExtension
    from hotbunk.rollout.errors import ResumeOutOfMemory

    class SuitesExtension(WorkerExtension):
        """vLLM mixes it into its worker."""

        _suite_folder = ""

        def hotbunk_bind(self, folder: str) -> dict[str, Any]:
            register()
            found: dict[str, Any] = super().hotbunk_bind(folder)
            self._suite_folder = folder
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
            if _breaks(self._suite_folder, "post_load"):
                raise RuntimeError("post_load breaks")

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
                if _breaks(self._suite_folder, point):
                    raise RuntimeError(f"{point} breaks")
                return done

            return call

    return SuitesExtension


def __getattr__(name: str) -> Any:
    if name != "SuitesExtension":
        raise AttributeError(name)
    return globals().setdefault(name, _made())
