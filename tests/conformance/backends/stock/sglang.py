"""SGLang's own server, as its guide for RL systems documents it (0.5.23).

Its pauses are ``abort``, ``retract`` (KV is dropped) and ``in_place`` (KV stays); it has no sleep levels:
what a release keeps is fixed at launch. Payloads are checked against the documented surface only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hotbunk.conformance.backends.stock.dialect import Ask, Call, Dialect, Reader, Seen, not_part
from hotbunk.rollout.capabilities import unsupported
from hotbunk.rollout.contract import (
    NATIVE,
    Cache,
    Capabilities,
    FinishReason,
    Gate,
    GenerateRequest,
    PauseMode,
    Retention,
    TokenChunk,
)
from hotbunk.rollout.errors import EngineFailed

_RELEASE, _RESUME = "/release_memory_occupation", "/resume_memory_occupation"
FLUSH_SECONDS = 5  # a flush right after a response is refused without a timeout


class SglangDialect(Dialect):
    kind = "sglang"
    unseen: ClassVar[Mapping[str, str]] = {
        "states": "it does not tell which weights are resident",
        "memory": "it does not tell what memory is mapped",
        "stale tokens": "its pauses answer no report",
        "bytes": "bytes of weights cannot be read from outside",
        "spans": "its stream says one version, and not which tokens it made",
    }

    @property
    def capabilities(self) -> Capabilities:
        pauses = self.ability("/pause_generation", "/continue_generation")
        saves = unsupported("it was started without --enable-memory-saver")
        memory = self.ability(_RELEASE, _RESUME) if self._flag("enable_memory_saver") else saves
        backs_up = self._flag("enable_weights_cpu_backup")
        no = unsupported("it has no route for it that the suite knows")
        return Capabilities(
            "sglang, stock",
            release=memory,
            release_kv_cache=memory,
            retentions=frozenset({Retention.BACKUP if backs_up else Retention.DISCARD}),
            pause={
                PauseMode.ABORT: pauses,
                PauseMode.KEEP: pauses,
                PauseMode.WAIT: unsupported("its pauses are abort, retract and in_place"),
            },
            keep_release=memory,
            abort=self.ability("/abort_request"),
            gate=Gate.ENGINE_PAUSE,
            digest=unsupported("its checksums are of its own kind"),
            request_versions=no,
            partial=no,
            caches=frozenset({Cache.PREFIX} if "/flush_cache" in self.surface.routes else ()),
            samples=NATIVE,
            stop_strings=unsupported("it leaves out the token that completes a stop string"),
            top_logprobs=NATIVE,
        )

    def pause(self, mode: str, *, clear_cache: bool) -> Call:
        if mode == PauseMode.KEEP:
            mode = "retract" if clear_cache else "in_place"
        return Call("/pause_generation", body={"mode": mode})

    def resume(self) -> Call:
        return Call("/continue_generation", body={})

    def sleep(self, level: Any, mode: str) -> Call:
        raise not_part("a sleep with levels")

    def release(self, tags: Collection[str], level: int) -> Call:
        return Call(_RELEASE, body={"tags": list(tags)})

    def wake(self, tags: Collection[str] | None) -> Call:
        return Call(_RESUME, body={"tags": None if tags is None else list(tags)})

    def reload(self, directory: Path, label: str) -> list[Call]:
        body = {"model_path": str(directory), "flush_cache": True, "weight_version": label}
        return [Call("/update_weights_from_disk", body=body)]

    def abort(self, request_id: str | None) -> Call:
        named = {"rid": request_id or "", "abort_all": request_id is None}
        return Call("/abort_request", body=named)

    def forget(self, cache: Cache) -> Call:
        return Call("/flush_cache", {"timeout": FLUSH_SECONDS})

    async def seen(self, ask: Ask) -> Seen:
        info = await ask(Call("/get_model_info", method="GET"))
        return Seen(label=str(info.get("weight_version", "")))

    def generate(self, request: GenerateRequest) -> Call:
        wants = request.sampling
        sampling = {
            "max_new_tokens": wants.max_tokens,
            "top_k": wants.top_k or -1,
            "sampling_seed": wants.seed,
            "stop_token_ids": list(wants.stop_token_ids),
            **{name: getattr(wants, name) for name in _SAME},
        }
        body = {
            "rid": request.request_id,
            "input_ids": list(request.prompt),
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": True,
            "top_logprobs_num": wants.logprobs,
        }
        return Call("/generate", body=body)

    def reader(self, request: GenerateRequest) -> Reader:
        return _Reader(request)

    def _flag(self, name: str) -> bool:
        pages = (self.surface.info.get(page) for page in ("/get_server_info", "/server_info"))
        return any(isinstance(page, dict) and bool(page.get(name)) for page in pages)


_SAME = ("temperature", "ignore_eos", "top_p", "min_p", "n")


class _Reader(Reader):
    """An event repeats what came before, unless the server streams increments."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._told: dict[int, int] = {}

    def read(self, event: Any) -> Iterator[TokenChunk]:
        if "error" in event:
            raise EngineFailed(f"the stream ends with {event['error']}")
        meta, index = event["meta_info"], event.get("index", 0)
        said, top = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
        told = self._told.get(index, 0)
        if len(said) >= meta.get("completion_tokens", len(said)):  # all there is so far
            said, top = said[told:], top[told:]
        self._told[index] = told + len(said)
        reason = meta.get("finish_reason")
        yield TokenChunk(
            self._request.request_id,
            tuple(int(one[1]) for one in said),
            tuple(float(one[0]) for one in said),
            finish_reason=None if reason is None else FinishReason(reason["type"]),
            cached_tokens=meta.get("cached_tokens") or 0,
            index=index,
            top_logprobs=tuple(tuple((int(o[1]), float(o[0])) for o in one) for one in top)
            if self._request.sampling.logprobs
            else (),
        )
