"""The generation side of a step: what runs, what waits, what was computed twice or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import ReplicaStatus
from hotbunk.trainer_hooks.recipes.recorder import RunRecorder

REQUESTS = "requests"


class GenerationGauges:
    """Samples every replica's status; per step the highest levels and what was added to counts."""

    def __init__(self, handles: Sequence[ReplicaHandle], recorder: RunRecorder) -> None:
        self._handles = handles
        self._recorder = recorder
        self._most = dict.fromkeys(("running", "held", "frozen", "kv_blocks"), 0)
        self._before = dict.fromkeys(("preemptions", "cached_tokens"), 0)

    async def sample(self) -> None:
        """Look once."""
        statuses = [await handle.status() for handle in self._handles]
        levels = {
            "running": sum(len(s.backend.running) for s in statuses),
            "held": sum(len(s.held) + len(s.backend.waiting) for s in statuses),
            "frozen": sum(len(s.backend.frozen) for s in statuses),
        }
        self._recorder.counter(REQUESTS, levels)
        levels["kv_blocks"] = sum(s.backend.kv_blocks_used for s in statuses)
        for name, level in levels.items():
            self._most[name] = max(self._most[name], level)

    async def take(self) -> dict[str, int]:
        """Highest levels and growth of counts since the last call, and versions in flight now."""
        statuses = [await handle.status() for handle in self._handles]
        most, self._most = self._most, dict.fromkeys(self._most, 0)
        now = {
            "preemptions": sum(s.backend.preemptions for s in statuses),
            "cached_tokens": sum(s.backend.cached_tokens for s in statuses),
        }
        # A replica that took a lost one's place counts from 0.
        grown = {name: max(0, count - self._before[name]) for name, count in now.items()}
        self._before = now
        return {
            **{f"{name}_max": level for name, level in most.items()},
            **grown,
            "versions_in_flight": len(_versions(statuses)),
        }


def _versions(statuses: Sequence[ReplicaStatus]) -> set[str]:
    return {str(version) for s in statuses for version in s.versions.values()}
