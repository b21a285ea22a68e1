"""The actor that verl sends requests to. The replica behind it is the authority, not the actor.

The engine runs in a process of its own, a child of this one: whatever becomes of it, the actor can
say so. It dies with the actor. Which interpreter runs it is the configuration's to say
(``hotbunk.rollout_python``), so an engine keeps its own pins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hotbunk.rollout import process
from hotbunk.rollout.contract import (
    Deployment,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    TokenChunk,
    collect,
)
from hotbunk.rollout.errors import ReplicaLost, RequestRejected, UsageError, closest
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.process import ProcessHandle, ReplicaSpec
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.process.verbs import GENERATE, Generate
from hotbunk.rollout.process.wire_errors import to_wire
from hotbunk.rollout.status import Health
from hotbunk.trainer_hooks.verl.handle import Answer, Introduction, answered
from hotbunk.trainer_hooks.verl.payloads import payload

if TYPE_CHECKING:
    from hotbunk.trainer_hooks.verl.listening import Listening

log = logging.getLogger(__name__)
TOKEN_OUTPUT = "verl.workers.rollout.replica"
_SAMPLING = frozenset(field.name for field in msgspec.structs.fields(Sampling))
# What verl asks for that changes nothing where it has this value.
_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class ServerOptions(msgspec.Struct, frozen=True):
    """How a server takes verl's calls. Lengths are tokens; ``adapter``: which one requests use."""

    deployment: Deployment
    free_cache_engine: bool = True
    prompt_length: int = 512
    response_length: int = 512
    ignore_eos: bool = False
    seed: int | None = None  # of every request
    adapter: str | None = None


