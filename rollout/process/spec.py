"""What is needed to start a replica in a process of its own, and to start it anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.process.grid import Grid
from hotbunk.rollout.status import Deadlines

REPLICA, RANK = "replica", "rank"


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica that can be started: ``await start(spec)``, as often as it is lost.

    ``backend`` and ``options`` are those of the registry; options must be plain data.
    ``fed_groups`` as for :class:`~hotbunk.rollout.replica.Replica`. ``data_parallel`` copies of the
    model, each held by ``pipeline_parallel`` x ``tensor_parallel`` ranks, each a process of its own
    (more than one rank a copy needs a backend whose ranks hold parts). ``python``: the interpreter of another environment, in which hotbunk is
    installed, too (None: this one, forked from a server that has loaded what is heavy). ``env`` is
    added to the environment; a rank finds its number in ``HOTBUNK_RANK`` and the grid in
    ``HOTBUNK_GRID`` (data,pipeline,tensor). ``setup``, ``module:function``, is called in the new process before
    anything is built, say to register backends or transports.
    """

    backend: str = "reference"
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    name: str = "replica0"
    deadlines: Deadlines = Deadlines()
    fed_groups: tuple[str, ...] | None = None
    data_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    python: str | None = None
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    setup: str = ""
    role: str = REPLICA  # or RANK: the bare engine, driven by the replica's process

    @property
    def grid(self) -> Grid:
        """Its ranks."""
        return Grid(self.data_parallel, self.pipeline_parallel, self.tensor_parallel)

    def __post_init__(self) -> None:
        for name in ("data_parallel", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.setup and ":" not in self.setup:
            raise ConfigError(f"setup={self.setup!r} is not of the form module:function")


def rank_specs(spec: ReplicaSpec) -> list[ReplicaSpec]:
    """What each rank of a replica is started from.

    They must end before the replica's own process has to, so the grace is shorter.
    """
    grid = f"{spec.data_parallel},{spec.pipeline_parallel},{spec.tensor_parallel}"
    deadlines = msgspec.structs.replace(spec.deadlines, grace=0.5 * spec.deadlines.grace)
    return [
        msgspec.structs.replace(
            spec,
            name=f"{spec.name}/{number}",
            deadlines=deadlines,
            role=RANK,
            env={**spec.env, "HOTBUNK_RANK": str(number), "HOTBUNK_GRID": grid},
        )
        for number in range(spec.grid.size)
    ]
