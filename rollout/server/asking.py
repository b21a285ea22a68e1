"""OpenAI's requests, with vLLM's extras, as requests of the contract."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from hotbunk.rollout.contract import ADAPTER_PREFIX, GenerateRequest, Sampling
from hotbunk.rollout.errors import Unsupported, UsageError
from hotbunk.rollout.server.plane import Plane
from hotbunk.rollout.server.words import Words

Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
TokenIds = list[TokenId]
MOST_PROMPTS = 256
MOST_CHOICES = 128

# What would change the answer and is not done here: the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
}


class NoSuchModel(UsageError):
    """Asked for by a name that is not served, where names are strict."""


class StreamOptions(BaseModel):
    """What a stream carries besides its chunks."""

    include_usage: bool = False


class Asked(BaseModel):
    """What completions and chats have in common. Unknown keys are ignored, as OpenAI's own are,
    unless they would change the answer."""

    model_config = ConfigDict(extra="allow")

    model: Words = Field(default="", max_length=256)
    max_tokens: StrictInt | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: Number = Field(default=1.0, ge=0, le=1e6)
    top_p: Number = Field(default=1.0, gt=0, le=1)
    top_k: StrictInt = Field(default=0, ge=-1, lt=1 << 31)
    min_p: Number = Field(default=0.0, ge=0, le=1)
    n: StrictInt = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    adapter: Words | None = Field(default=None, max_length=256)
    request_id: Words | None = Field(default=None, min_length=1, max_length=128)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens to tell beside each; None: no log-probs at all."""
        return None

    def check(self) -> None:
        """:raises Unsupported: a key that is not understood would change the answer."""
        for key, value in (self.model_extra or {}).items():
            if key in _NEUTRAL and value is not None and value not in _NEUTRAL[key]:
                raise Unsupported(f"{key}={str(value)[:50]!r}", "hotbunk", "leave it out")

    def sampling(self, max_tokens: int) -> Sampling:
        """As the contract has it."""
        return Sampling(
            temperature=self.temperature,
            max_tokens=max_tokens,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stops,
            ignore_eos=self.ignore_eos,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            n=self.n,
            logprobs=self.alternatives or 0,
        )


class CompletionBody(Asked):
    """``prompt`` is text or token ids, or a list of either."""

    prompt: (
        Words
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Words], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]],
            Field(min_length=1, max_length=MOST_PROMPTS),
        ]
    )
    logprobs: StrictInt | None = Field(default=None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class Part(BaseModel):
    """A piece of a message; text is all there is."""

    type: Literal["text"]
    text: Words


class MessageBody(BaseModel):
    """One turn."""

    role: Words = Field(min_length=1, max_length=64)
    content: Words | list[Part]

    def plain(self) -> dict[str, str]:
        """As a tokenizer takes it."""
        said = self.content
        text = said if isinstance(said, str) else "".join(part.text for part in said)
        return {"role": self.role, "content": text}


class ChatBody(Asked):
    """A conversation up to the assistant's turn."""

    messages: list[MessageBody] = Field(min_length=1, max_length=4096)
    max_completion_tokens: StrictInt | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: StrictInt = Field(default=0, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class Job(msgspec.Struct, frozen=True):
    """One HTTP request, understood: a contract's request for each prompt."""

    id: str
    model: str
    requests: tuple[GenerateRequest, ...]


async def completion_job(plane: Plane, body: CompletionBody) -> Job:
    """:raises HotbunkError: what is wrong with it."""
    body.check()
    said = body.prompt
    many: list[Any] = [said] if isinstance(said, str) or isinstance(said[0], int) else list(said)
    prompts = [await plane.texts.encode(p) if isinstance(p, str) else p for p in many]
    return await _job(plane, body, f"cmpl-{uuid.uuid4().hex}", prompts, body.max_tokens or 16)


async def chat_job(plane: Plane, body: ChatBody) -> Job:
    """As :func:`completion_job`; without a limit a reply may fill the model's context."""
    body.check()
    prompt = await plane.texts.encode_chat([one.plain() for one in body.messages])
    room = max(plane.settings.context - len(prompt), 1)
    wanted = body.max_completion_tokens or body.max_tokens or room
    return await _job(plane, body, f"chatcmpl-{uuid.uuid4().hex}", [prompt], wanted)


async def _job(
    plane: Plane, body: Asked, own_id: str, prompts: list[list[int]], max_tokens: int
) -> Job:
    if not all(prompts):
        raise UsageError("the prompt is empty")
    name, adapter = await _model(plane, body)
    sampling = body.sampling(max_tokens)
    key = body.request_id or own_id
    keys = [key] if len(prompts) == 1 else [f"{key}-{n}" for n in range(len(prompts))]
    requests = tuple(
        GenerateRequest(key, tuple(prompt), sampling, adapter)
        for key, prompt in zip(keys, prompts, strict=True)
    )
    return Job(key, name, requests)


async def _model(plane: Plane, body: Asked) -> tuple[str, str | None]:
    """The name to answer with, and the adapter it means, if any."""
    served, asked = plane.settings.model, body.model
    if body.adapter is not None or asked in ("", served):
        return asked or served, body.adapter
    groups = (await plane.replica.status()).groups
    if ADAPTER_PREFIX + asked in groups:
        return asked, asked
    if plane.settings.strict_model:
        raise NoSuchModel(f"no model {asked!r} is served here", remedy=f"this is {served!r}")
    return asked, None
