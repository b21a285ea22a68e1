"""How a fleet stands, in one look."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from hotbunk.rollout.contract import Version


class FleetCounters(msgspec.Struct, frozen=True):
    """Taken at one moment, so the numbers belong together.

    ``waiting`` are syncs that have not begun. ``superseded`` were never sent, for a newer version
    came meanwhile. ``serves`` is each replica's version (None: it serves none).
    """

    current: Version | None
    serves: Mapping[str, Version | None]
    waiting: int
    syncing: bool
    syncs: int
    failed: int
    superseded: int

    def staleness(self, share: float) -> int | None:
        """Steps that a share of the serving replicas is at most behind the current version.

        ``staleness(0.5)`` is the median, ``staleness(1.0)`` the most. None: nobody serves. A replica
        of another incarnation counts as behind by the whole step.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share}")
        if self.current is None:
            return None
        lags = sorted(self._lag(version) for version in self.serves.values() if version is not None)
        if not lags:
            return None
        return lags[max(math.ceil(share * len(lags) - 1e-9) - 1, 0)]

    def _lag(self, version: Version) -> int:
        assert self.current is not None
        same = version.incarnation == self.current.incarnation
        return max(self.current.step - version.step, 0) if same else self.current.step
