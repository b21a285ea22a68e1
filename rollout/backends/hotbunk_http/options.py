"""What an HTTP backend can be told."""

from __future__ import annotations

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.http.connection import Connection, check_url


class HttpOptions(Connection, frozen=True, forbid_unknown_fields=True):
    """A server of ``hotbunk serve``.

    ``generate_url``: where generation requests go instead, say a balancer's. ``node_rank``: of the
    engine's node where this runs; only 0 sends, the others' verbs do nothing. ``relay``: the
    transport by which the backend (not the handle) offers on what it is given.
    """

    generate_url: str | None = None
    node_rank: int = 0
    relay: str = "shm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generate_url is not None:
            check_url("generate_url", self.generate_url)
        if self.node_rank < 0:
            raise ConfigError(f"node_rank={self.node_rank} must be 0 or more")
