"""What a vLLM server counts, from its ``/metrics``."""

from __future__ import annotations

import re

from hotbunk.rollout.backends.vllm_http.client import VllmClient

_LINE = re.compile(rb"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)
_STARTED = "process_start_time_seconds"
_STEPS = "vllm:iteration_tokens_total_count"
_PREEMPTIONS = "vllm:num_preemptions_total"
_KV = "vllm:kv_cache_usage_perc"


class Gauges:
    """The last reading; engines of one server are added up.

    ``kv_usage`` is a share, from 0 to 1.
    """

    def __init__(self, client: VllmClient) -> None:
        self.kv_usage = 0.0
        self.steps = self.preemptions = 0
        self._client = client
        self._started = 0.0

    async def read(self) -> Gauges:
        """:raises ReplicaLost: the server was started again, or is gone."""
        said = await self._client.text("/metrics")
        found: dict[str, list[float]] = {}
        for name, value in _LINE.findall(said):
            found.setdefault(name.decode(), []).append(float(value))
        started = sum(found.get(_STARTED, ()))
        if self._started and started != self._started:
            self._client.lose("another server answers: it was started again")
            raise self._client.gone()
        self._started = started
        self.steps = int(sum(found.get(_STEPS, ())))
        self.preemptions = int(sum(found.get(_PREEMPTIONS, ())))
        shares = found.get(_KV, [0.0])
        self.kv_usage = sum(shares) / len(shares)
        return self
