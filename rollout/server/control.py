"""The control plane: pause and resume, sleep and wake, memory, caches, looking.

Names and defaults are vLLM's where vLLM has the endpoint, SGLang's where only SGLang does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StrictInt

from hotbunk.rollout.contract import Cache, MemoryReport, PauseMode, Retention, Tag
from hotbunk.rollout.gate import CALLER
from hotbunk.rollout.server.plane import Plane, Shared, answer
from hotbunk.rollout.server.versions import VERSION_QUERY, version_of
from hotbunk.rollout.server.words import Body

router = APIRouter(
    tags=["control"],
    responses={
        409: {"description": "Not now: the state it needs is another."},
        503: {"description": "The engine is lost, or could not in time; the body says why."},
    },
)

Owner = Annotated[str, Query(pattern=r"^[\w.:/-]{1,64}$", description="Whose pause it is.")]
Seconds = Annotated[float | None, Query(ge=0, le=86_400, allow_inf_nan=False)]
Level = Annotated[StrictInt, Field(ge=0, le=2)] | Literal["0", "1", "2"]


class SleepBody(Body):
    """The same as the query of /sleep."""

    level: Level | None = None
    mode: PauseMode | None = None
    clear_cache: bool | None = None
    keep_kv: bool = False


class TagsBody(Body):
    """``null`` is every tag, ``[]`` is none."""

    tags: list[Tag] | None = None


class ReleaseBody(TagsBody):
    """What is released, and what becomes of its content."""

    retention: Retention = Retention.DISCARD
    keep_kv: bool = False


class KVBody(Body):
    """``keep_kv``: save the KV of frozen requests."""

    keep_kv: bool = False


class AbortBody(Body):
    """Ids of requests or of responses; ``null`` is all."""

    request_ids: list[Annotated[str, Field(max_length=256)]] | None = None


@router.post("/pause")
async def pause(
    plane: Shared,
    mode: Annotated[PauseMode, Query()] = PauseMode.ABORT,
    clear_cache: Annotated[bool, Query()] = True,
    reject: Annotated[bool, Query()] = False,
    owner: Owner = CALLER,
    deadline: Seconds = None,
    min_start_version: Annotated[str | None, Query(pattern=VERSION_QUERY)] = None,
) -> Response:
    """Hold generation shut; answers when no step runs and none can start. What began before
    ``min_start_version`` (``7`` or ``0.7``) is ended, also by keep and wait."""
    least = None
    if min_start_version is not None:
        if mode is PauseMode.ABORT:
            raise _wrong("min_start_version", "goes with keep or wait: abort ends everything")
        least = version_of(min_start_version, await plane.newest())
    report = await plane.replica.pause_generation(
        mode,
        clear_cache=clear_cache,
        reject=reject,
        owner=owner,
        deadline=deadline,
        min_start_version=least,
    )
    return told(plane, "paused", report)


@router.post("/resume")
async def resume(plane: Shared, owner: Owner = CALLER) -> Response:
    """End the owner's pause; generation opens when nobody holds one."""
    await plane.replica.resume_generation(owner=owner)
    return told(plane, "resumed")


@router.get("/is_paused")
async def is_paused(plane: Shared) -> Response:
    """Whether any pause is held."""
    return answer({"is_paused": (await plane.replica.status()).is_paused})


@router.post("/sleep")
async def sleep(
    plane: Shared,
    level: Annotated[Literal["0", "1", "2"] | None, Query()] = None,
    mode: Annotated[PauseMode | None, Query()] = None,
    clear_cache: Annotated[bool | None, Query()] = None,
    body: SleepBody | None = None,
) -> Response:
    """0: pause alone; 1 (default): weights to a backup; 2: weights are forgotten. KV goes."""
    body = body or SleepBody()
    asked = _one("level", level, None if body.level is None else str(body.level))
    how = _one("mode", mode, body.mode)
    clear = _one("clear_cache", clear_cache, body.clear_cache)
    report = await plane.replica.sleep(
        1 if asked is None else int(asked),
        mode=how or PauseMode.ABORT,
        clear_cache=True if clear is None else clear,
        keep_kv=body.keep_kv,
    )
    return told(plane, "asleep", report)


@router.post("/wake_up")
async def wake_up(
    plane: Shared, tags: Annotated[list[Tag] | None, Query()] = None, body: TagsBody | None = None
) -> Response:
    """Map the tags again; sleep ends when the last is back. Other pauses stay."""
    wanted = _one("tags", tags, body.tags if body else None)
    return told(plane, "awake", await plane.replica.wake_up(wanted))


