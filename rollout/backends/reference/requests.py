"""What is asked of the engine: what could never run is refused at once; when a response ends."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from hotbunk.rollout import errors
from hotbunk.rollout.backends.reference.scheduler import Sequence
from hotbunk.rollout.contract import FinishReason, GenerateRequest


class RequestRules:
    """A model's limits, applied to requests.

    :param capacity: tokens the whole KV cache holds.
    """

    def __init__(self, config: Any, model_dir: Path, capacity: int) -> None:
        self._vocabulary = int(config.vocab_size)
        self._context = int(config.max_position_embeddings)
        self._capacity = capacity
        self._model_dir = model_dir
        self._eos = frozenset(_ids(config.eos_token_id)) | _generation_eos(model_dir)

    def check(self, request: GenerateRequest) -> None:
        """:raises UsageError: it could never run. :raises Unsupported: media, or unknown text."""
        who, want = f"request {request.request_id!r}", request.sampling
        if request.media:
            raise errors.Unsupported("media", "reference", "text models only")
        if not request.prompt or want.max_tokens < 1 or want.n < 1:
            raise errors.UsageError(f"{who} needs a prompt, and max_tokens and n of 1 or more")
        if not 0 <= request.continued <= len(request.prompt):
            raise errors.UsageError(
                f"{who} continues {request.continued} tokens and its prompt has {len(request.prompt)}"
            )
        if not all(0 <= t < self._vocabulary for t in request.prompt):
            raise errors.UsageError(f"{who} has token ids outside 0..{self._vocabulary - 1}")
        if want.temperature < 0 or not math.isfinite(want.temperature):
            raise errors.UsageError(
                f"{who} asks for temperature {want.temperature}, which is not a number of 0 or more"
            )
        if not (0 < want.top_p <= 1 and 0 <= want.min_p <= 1 and want.top_k >= 0):
            raise errors.UsageError(
                f"{who} asks for top_p={want.top_p}, min_p={want.min_p}, top_k={want.top_k}",
                remedy="0 < top_p <= 1, 0 <= min_p <= 1, top_k of 0 (off) or more",
            )
        if not 0 <= want.logprobs <= self._vocabulary:
            raise errors.UsageError(f"{who} asks for {want.logprobs} alternatives a token")
        if want.stop:
            if not all(want.stop):
                raise errors.UsageError(f"{who} has an empty stop string")
            _ = self._tokenizer  # now, not in the middle of the response
        tokens = len(request.prompt) + want.max_tokens
        if tokens > self._context:
            raise errors.UsageError(
                f"{who} may grow to {tokens} tokens and the model's context is {self._context}"
            )
        if tokens > self._capacity:
            raise errors.UsageError(
                f"{who} may grow to {tokens} tokens and the whole KV cache holds {self._capacity}",
                remedy="raise kv_cache_tokens, or lower max_tokens",
            )

    def finished(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Whether the response ends with ``token``, which it has just got."""
        want = sequence.request.sampling
        if token in want.stop_token_ids or (token in self._eos and not want.ignore_eos):
            return FinishReason.STOP
        if want.stop and self._says(sequence, want.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.produced >= want.max_tokens else None

    def _says(self, sequence: Sequence, stop: tuple[str, ...]) -> bool:
        # A token is at least a byte of text, but for special ones, so the last few others hold any
        # string that ends here. A few more give the decoder whole characters to begin with.
        window = max(len(text.encode()) for text in stop) + 8
        said_before = sequence.request.continued
        response = islice(reversed(sequence.tokens), said_before + sequence.produced)
        last = list(islice((t for t in response if t not in self._special), window))
        said = self._tokenizer.decode(last[::-1], clean_up_tokenization_spaces=False)
        return any(text in said for text in stop)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise errors.Unsupported(
                "stop strings", "reference", f"no tokenizer in {str(self._model_dir)!r}"
            ) from error


def _ids(said: object) -> list[int]:
    """Token ids as a configuration says them: none, one or a list."""
    return [] if said is None else list(said) if isinstance(said, (list, tuple)) else [said]  # type: ignore[list-item]


def _generation_eos(model_dir: Path) -> frozenset[int]:
    """Ends of a turn that chat models name in ``generation_config.json`` only."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        return frozenset(_ids(msgspec.json.decode(path.read_bytes()).get("eos_token_id")))
    except (msgspec.MsgspecError, AttributeError, TypeError) as error:
        raise errors.ConfigError(f"{str(path)!r} cannot be used: {error}") from error
