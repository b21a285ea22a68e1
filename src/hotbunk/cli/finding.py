"""One thing that `hotbunk doctor` looked at."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing: whether it can be used here; if not, why, and what would change that."""

    kind: str
    name: str
    usable: bool
    why: str = ""
    remedy: str = ""
