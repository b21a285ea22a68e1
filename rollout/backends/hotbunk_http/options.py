"""What an HTTP backend can be told."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.status import Deadlines


class HttpOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``url`` is the server's own, never a balancer's: each server is a replica of its own.

    ``generate_url``: where generation requests go instead, say a balancer's. ``api_key_file`` holds
    the key in its first line. ``node_rank``: of the engine's node where this runs; only 0 sends, the
    others' verbs do nothing. ``attempts`` at an idempotent call that does not get through. ``relay``:
    the transport by which the backend (not the handle) offers on what it is given.
    """

    url: str
    generate_url: str | None = None
    api_key_file: str | None = None
    node_rank: int = 0
    attempts: int = 4
    relay: str = "shm"
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        for name in ("url", "generate_url"):
            value = getattr(self, name)
            if value is None:
                continue
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"{name}={value!r} is not of the form http://host:port")
        if self.attempts < 1 or self.node_rank < 0:
            raise ConfigError(
                f"attempts={self.attempts} must be 1 or more, node_rank={self.node_rank} 0 or more"
            )

    def key(self) -> str | None:
        """:raises ConfigError: the file cannot be read."""
        if self.api_key_file is None:
            return None
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError, UnicodeDecodeError) as error:
            raise ConfigError(f"no key in {self.api_key_file}: {error}") from error
