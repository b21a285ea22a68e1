"""Requests and what comes back: contract to vLLM and back again, one pump a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm.requests import Reading, drawing
from hotbunk.rollout.calls import engine_failed
from hotbunk.rollout.contract import (
    GenerateRequest,
    Sampling,
    TokenChunk,
    Version,
)


def sampling_params(sampling: Sampling) -> SamplingParams:
    """The contract's sampling as vLLM's; every field that changes what is drawn is passed.

    :raises UsageError: vLLM refuses a value.
    """
    try:
        return SamplingParams(
            **drawing(sampling),
            logprobs=sampling.logprobs,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.DELTA,
        )
    except (ValueError, VLLMClientError) as error:
        raise errors.UsageError(f"vLLM refuses the sampling: {error}") from error


class Stream(Reading):
    """One request, and what vLLM's output processor collects of it."""

    def __init__(
        self,
        request: GenerateRequest,
        collector: Any,
        processor: Any,
        labels: Mapping[str, Version],
        changed: Callable[[], None],
    ) -> None:
        super().__init__(request, collector.request_id, labels, changed)
        self._collector = collector
        self._processor = processor
        self._last = Version()
        self._pump = asyncio.create_task(self._run(), name=f"vllm {request.request_id}")

    async def _run(self) -> None:
        try:
            finished = False
            while not finished:
                out = self._collector.get_nowait() or await self._collector.get()
                finished = out.finished
                for completion in out.outputs:
                    for chunk in self._chunks(completion, out.num_cached_tokens or 0):
                        self.items.put_nowait(chunk)
        except errors.HotbunkError as error:
            self.items.put_nowait(error)
        except EngineDeadError as error:
            self.items.put_nowait(errors.ReplicaLost(f"vLLM's engine core died: {error}"))
        # A named boundary: whatever vLLM raises for a request becomes a typed error of its stream.
        except Exception as error:  # noqa: BLE001
            self.items.put_nowait(engine_failed("generate", error))
        finally:
            self._collector.close()
            self.ended.set()
            self._changed()

    def _chunks(self, completion: Any, cached: int) -> Iterator[TokenChunk]:
        """One output of vLLM as chunks that are of one version each.

        vLLM joins outputs that wait to be read, so one may span an update.
        """
        index, ids = completion.index, list(completion.token_ids)
        if index not in self.produced:
            self.cached += cached
        start = self.produced.get(index, 0)
        end = self.produced[index] = start + len(ids)
        reason = self._finished(index, completion.finish_reason)
        logprobs, top = _logprobs(ids, completion.logprobs, self.request.sampling.logprobs)
        for first, last, version in self._spans(completion, index, start, end):
            self._last = version
            cut = slice(first - start, last - start)
            yield TokenChunk(
                self.request.request_id,
                tuple(ids[cut]),
                logprobs[cut],
                version,
                reason if last == end else None,
                cached if first == 0 else 0,
                index=index,
                top_logprobs=top[cut],
            )

    def _spans(
        self, completion: Any, index: int, start: int, end: int
    ) -> list[tuple[int, int, Version]]:
        """``[start, end)`` cut where the weights changed, as the engine core stamped its steps."""
        if start == end:
            return [(start, end, self._last)]
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:  # vLLM tells only the last output; what it has noted so far is in its own state
            starts = self._noted(index)
        spans = []
        for n, (label, first) in enumerate(starts):
            last = starts[n + 1][1] if n + 1 < len(starts) else end
            if max(first, start) < min(last, end):
                spans.append((max(first, start), min(last, end), self._labels[label]))
        if not spans or spans[0][0] != start:
            raise self._unsaid(start, end)
        return spans

    def _noted(self, index: int) -> list[tuple[str, int]]:
        states = self._processor.request_states
        known = self._processor.external_req_ids.get(self.request.request_id, ())
        for key in known:
            state = states.get(key)
            if state is not None and state.request_index == index:
                return list(state.weight_version_starts)
        return []


def _logprobs(
    ids: list[int], said: Any, wanted: int
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Of each token drawn, and of its ``wanted`` likeliest alternatives."""
    if not ids:
        return (), ()
    if said is None or len(said) != len(ids):
        raise errors.EngineFailed("vLLM gave tokens without their log-probs")
    own = tuple(float(table[token].logprob) for token, table in zip(ids, said, strict=True))
    if not all(math.isfinite(value) for value in own):
        raise errors.EngineFailed("vLLM drew a token whose log-prob is not a number")
    if not wanted:
        return own, ()
    top = tuple(
        tuple(
            (token, float(entry.logprob))
            for token, entry in sorted(table.items(), key=lambda kv: -kv[1].logprob)[:wanted]
        )
        for table in said
    )
    return own, top
