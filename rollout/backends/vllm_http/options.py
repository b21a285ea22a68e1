"""What a backend over a vLLM server can be told."""

from __future__ import annotations

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.http.connection import Connection

AUTO, ENGINE, RELOAD, NEVER = "auto", "engine", "reload", "never"
WAYS = (AUTO, ENGINE, RELOAD, NEVER)


class VllmHttpOptions(Connection, frozen=True, forbid_unknown_fields=True):
    """A server of vLLM's own.

    ``served_name``: of the model there; None takes the first that the server tells. ``weights``: how
    an update gets there. ``engine``: through hotbunk's weight-transfer engine, which a server has
    that was started with hotbunk installed and ``--weight-transfer-config '{"backend":"hotbunk"}'``;
    ``reload``: as a checkpoint that the server reads, from this host, without verification;
    ``auto``: the first of them that it can; ``never``.
    """

    served_name: str | None = None
    weights: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in WAYS:
            raise ConfigError(f"weights={self.weights!r} is none of {', '.join(WAYS)}")
