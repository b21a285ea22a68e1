"""Endpoints that make tokens: OpenAI's completions and chats, and the contract's own requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from hotbunk.rollout.contract import GenerateRequest, TokenChunk
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.server.asking import (
    Asked,
    ChatBody,
    CompletionBody,
    Job,
    NoSuchModel,
    chat_job,
    completion_job,
)
from hotbunk.rollout.server.plane import Plane, Shared, answer
from hotbunk.rollout.server.problems import problem
from hotbunk.rollout.server.streams import LEFT, EventStream, Gone, merged, while_there
from hotbunk.rollout.server.telling import Telling
from hotbunk.rollout.server.words import too_deep

UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    400: {"description": "It cannot be meant, or could never run; the body says why."},
    503: {"description": "No weights or no KV cache to serve from, or leaving; the body says why."},
}
router = APIRouter(tags=["generation"], prefix="/v1")

Chunks = AsyncGenerator[tuple[int, TokenChunk], None]


@router.get("/models")
async def models(plane: Shared) -> Response:
    """The one model."""
    one = {"id": plane.settings.model, "object": "model", "owned_by": "hotbunk"}
    return answer({"object": "list", "data": [one | {"max_model_len": plane.settings.context}]})


@router.post("/completions", responses=UNAVAILABLE | {404: {"description": "No such model."}})
async def completions(plane: Shared, request: Request, body: CompletionBody) -> Response:
    """OpenAI's completions, with vLLM's ``ignore_eos``, ``return_token_ids``, ``stop_token_ids``,
    ``seed`` and more; ``return_weight_versions`` tells which weights made which tokens."""
    return await _asked(plane, request, body, lambda: completion_job(plane, body))


@router.post("/chat/completions", responses=UNAVAILABLE | {404: {"description": "No such model."}})
async def chat_completions(plane: Shared, request: Request, body: ChatBody) -> Response:
    """OpenAI's chats, likewise."""
    return await _asked(plane, request, body, lambda: chat_job(plane, body))


@router.post(
    "/generate",
    responses=UNAVAILABLE,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["request_id", "prompt"],
                        "properties": {
                            "request_id": {"type": "string", "minLength": 1, "maxLength": 128},
                            "prompt": {"type": "array", "items": {"type": "integer"}},
                        },
                    }
                }
            },
        }
    },
)
async def generate(plane: Shared, request: Request) -> Response:
    """A request of the contract (``GenerateRequest``) in, its ``TokenChunk``s out, as events."""
    try:
        asked = msgspec.json.decode(await request.body(), type=GenerateRequest)
        asked.request_id.encode()
        if too_deep([asked.media, asked.metadata]):
            raise RecursionError("media or metadata lie too deep within one another")
        msgspec.msgpack.encode(asked)  # it goes on by other wires: integers have 64 bits there
    except (msgspec.MsgspecError, UnicodeError, OverflowError, RecursionError) as error:
        told = {"loc": ("body",), "msg": str(error), "type": "msgspec"}
        raise RequestValidationError([told]) from error
    job = Job(asked.request_id, plane.settings.model, (asked,))

    def event(number: int, chunk: TokenChunk) -> bytes:
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    return await _streamed(plane, request, job, event, lambda: b"data: [DONE]\n\n")


async def _asked(plane: Plane, request: Request, body: Asked, understand: Any) -> Response:
    try:
        job = await understand()
    except NoSuchModel as error:
        return answer(problem(error, "completions", traceback=False)[1], 404)
    telling = Telling(plane, body, job)
    if body.stream:

        def event(number: int, chunk: TokenChunk) -> bytes:
            return telling.event(telling.piece(number, chunk))

        return await _streamed(plane, request, job, event, telling.closing)
    pieces: list[dict[str, Any]] = []

    async def read() -> None:
        async with aclosing(_chunks(plane, job)) as chunks:
            async for number, chunk in chunks:
                pieces.append(telling.piece(number, chunk))

    try:
        await while_there(request, read())
    except Gone:
        return Response(status_code=LEFT)
    return answer(telling.whole(pieces))


async def _streamed(
    plane: Plane,
    request: Request,
    job: Job,
    event: Callable[[int, TokenChunk], bytes],
    closing: Callable[[], bytes],
) -> Response:
    """The head goes out with the first chunk: what fails before it has a status of its own."""
    chunks = _chunks(plane, job)
    try:
        first = await while_there(request, anext(chunks))
    except Gone:
        await chunks.aclose()
        return Response(status_code=LEFT)

    async def events() -> AsyncGenerator[bytes, None]:
        async with aclosing(chunks):
            yield event(*first)
            try:
                async for number, chunk in chunks:
                    yield event(number, chunk)
            except HotbunkError as error:
                told = problem(error, "generate", traceback=False)[1]
                yield b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
            yield closing()

    return EventStream(events())


async def _chunks(plane: Plane, job: Job) -> Chunks:
    """The job's chunks, counted. Closing it ends its requests in the engine."""
    began = time.monotonic()
    waiting = True
    open_choices = sum(request.sampling.n for request in job.requests)
    streams = [plane.replica.generate(request) for request in job.requests]
    with _known(plane, job.id, [request.request_id for request in job.requests]):
        try:
            async with aclosing(merged(streams)) as chunks:
                async for number, chunk in chunks:
                    if waiting and chunk.token_ids:
                        plane.metrics.first_token(time.monotonic() - began)
                        waiting = False
                    plane.metrics.tokens(len(chunk.token_ids))
                    if chunk.finish_reason is not None:
                        open_choices -= 1
                        plane.metrics.finished(chunk.finish_reason.value)
                    yield number, chunk
        except (GeneratorExit, asyncio.CancelledError):
            for _ in range(open_choices):
                plane.metrics.finished("disconnect")
            raise


@contextmanager
def _known(plane: Plane, name: str, ids: Sequence[str]) -> Iterator[None]:
    """While it lasts, the response can be aborted by its id."""
    plane.responses.setdefault(name, tuple(ids))
    try:
        yield
    finally:
        plane.responses.pop(name, None)
