"""What must be true of a replica after a round, as sentences that are empty when it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from hotbunk.checkpoint_engine.policy import Outcome, ReplicaOutcome
from hotbunk.conformance.drill.plan import Fault
from hotbunk.rollout import errors
from hotbunk.rollout.backends.oracle import decode_token
from hotbunk.rollout.backends.oracle.model import DRAFT, PARAMETERS, state_of, weights_at
from hotbunk.rollout.backends.oracle.tokens import continuation, digest_of, weights_bits
from hotbunk.rollout.contract import (
    TARGET,
    Completion,
    GenerateRequest,
    Sampling,
    Version,
    collect,
)
from hotbunk.rollout.handle import ReplicaHandle
from hotbunk.rollout.status import Health

PROMPT = (1, 2, 3, 4)
TOKENS = 12
SHUT = 0.2  # seconds; an open engine has ended the request by then


def golden(version: Version) -> list[int]:
    """Tokens of healthy weights, found without an engine."""
    contents = {spec.name: data for spec, data in weights_at(version.step)}
    digests = [
        digest_of(state_of(group, {p.name: contents[p.name] for p in PARAMETERS[group]}))
        for group in (TARGET, DRAFT)
    ]
    return continuation(PROMPT, weights_bits(digests), version, TOKENS)


def of_outcome(fault: Fault, number: int, outcome: ReplicaOutcome) -> Iterator[str]:
    """Whether a replica came to what the contract allows."""
    concerned = fault.all_concerned or number == fault.replica
    allowed = fault.allowed() if concerned else frozenset({Outcome.COMMITTED})
    if outcome.outcome not in allowed:
        may = " or ".join(sorted(o.value for o in allowed))
        yield f"ended {outcome.outcome.value!r} and not {may} ({outcome.error or 'no error'})"
    if outcome.outcome is not Outcome.COMMITTED and not outcome.error:
        yield "failed without an error"


def of_stream(
    done: Completion | errors.HotbunkError, versions: tuple[Version, ...]
) -> Iterator[str]:
    """Whether a request that ran through the sync has tokens of whole weights only."""
    if isinstance(done, errors.HotbunkError):
        if not isinstance(done, errors.ContractError | errors.RequestRejected):
            yield f"a request ended in {type(done).__name__}: {done}"
        return
    bits = {version: decode_token(golden(version)[0]).weights for version in versions}
    for token in done.token_ids:
        made = decode_token(token)
        if made.version not in bits:
            yield f"a token says version {made.version}, which was never served"
        elif made.weights != bits[made.version]:
            yield f"a token of version {made.version} was made by other weights"


async def of_replica(
    handle: ReplicaHandle, outcome: Outcome, old: Version | None, new: Version, *, asleep: bool
) -> list[str]:
    """Whether a replica is what its outcome says.

    :param old: what it held before the sync; None: it slept without content.
    :param asleep: it slept before the sync.
    """
    broken: list[str] = []
    status = await handle.status()
    version, health = status.versions.get(TARGET), status.health
    if outcome is Outcome.COMMITTED:
        if health is not Health.OK or version != new:
            broken.append(f"is {health.value} at {version}, not ok at {new}")
        broken += await _serves(handle, golden(new))
    elif outcome is Outcome.ROLLED_BACK:
        if health is not Health.OK or version != old or status.is_sleeping != asleep:
            how = "asleep" if status.is_sleeping else "awake"
            broken.append(f"is {health.value}, {how}, at {version}, not as before at {old}")
        if not asleep:
            assert old is not None
            broken += await _serves(handle, golden(old))
    elif outcome is Outcome.FENCED:
        if health is not Health.OK or version != new:
            broken.append(f"is {health.value} at {version}, not fenced at {new}")
        broken += await _is_shut(handle)
    elif outcome is Outcome.POISONED:
        if health is not Health.POISONED or version is not None:
            broken.append(f"is {health.value} at {version}, not poisoned")
        broken += await _serves(handle, None)
    elif outcome is Outcome.LOST:
        if health is not Health.LOST:
            broken.append(f"is {health.value}, not lost")
        broken += await _serves(handle, None)
    return broken


async def _is_shut(handle: ReplicaHandle) -> list[str]:
    """Whether a new request waits: for a moment at least, nothing comes."""
    request = GenerateRequest("drill/shut", PROMPT, Sampling(0.0, max_tokens=TOKENS))
    asked = asyncio.ensure_future(collect(handle.generate(request)))
    done, _ = await asyncio.wait([asked], timeout=SHUT)
    await handle.abort([request.request_id])
    try:
        tokens = list((await asked).token_ids)
    except errors.HotbunkError:
        tokens = []
    return ["serves, and is fenced"] if done and tokens else []


async def _serves(handle: ReplicaHandle, expected: list[int] | None) -> list[str]:
    """Whether a new request gives these tokens (None: no token at all)."""
    request = GenerateRequest("drill/after", PROMPT, Sampling(0.0, max_tokens=TOKENS))
    try:
        tokens = list((await collect(handle.generate(request))).token_ids)
    except errors.HotbunkError as error:
        return [] if expected is None else [f"does not serve: {error}"]
    if expected is None:
        return [f"made {len(tokens)} tokens of weights that nobody may use"] if tokens else []
    return [] if tokens == expected else ["serves other tokens than its version's"]