class RolloutServer:
    """verl's server, duck-typed, and the verbs of a :class:`ReplicaHandle` beside it.

    :param spec: a :class:`ReplicaSpec`, encoded.
    :param options: :class:`ServerOptions`, encoded.
    """

    def __init__(self, spec: bytes, options: bytes) -> None:
        self._spec = msgspec.msgpack.decode(spec, type=ReplicaSpec)
        self.options = msgspec.msgpack.decode(options, type=ServerOptions)
        self._started: ProcessHandle | None = None
        self._steps: int | None = None
        self._listening: Listening | None = None

    async def start(self) -> None:
        """Start the replica.

        :raises HotbunkError: what kept it from starting.
        """
        if self._started is None:
            # verl takes seconds to import, and its tokens' type is wanted with the first ones.
            loading = asyncio.create_task(asyncio.to_thread(import_module, TOKEN_OUTPUT))
            try:
                self._started = await process.start(self._spec)
            finally:
                await loading

    async def restart(self) -> None:
        """Start a lost replica anew, without content: a sync brings it. One that lives is left.

        Ray starts an actor that died anew, too, and then there is no replica yet.

        :raises HotbunkError: what kept it from starting.
        """
        if self._started is None:
            await self.start()
        elif (await self._started.status()).health is Health.LOST:
            await self._started.close()
            self._started = await process.start(self._spec)
            if self._listening is not None:
                self._listening.answer_from(self._started)

    async def listen(self, host: str) -> str:
        """Answer by HTTP, too, as verl asks its judges; where: ``host:port``. Once.

        :raises HotbunkError: what kept it from listening.
        """
        from hotbunk.trainer_hooks.verl.listening import Listening

        options = self.options
        self._listening = Listening()
        model = Path(str(self._spec.options["model"]))
        context = options.prompt_length + options.response_length
        await self._listening.start(self.replica, host, model, context)
        return self._listening.address

    async def close(self) -> None:
        """End the replica. Idempotent."""
        if self._started is not None:
            await self._started.close()

    @property
    def replica(self) -> ReplicaHandle:
        """The replica. :raises ReplicaLost: this actor is a dead one's successor, and has none yet."""
        if self._started is None:
            raise ReplicaLost("its actor died and was started anew", where=self._spec.name)
        return self._started

    # -- for handles --------------------------------------------------------------------------

    async def introduction(self) -> bytes:
        """What a handle must know, encoded."""
        return encode(Introduction(self._spec, self.replica.capabilities))

    async def verb(self, name: str, args: bytes) -> bytes:
        """Run a verb of the replica; what came of it, encoded."""
        return await answered(self.replica, name, args)

    async def stream(self, args: bytes) -> AsyncIterator[bytes]:
        """A request's chunks, each encoded."""
        try:
            request = msgspec.msgpack.decode(args, type=Generate).request
            async for chunk in self.replica.generate(request):
                yield encode(Answer(value=msgspec.Raw(encode(chunk))))
        # A boundary between processes: whatever is raised goes to who asked.
        except Exception as error:  # noqa: BLE001
            yield encode(Answer(error=to_wire(GENERATE, error)))

    # -- verl's: memory and pauses ------------------------------------------------------------

    @property
    def _sleeps(self) -> bool:
        options = self.options
        return options.free_cache_engine and options.deployment is not Deployment.STANDALONE

    async def sleep(self) -> None:
        """Make room for the other tenant of the device; a standalone engine has none.

        The base of an adapter is not sent again, so it keeps a backup; so does a judge's model.
        """
        if not self._sleeps:
            return
        discards = self.options.deployment is Deployment.HYBRID and self.options.adapter is None
        await self.replica.sleep(2 if discards else 1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo sleep, or a part of it. A judge that died is started anew: it loads its weights by itself."""
        if self.options.deployment is Deployment.COLOCATED:
            await self.restart()
        if self._sleeps:
            await self.replica.wake_up(tags)

    async def release_kv_cache(self) -> None:
        """Give KV memory back; weights stay where they are."""
        if self.options.free_cache_engine and self.options.deployment is not Deployment.COLOCATED:
            await self.replica.release_kv_cache()

    async def resume_kv_cache(self) -> None:
        """Map KV memory again, empty."""
        if self.options.free_cache_engine and self.options.deployment is not Deployment.COLOCATED:
            await self.replica.resume_kv_cache()

    async def clear_kv_cache(self) -> None:
        """Forget every cache of what older weights computed."""
        await self.replica.reset_caches(None)

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """End what runs, with its partial tokens, and hold what comes until generation resumes.

        ``reject_request``: what comes is turned away instead.
        """
        report = await self.replica.pause_generation(
            PauseMode.ABORT, clear_cache=reset_prefix_cache, reject=reject_request
        )
        return {"aborted_count": len(report.aborted), "request_ids": list(report.aborted)}

    async def resume_generation(self) -> None:
        """End the pause of :meth:`abort_all_requests`. A sleeper still sleeps."""
        await self.replica.resume_generation()

    async def wait_for_requests_to_drain(self) -> None:
        """Until nothing runs; sleep does this by itself."""

    async def set_global_steps(self, global_steps: int | None) -> None:
        """Only told to servers that were never synced: tokens carry the version that made them."""
        self._steps = global_steps

    async def start_profile(self, **kwargs: Any) -> None:
        """The engine has no profiler of verl's."""

    async def stop_profile(self) -> None:
        """As :meth:`start_profile`."""

    # -- verl's: tokens -----------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        **metadata: Any,
    ) -> Any:
        """Token ids in, verl's ``TokenOutput`` out.

        :raises UsageError: a sampling parameter that does not exist here.
        :raises HotbunkError: what the replica raises.
        """
        TokenOutput: Any = import_module(TOKEN_OUTPUT).TokenOutput  # noqa: N806

        media = {
            "image": image_data,
            "video": video_data,
            "audio": audio_data,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        request = GenerateRequest(
            request_id,
            tuple(int(token) for token in prompt_ids),
            self._sampling(sampling_params, len(prompt_ids)),
            self.options.adapter,
            media={kind: payload(data) for kind, data in media.items() if data is not None},
            metadata=metadata,
        )
        try:
            chunks = [chunk async for chunk in self.replica.generate(request)]
        except RequestRejected:
            return TokenOutput(
                token_ids=[], stop_reason="aborted", extra_fields={"global_steps": self._steps}
            )
        done = await collect(_again(chunks))
        routed = [row for chunk in chunks for row in chunk.routed_experts or ()]
        made = [span.version.step for span in done.spans]
        steps: list[int | None] = [*made] if made else [self._steps]
        return TokenOutput(
            token_ids=list(done.token_ids),
            log_probs=list(done.logprobs) if sampling_params.get("logprobs") else None,
            routed_experts=routed or None,
            stop_reason="aborted" if done.finish_reason is FinishReason.ABORT else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": steps[-1],
                "min_global_steps": steps[0],
                "max_global_steps": steps[-1],
                "num_cached_tokens": done.cached_tokens,
            },
        )

    def _sampling(self, asked: Mapping[str, Any], prompt: int) -> Sampling:
        """verl's names and defaults, as vLLM's and so as ours."""
        given = {key: value for key, value in asked.items() if value is not None}
        given.pop("logprobs", None)  # of the sampled token, and those always come
        for name, neutral in _NEUTRAL.items():
            if given.pop(name, neutral) != neutral:
                raise UsageError(f"{name}={asked[name]} is not supported", where=self._spec.name)
        limit = given.pop("max_new_tokens", None)
        limit = given.pop("max_tokens", limit)
        if limit is None:
            options = self.options
            room = options.prompt_length + options.response_length - prompt
            limit = min(options.response_length, room)
        for name in given:
            if name not in _SAMPLING:
                raise UsageError(
                    f"there is no sampling parameter {name!r}{closest(name, _SAMPLING)}",
                    where=self._spec.name,
                )
        given.setdefault("ignore_eos", self.options.ignore_eos)
        given.setdefault("seed", self.options.seed)
        given["top_k"] = max(int(given.get("top_k", 0)), 0)  # verl says -1 for off
        return msgspec.convert({**given, "max_tokens": max(int(limit), 1)}, Sampling, strict=False)


async def _again(chunks: Sequence[TokenChunk]) -> AsyncIterator[TokenChunk]:
    """Chunks that have come already, as they came."""
    for chunk in chunks:
        yield chunk
