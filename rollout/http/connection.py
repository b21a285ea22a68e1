"""One server, and how it is spoken to."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hotbunk.rollout.errors import ConfigError
from hotbunk.rollout.status import Deadlines


class Connection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server, and how it is spoken to.

    ``url`` is its own, never a balancer's: each server is a replica of its own. ``api_key_file``
    holds the key in its first line. ``attempts`` at an idempotent call that does not get through.
    """

    url: str
    api_key_file: str | None = None
    attempts: int = 4
    deadlines: Deadlines = Deadlines()

    def __post_init__(self) -> None:
        check_url("url", self.url)
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts} must be 1 or more")

    def key(self) -> str | None:
        """:raises ConfigError: the file cannot be read."""
        if self.api_key_file is None:
            return None
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").split()[0]
        except (OSError, IndexError, UnicodeDecodeError) as error:
            raise ConfigError(f"no key in {self.api_key_file}: {error}") from error


def check_url(name: str, value: str) -> None:
    """:raises ConfigError: it is not one."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{name}={value!r} is not of the form http://host:port")
