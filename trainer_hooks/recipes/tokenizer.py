"""Text to token ids and back: a byte tokenizer that needs no files, and a wrapper over HF's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hotbunk.rollout.errors import ConfigError, MissingExtra, UsageError

BYTE_TOKENIZER_FILE = "byte_tokenizer.json"


class Tokenizer(Protocol):
    """What recipes need of a tokenizer. Every id is in ``[0, vocab_size)``."""

    @property
    def eos_id(self) -> int:
        """The id that ends a response."""

    @property
    def pad_id(self) -> int:
        """The id that fills up a batch; the end id where the model has none of its own."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with what the model puts in front of a text (mostly nothing)."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation (each ``{"role", "content"}``) up to the assistant's turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens are left out.

        :raises UsageError: an id outside ``[0, vocab_size)``.
        """


class _ByteFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    bos_id: int
    eos_id: int
    pad_id: int


_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
_HF_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "clean_up_tokenization_spaces": False,
    # What plain_chat writes.
    "chat_template": "{% for message in messages %}{{ message['role'] + ': ' + message['content'] "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}


def _hf_tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges, in the format of the ``tokenizers`` library."""
    # That library writes a byte as one printable character: itself, or the next from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    marks = {byte: byte for byte in printable} | {b: 256 + i for i, b in enumerate(hidden)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 256 + place, "content": name, "special": True, **flags}
            for place, name in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {chr(marks[byte]): byte for byte in range(256)},
            "merges": [],
        },
    }


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; above them ``bos``, ``eos`` and ``pad``.

    ``encode`` puts no special token in front. A byte that is no valid UTF-8 decodes to one
    U+FFFD, so that a wrong byte does not shift the positions after it.
    """

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(plain_chat(messages))

    def decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UsageError(f"token id {token} is outside [0, {self.vocab_size})")
        text = bytes(token for token in ids if token < 256).decode("utf-8", "surrogateescape")
        return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)

    def save(self, model_dir: Path) -> None:
        """Write the tokenizer into ``model_dir``: our file, and the same for Hugging Face's.

        The latter is for engines and trainers that load a model directory with transformers.
        """
        files = {
            BYTE_TOKENIZER_FILE: _ByteFile("byte", self.bos_id, self.eos_id, self.pad_id),
            "tokenizer.json": _hf_tokenizer(),
            "tokenizer_config.json": _HF_CONFIG,
        }
        for name, content in files.items():
            (model_dir / name).write_bytes(msgspec.json.encode(content) + b"\n")

    @classmethod
    def load(cls, model_dir: Path) -> ByteTokenizer:
        """The tokenizer saved in ``model_dir``.

        :raises ConfigError: no such file, or it describes another tokenizer than this class.
        """
        path = model_dir / BYTE_TOKENIZER_FILE
        try:
            content = msgspec.json.decode(path.read_bytes(), type=_ByteFile)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"byte tokenizer {path} cannot be read: {error}") from error
        if content != _ByteFile("byte", cls.bos_id, cls.eos_id, cls.pad_id):
            raise ConfigError(f"byte tokenizer {path} is of a kind this version does not know")
        return cls()


class HFTokenizer:
    """A Hugging Face tokenizer behind the small interface; ``inner`` is the tokenizer itself."""

    def __init__(self, inner: Any) -> None:
        if inner.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-sequence token")
        self.inner = inner
        self.eos_id: int = inner.eos_token_id
        self.pad_id: int = self.eos_id if inner.pad_token_id is None else inner.pad_token_id
        self.vocab_size: int = len(inner)

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """As the model's chat template has it; a plain transcript where it has none."""
        if not self.inner.chat_template:
            return self.encode(plain_chat(messages))
        turns = [dict(message) for message in messages]
        # Rendered first, then tokenized: what apply_chat_template returns differs by release.
        text = self.inner.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UsageError(f"token id {token} is outside [0, {self.vocab_size})")
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as a transcript, for models that know no chat template."""
    turns = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(turns) + "assistant: "


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer in a model directory: ours where it has one, else Hugging Face's.

    :raises ConfigError: the directory has none, or it cannot be read.
    :raises MissingExtra: it is Hugging Face's and transformers is not installed.
    """
    if (model_dir / BYTE_TOKENIZER_FILE).is_file():
        return ByteTokenizer.load(model_dir)
    if not any(
        (model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ConfigError(f"model directory {model_dir} has no tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(
            "transformers is not installed", remedy="pip install 'hotbunk[reference]'"
        ) from error
    try:
        inner = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {model_dir} cannot be read: {error}") from error
    return HFTokenizer(inner)
