"""What a server is told when it is made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hotbunk.rollout.errors import ConfigError

MAX_BODY_BYTES = 16 << 20
KEY_BYTES = 16  # the least a key may have
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Settings:
    """``context`` is the model's, in tokens; ``model_dir`` is where it was loaded from. ``control``: control endpoints exist.

    ``keys`` are SHA-256 digests of the keys of which every request but /health and /metrics needs
    one; without any, control is for loopback only. ``allowed_roots`` are real paths of directories
    under which weights may be named by path.
    """

    model: str
    context: int
    model_dir: Path | None = None
    control: bool = False
    keys: tuple[bytes, ...] = ()
    strict_model: bool = False
    prompt_tokens_details: bool = False
    allowed_roots: tuple[Path, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 << 10:
            raise ConfigError(f"max_body_bytes={self.max_body_bytes} is less than 1 KiB")


def digest_key(key: str) -> bytes:
    """A key as it is kept."""
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path) -> tuple[bytes, ...]:
    """The keys of a file, one a line.

    :raises ConfigError: it cannot be read, others may read it, or a key is too short.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"others may read {path}", remedy=f"chmod 600 {path}")
        keys = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from error
    if not keys or any(len(key) < KEY_BYTES for key in keys):
        raise ConfigError(
            f"{path} needs one key a line, each of {KEY_BYTES} characters or more",
            remedy=f"python -c 'import secrets; print(secrets.token_urlsafe())' > {path}",
        )
    return tuple(digest_key(key) for key in keys)
