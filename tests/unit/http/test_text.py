"""Text in pieces is the text; stop strings are cut off wherever the pieces end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbunk.rollout.errors import UsageError
from hotbunk.rollout.server.text import Decoder, Stops, Texts
from hotbunk.trainer_hooks.recipes.tokenizer import ByteTokenizer

pytestmark = pytest.mark.anyio
TEXTS = Texts(ByteTokenizer())
PIECES = st.lists(st.lists(st.integers(0, 300), max_size=6), max_size=30)


def _decoded(pieces: list[list[int]]) -> tuple[list[str], str]:
    decoder = Decoder(TEXTS)
    said = [decoder.push(piece) for piece in pieces]
    return said, decoder.push([], last=True)


@given(PIECES)
def test_pieces_of_any_bytes_are_the_whole(pieces: list[list[int]]) -> None:
    """Half characters, ids beyond the tokenizer and special tokens included."""
    said, rest = _decoded(pieces)
    assert "".join(said) + rest == TEXTS.decode([token for piece in pieces for token in piece])


@given(st.text(max_size=40), st.integers(1, 5))
def test_text_comes_as_soon_as_its_characters_are_whole(text: str, size: int) -> None:
    if any("\ud800" <= char <= "\udfff" or char == "\ufffd" for char in text):
        return
    data = list(text.encode())
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    said, rest = _decoded(pieces)
    assert "".join(said) == text, "something whole was held back"
    assert rest == ""


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_stop_strings_are_found_across_pieces(pieces: list[str], stops: list[str]) -> None:
    found = Stops(stops)
    said = "".join(found.push(piece) for piece in pieces) + found.push("", last=True)
    whole = "".join(pieces)
    # A stream ends with the character that completes a stop string; so does the search.
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    if not ends:
        assert (said, found.hit) == (whole, None)
    else:
        assert found.hit in stops
        assert whole.startswith(said)
        assert all(stop not in said for stop in stops)
        assert whole[len(said) :].startswith(found.hit or "")


def test_a_stop_that_never_ends_is_text_after_all() -> None:
    stops = Stops(["</end>"])
    assert stops.push("a</e") == "a"
    assert stops.push("nt") == "</ent"
    assert stops.push("<") == ""
    assert stops.push("", last=True) == "<"
    assert stops.hit is None


async def test_a_tokenizer_that_raises_is_a_usage_error() -> None:
    """Chat templates raise classes of their own, about conversations they do not take."""

    class Picky(ByteTokenizer):
        def encode_chat(self, messages: Any) -> list[int]:
            raise LookupError("roles must alternate")

    texts = Texts(Picky())
    with pytest.raises(UsageError, match="roles must alternate"):
        await texts.encode_chat([])
    assert await texts.encode("ab") == [97, 98]
    texts.close()
