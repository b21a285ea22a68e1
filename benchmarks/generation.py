"""Generation speed of a backend: the same requests, the same weights, one engine after another.

``python -m hotbunk.benchmarks.generation --model DIR [--peer-python PATH --peer vllm]`` runs the
reference engine here and the peer in its own interpreter, alternating, and prints one JSON row:
tokens a second (median, min, max) of both, and how many times the peer's we reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from hotbunk.rollout.contract import GenerateRequest, Sampling, collect
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64


async def measure(backend: str, options: dict[str, Any], batch: int, repeats: int) -> list[float]:
    """Tokens a second of ``batch`` greedy requests at once, ``repeats`` times after a warm-up."""
    replica = Replica(create_backend(backend, **options))
    await replica.start()
    rng = random.Random(0)
    rates = []
    try:
        for repeat in range(repeats + 1):
            prompts = [
                tuple(rng.randrange(100, 20_000) for _ in range(PROMPT_TOKENS))
                for _ in range(batch)
            ]
            sampling = Sampling(0.0, RESPONSE_TOKENS, ignore_eos=True)
            began = time.perf_counter()
            done = await asyncio.gather(
                *(
                    collect(replica.generate(GenerateRequest(f"{repeat}-{n}", p, sampling)))
                    for n, p in enumerate(prompts)
                )
            )
            seconds = time.perf_counter() - began
            tokens = sum(len(c.token_ids) for c in done)
            assert tokens == batch * RESPONSE_TOKENS
            if repeat:
                rates.append(tokens / seconds)
    finally:
        await replica.close()
    return rates


def row(name: str, ours: list[float], peer: list[float]) -> dict[str, Any]:
    """One row of a benchmark file."""
    mine, theirs = statistics.median(ours), statistics.median(peer)
    return {
        "name": name,
        "ours": mine,
        "peer": theirs,
        "limit": None,
        "unit": "tokens/s",
        "ratio_peer": mine / theirs,
        "ratio_limit": None,
        "n": len(ours),
        "spread": [min(ours), max(ours), min(peer), max(peer)],
    }


def _in_peer(python: str, arguments: list[str]) -> list[float]:
    done = subprocess.run(
        [python, "-m", "hotbunk.benchmarks.generation", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    rates: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peer", default="vllm")
    parser.add_argument("--peer-python")
    args = parser.parse_args()
    options = {"model": args.model, "dtype": args.dtype}
    if args.peer_python is None:
        rates = asyncio.run(measure(args.backend, options, args.batch, args.repeats))
        print(json.dumps(rates))
        return
    common = ["--model", args.model, "--batch", str(args.batch), "--dtype", args.dtype]
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(2):  # alternating, so that a busy minute hits both
        each = str(-(-args.repeats // 2))
        mine = [*common, "--repeats", each, "--backend", args.backend]
        theirs = [*common, "--repeats", each, "--backend", args.peer]
        ours += _in_peer(sys.executable, mine)
        peer += _in_peer(args.peer_python, theirs)
    print(json.dumps(row(f"generation_batch{args.batch}", ours, peer)))


if __name__ == "__main__":
    main()
