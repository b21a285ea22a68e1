"""What is needed to start a replica in a process of its own, and to start it anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.status import Deadlines

REPLICA, RANK = "replica", "rank"


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica that can be started: ``await start(spec)``, as often as it is lost.

    ``backend`` and ``options`` are those of the registry; options must be plain data.
    ``fed_groups`` as for :class:`~hotbunk.rollout.replica.Replica`. ``data_parallel`` ranks, each a
    process of its own. ``python``: the interpreter of another environment, in which hotbunk is
    installed, too (None: this one, forked from a server that has loaded what is heavy). ``env`` is
    added to the environment. ``setup``, ``module:function``, is called in the new process before
    anything is built, say to register backends or transports.
    """

    backend: str = "reference"
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    name: str = "replica0"
    deadlines: Deadlines = Deadlines()
    fed_groups: tuple[str, ...] | None = None
    data_parallel: int = 1
    python: str | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    setup: str = ""
    role: str = REPLICA  # or RANK: the bare engine, driven by the replica's process

    def __post_init__(self) -> None:
        if self.data_parallel < 1:
            raise ConfigError(f"data_parallel={self.data_parallel} must be 1 or more")
        if self.setup and ":" not in self.setup:
            raise ConfigError(f"setup={self.setup!r} is not of the form module:function")
