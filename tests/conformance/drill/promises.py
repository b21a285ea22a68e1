"""What must be true of a replica after a round, as sentences that are empty when it is."""

from __future__ import annotations

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
    handle: ReplicaHandle, outcome: Outcome, old: Version, new: Version
) -> list[str]:
    """Whether a replica is what its outcome says."""
    broken: list[str] = []
    status = await handle.status()
    version = status.versions.get(TARGET)
    serves = {Outcome.COMMITTED: new, Outcome.ROLLED_BACK: old}.get(outcome)
    if serves is not None:
        if status.health is not Health.OK or version != serves:
            broken.append(f"is {status.health.value} at {version}, not ok at {serves}")
        broken += await _serves(handle, golden(serves))
    elif outcome is Outcome.POISONED:
        if status.health is not Health.POISONED or version is not None:
            broken.append(f"is {status.health.value} at {version}, not poisoned")
        broken += await _serves(handle, None)
    elif outcome is Outcome.LOST:
        if status.health is not Health.LOST:
            broken.append(f"is {status.health.value}, not lost")
        broken += await _serves(handle, None)
    return broken


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
