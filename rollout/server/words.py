"""Text that comes over a wire: it must be text."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator


def _words(value: object) -> object:
    # JSON can say half a surrogate pair, which nothing behind here can encode.
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half a surrogate pair") from None
    return value


Words = Annotated[str, BeforeValidator(_words)]
