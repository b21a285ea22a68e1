"""Ids of the bug reports that a text is about, as ``V8`` or ``M10``."""

from __future__ import annotations

import re


def ids_in(text: str) -> tuple[str, ...]:
    """In the order in which it names them."""
    return tuple(re.findall(r"\b[MGCHKVBNLFAU]\d+\b", text))
