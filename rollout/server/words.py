"""What comes over a wire: text that is text, and bodies that hold what is known."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _words(value: object) -> object:
    # JSON can say half a surrogate pair, which nothing behind here can encode.
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half a surrogate pair") from None
    return value


Words = Annotated[str, BeforeValidator(_words)]


DEEPEST = 64  # of what is passed on unread: every wire on its way has a limit of its own


def too_deep(value: object) -> bool:
    """Whether lists and mappings lie within one another more than :data:`DEEPEST` times."""
    left = [(value, 1)]
    while left:
        one, depth = left.pop()
        if isinstance(one, (list, tuple, dict)):
            if depth > DEEPEST:
                return True
            inner = one.values() if isinstance(one, dict) else one
            left.extend((part, depth + 1) for part in inner)
    return False


class Body(BaseModel):
    """A control request's body: what is not known is refused."""

    model_config = ConfigDict(extra="forbid")