@router.get("/is_sleeping")
async def is_sleeping(plane: Shared) -> Response:
    """Whether it sleeps; a mere pause is no sleep."""
    return answer({"is_sleeping": (await plane.replica.status()).is_sleeping})


@router.post("/release_memory_occupation")
async def release(plane: Shared, body: ReleaseBody | None = None) -> Response:
    """Give memory back without a pause of one's own: once what runs has ended."""
    body = body or ReleaseBody()
    report = await plane.replica.release(body.tags, retention=body.retention, keep_kv=body.keep_kv)
    return told(plane, "released", report)


@router.post("/resume_memory_occupation")
async def resume_memory(plane: Shared, body: TagsBody | None = None) -> Response:
    """Map memory again."""
    return told(plane, "resident", await plane.replica.resume(body.tags if body else None))


@router.post("/release_kv_cache_memory")
async def release_kv_cache(plane: Shared, body: KVBody | None = None) -> Response:
    """Give KV memory back; weights stay."""
    report = await plane.replica.release_kv_cache(keep_kv=body.keep_kv if body else False)
    return told(plane, "released", report)


@router.post("/resume_kv_cache_memory")
async def resume_kv_cache(plane: Shared) -> Response:
    """Map KV memory again, empty."""
    return told(plane, "resident", await plane.replica.resume_kv_cache())


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(plane: Shared) -> Response:
    """Forget KV that later requests could reuse."""
    return await _reset(plane, Cache.PREFIX)


@router.post("/reset_mm_cache")
async def reset_mm_cache(plane: Shared) -> Response:
    """Forget processed images, video and audio."""
    return await _reset(plane, Cache.MULTIMODAL)


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(plane: Shared) -> Response:
    """Forget what encoders made."""
    return await _reset(plane, Cache.ENCODER)


@router.post("/reset_caches")
async def reset_caches(
    plane: Shared, which: Annotated[list[Cache] | None, Query()] = None
) -> Response:
    """Forget these caches; without any: all there are."""
    await plane.replica.reset_caches(which)
    return told(plane, "reset")


@router.post("/abort_requests")
async def abort_requests(plane: Shared, body: AbortBody | None = None) -> Response:
    """End requests with their partial tokens, wherever they are; admission stays as it is."""
    wanted = None if body is None or body.request_ids is None else body.request_ids
    ids = None
    if wanted is not None:
        ids = [one for name in wanted for one in plane.responses.get(name, (name,))]
    report = await plane.replica.abort(ids)
    return answer({"aborted": report.aborted, "unknown": report.unknown, "ranks": plane.ranks})


@router.get("/status")
async def status(plane: Shared) -> Response:
    """One coherent snapshot of the replica."""
    return answer(await plane.replica.status())


@router.get("/memory")
async def memory(plane: Shared) -> Response:
    """What is resident now, as the device or the OS counts it."""
    return answer(await plane.replica.memory())


@router.get("/server_info")
async def server_info(plane: Shared) -> Response:
    """Which replica this is, and what its engine declares."""
    return answer(
        {
            "name": plane.replica.name,
            "boot": plane.boot,
            "model": plane.settings.model,
            "context": plane.settings.context,
            "capabilities": plane.replica.capabilities,
        }
    )


@router.get("/get_world_size")
async def get_world_size(plane: Shared) -> Response:
    """Receiver ranks of one update."""
    return answer({"world_size": plane.ranks})


async def _reset(plane: Plane, cache: Cache) -> Response:
    """What an engine does not have is forgotten already."""
    there = cache in plane.replica.capabilities.caches
    if there:
        await plane.replica.reset_caches([cache])
    return answer({"status": "reset" if there else "absent", "ranks": plane.ranks})


def told(plane: Plane, state: str, report: Any = None) -> Response:
    """A verb's end: what is so now, how many ranks said so, and the report."""
    content = {"status": state, "ranks": plane.ranks, "report": report}
    if isinstance(report, MemoryReport):
        content["resident_bytes"] = report.resident()
    return answer(content)


def _one(name: str, query: Any, body: Any) -> Any:
    """From the query or the body; both only if they agree."""
    if query is not None and body is not None and query != body:
        raise _wrong(name, "the body says another")
    return body if query is None else query


def _wrong(name: str, why: str) -> RequestValidationError:
    return RequestValidationError([{"loc": ("query", name), "msg": why, "type": "conflict"}])
