"""What Prometheus is told: the replica's own figures, read when asked, and counts of requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hotbunk.rollout.status import Health, ReplicaStatus

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GAUGES = {
    "running": "Requests behind the gate.",
    "held": "Requests that wait at the gate.",
    "paused": "1 while any pause is held.",
    "sleeping": "1 while the replica sleeps.",
    "servable": "1 while a request could be served if generation is open.",
    "healthy": "1 unless the replica is poisoned or lost.",
    "kv_blocks_total": "KV blocks there are.",
    "kv_blocks_used": "KV blocks in use.",
    "tokens_generated": "Tokens made since the engine started.",
    "cached_tokens": "Prompt tokens whose KV was found, since the engine started.",
    "preemptions": "Requests that lost their KV to others, since the engine started.",
}


class Metrics:
    """One server's registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._gauges = {
            name: Gauge(f"hotbunk_{name}", text, registry=self._registry)
            for name, text in _GAUGES.items()
        }
        self._finished = Counter(
            "hotbunk_responses",
            "Responses that ended, by reason.",
            ["reason"],
            registry=self._registry,
        )
        self._made = Counter(
            "hotbunk_response_tokens", "Tokens sent in responses.", registry=self._registry
        )
        self._first = Histogram(
            "hotbunk_first_token_seconds",
            "From a request to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first.observe(seconds)

    def tokens(self, count: int) -> None:
        """So many more tokens went out."""
        self._made.inc(count)

    def finished(self, reason: str) -> None:
        """A response ended; ``disconnect`` where nobody was left to read it."""
        self._finished.labels(reason).inc()

    def page(self, status: ReplicaStatus) -> bytes:
        """The page, in Prometheus' text format."""
        told = {
            "running": len(status.running),
            "held": len(status.held),
            "paused": status.is_paused,
            "sleeping": status.is_sleeping,
            "servable": status.servable,
            "healthy": status.health is Health.OK,
            **{
                name: getattr(status.backend, name)
                for name in _GAUGES
                if hasattr(status.backend, name) and name not in ("running", "paused")
            },
        }
        for name, value in told.items():
            self._gauges[name].set(float(value))
        return generate_latest(self._registry)
