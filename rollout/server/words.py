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


class Body(BaseModel):
    """A control request's body: what is not known is refused."""

    model_config = ConfigDict(extra="forbid")
