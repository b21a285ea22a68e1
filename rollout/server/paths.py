"""Paths that come over a wire: real, and under a root that was allowed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hotbunk.rollout.errors import UsageError


def under_roots(said: str, roots: Sequence[Path]) -> Path:
    """The real path of a directory under one of ``roots``; its files lie there, too.

    :raises UsageError: it is not there, or it, a part of the way or a file in it leads out.
    """
    if not roots:
        raise UsageError(
            "weights cannot be named by path here", remedy="start the server with --allowed-root"
        )
    path = Path(said)
    if not path.is_absolute() or "\0" in said or ".." in path.parts:
        raise UsageError(f"{said[:200]!r} is not an absolute path without '..'")
    try:
        real = Path(os.path.realpath(path, strict=True))
        entries = [Path(os.path.realpath(one.path)) for one in os.scandir(real)]
    except OSError as error:
        # Whether it exists outside the roots is nobody's business.
        inside = _inside(Path(os.path.realpath(path)), roots)
        why = (error.strerror or "cannot be read") if inside else "outside the allowed roots"
        raise UsageError(f"{said[:200]!r}: {why}") from error
    if not all(_inside(one, roots) for one in (real, *entries)):
        raise UsageError(f"{said[:200]!r} is, or leads, outside the allowed roots")
    return real


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    return any(path == root or path.is_relative_to(root) for root in roots)
