"""vLLM's own server (dev mode), as of 0.32. Weights go by a directory that its workers reload."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

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
    Tag,
    TokenChunk,
)
from hotbunk.rollout.errors import EngineFailed

_TOKEN = "token_id:"
_CACHES = {
    Cache.PREFIX: "/reset_prefix_cache",
    Cache.MULTIMODAL: "/reset_mm_cache",
    Cache.ENCODER: "/reset_encoder_cache",
}
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_STEPS = "vllm:iteration_tokens_total_count"


class VllmDialect(Dialect):
    kind = "vllm"
    unseen: ClassVar[Mapping[str, str]] = {
        "states": "it does not tell which weights are resident",
        "memory": "it does not tell what memory is mapped",
        "stale tokens": "its pauses answer no report",
        "bytes": "bytes of weights cannot be read from outside",
        "spans": "its completions do not say which version made a token",
    }

    @property
    def capabilities(self) -> Capabilities:
        pauses = self.ability("/pause", "/resume")
        no = unsupported("it has no route for it that the suite knows")
        return Capabilities(
            "vllm, stock",
            release=self.ability("/sleep", "/wake_up"),
            release_kv_cache=self.ability("/release_kv_cache_memory", "/wake_up"),
            retentions=frozenset({Retention.BACKUP, Retention.DISCARD}),
            pause=dict.fromkeys(PauseMode, pauses),
            keep_release=self.ability("/sleep"),
            abort=self.ability("/abort_requests"),
            gate=Gate.ENGINE_PAUSE,
            digest=unsupported("its checksums are of its own kind"),
            request_versions=no,
            partial=no,
            caches=frozenset(c for c, route in _CACHES.items() if route in self.surface.routes),
            samples=NATIVE,
            stop_strings=NATIVE,
            top_logprobs=NATIVE,
        )

    def pause(self, mode: str, *, clear_cache: bool) -> Call:
        return Call("/pause", {"mode": mode, "clear_cache": clear_cache})

    def resume(self) -> Call:
        return Call("/resume")

    def sleep(self, level: Any, mode: str) -> Call:
        return Call("/sleep", {"level": level, "mode": mode})

    def release(self, tags: Collection[str], level: int) -> Call:
        if set(tags) == {Tag.KV_CACHE}:
            return Call("/release_kv_cache_memory")
        if set(tags) == set(Tag):
            return Call("/sleep", {"level": level, "mode": PauseMode.WAIT.value})
        raise not_part(f"a release of {', '.join(tags) or 'nothing'} alone")

    def wake(self, tags: Collection[str] | None) -> Call:
        return Call("/wake_up", [("tags", tag) for tag in tags or ()])

    def reload(self, directory: Path, label: str) -> list[Call]:
        named = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        return [
            Call("/collective_rpc", body=named),
            Call("/update_weight_version", body={"new_version": label}),
        ]

    def abort(self, request_id: str | None) -> Call:
        # By the id that the user gave, and by the one that the response has.
        ids = [] if request_id is None else [request_id, f"cmpl-{request_id}"]
        return Call("/abort_requests", body={"request_ids": ids})

    def forget(self, cache: Cache) -> Call:
        return Call(_CACHES[cache])

    async def seen(self, ask: Ask) -> Seen:
        def get(path: str) -> Call:
            return Call(path, method="GET")

        metrics, paused, sleeping, info = await asyncio.gather(
            *(ask(get(path)) for path in ("/metrics", "/is_paused", "/is_sleeping", "/weight_info"))
        )
        counts = _counted(metrics)
        return Seen(
            paused=paused["is_paused"],
            sleeping=sleeping["is_sleeping"],
            running=int(sum(counts.get(name, 0) for name in _GAUGES)),
            steps=int(counts.get(_STEPS, 0)),
            label=str(info["weight_version"]),
        )

    def generate(self, request: GenerateRequest) -> Call:
        wants = request.sampling
        body = {
            "model": self.surface.model_name,
            "prompt": list(request.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "request_id": request.request_id,
            "logprobs": wants.logprobs,
            "stop": list(wants.stop),
            "stop_token_ids": list(wants.stop_token_ids),
            "include_stop_str_in_output": True,
            **{name: getattr(wants, name) for name in _SAME},
        }
        return Call("/v1/completions", body=body)

    def reader(self, request: GenerateRequest) -> Reader:
        return _Reader(request)


_SAME = ("temperature", "max_tokens", "seed", "ignore_eos", "top_k", "top_p", "min_p", "n")


class _Reader(Reader):
    """Ends are held back until the usage is told, which is the stream's last event."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._ends: list[TokenChunk] = []
        self._cached = 0

    def read(self, event: Any) -> Iterator[TokenChunk]:
        if "error" in event:
            raise EngineFailed(f"the stream ends with {event['error']}")
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached = max(self._cached, details.get("cached_tokens") or 0)
        for choice in event.get("choices", ()):
            chunk = self._chunk(choice)
            if chunk.finish_reason is None:
                yield chunk
            else:
                self._ends.append(chunk)

    def end(self) -> Iterator[TokenChunk]:
        for chunk in self._ends:
            yield msgspec.structs.replace(chunk, cached_tokens=self._cached)

    def _chunk(self, choice: Any) -> TokenChunk:
        said, ended = choice.get("logprobs") or {}, choice.get("finish_reason")
        top = tuple(
            _best(one, self._request.sampling.logprobs) for one in said.get("top_logprobs") or ()
        )
        return TokenChunk(
            self._request.request_id,
            tuple(choice.get("token_ids") or ()),
            tuple(said.get("token_logprobs") or ()),
            finish_reason=None if ended is None else FinishReason(ended),
            index=choice["index"],
            top_logprobs=top if self._request.sampling.logprobs else (),
        )


def _best(said: dict[str, float], n: int) -> tuple[tuple[int, float], ...]:
    pairs = [(int(token.removeprefix(_TOKEN)), value) for token, value in said.items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:n])


def _counted(metrics: Any) -> dict[str, float]:
    """Sums over engines, by name."""
    counts: dict[str, float] = {}
    for line in str(metrics).splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in (*_GAUGES, _STEPS):
            counts[name] = counts.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return counts
