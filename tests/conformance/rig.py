"""What a case works with: a started replica, its engine, and shorthands."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from hotbunk.conformance.steps import Steps
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.contract import (
    FULL,
    TARGET,
    Capabilities,
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    Retention,
    Sampling,
    Scope,
    Tag,
    TokenChunk,
    UpdateReport,
    Version,
    collect,
)
from hotbunk.rollout.replica import Replica

E = TypeVar("E", bound=BaseException)
R = TypeVar("R")
T = TypeVar("T", bound=MemoryTransfer)


class NotApplicable(Exception):
    """The backend has nothing to try the case on (no ties, no second group, ...)."""


class Unseen(NotApplicable):
    """It cannot be seen, or asked for, from where the suite stands: raised by descriptions only."""


async def expect(error: type[E], doing: Awaitable[object]) -> E:
    """Await something that must raise ``error``; returns what was raised.

    :raises AssertionError: it did not raise.
    """
    try:
        got = await doing
    except error as raised:
        return raised
    if isinstance(got, Completion):
        came = f"tokens {list(got.token_ids)} came ({got.finish_reason.value})"
    else:
        came = f"{got!r} came back"
    raise AssertionError(f"{error.__name__} was to be raised, and {came}")


class Snapshot(NamedTuple):
    """Everything that a refused verb must leave alone."""

    groups: dict[str, str]
    kv: str
    health: str
    pauses: tuple[tuple[str, str], ...]
    weights_bytes: int
    kv_bytes: int


class Running:
    """A request that is being read."""

    def __init__(self, chunks: AsyncIterator[TokenChunk]) -> None:
        self.tokens: list[int] = []
        self._some = asyncio.Event()
        self.task = asyncio.create_task(collect(self._read(chunks)))

    async def _read(self, chunks: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
        async for chunk in chunks:
            self.tokens.extend(chunk.token_ids)
            if chunk.token_ids:
                self._some.set()
            yield chunk

    async def started(self) -> Running:
        """Until its first token is here."""
        first = asyncio.create_task(self._some.wait())
        await asyncio.wait({first, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            first.cancel()
            await self.task  # says why there is none
            raise AssertionError("the request ended without a token")
        return self

    async def goes_on(self) -> Running:
        """Until another token is here."""
        self._some.clear()
        return await self.started()

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self.task.done()

    async def result(self) -> Completion:
        """Its end."""
        return await self.task


class Rig:
    """One case's replica and engine under test."""

    def __init__(
        self, under_test: BackendUnderTest, engine: Engine, replica: Replica, rng: random.Random
    ) -> None:
        self.ut = under_test
        self.engine = engine
        self.replica = replica
        self.rng = rng
        self.notes: list[str] = []
        self.measured: dict[str, list[float]] = {}
        self._requests: list[Running] = []
        self._begun: list[asyncio.Task[Any]] = []
        self._steps: list[Steps] = []
        self._count = 0

    @property
    def caps(self) -> Capabilities:
        """What the engine declares (an engine elsewhere knows it once it is started)."""
        return self.engine.capabilities

    def note(self, text: str) -> None:
        """Something measured, for the matrix."""
        if text not in self.notes:
            self.notes.append(text)

    def measure(self, name: str, value: float) -> None:
        """The next figure of a series, for the reports."""
        self.measured.setdefault(name, []).append(value)

    def sees(self, what: str) -> bool:
        """Whether ``what`` can be looked at (see ``BackendUnderTest.unseen``); if not, a note."""
        if what in self.ut.unseen:
            self.note(f"{what} not looked at: {self.ut.unseen[what]}")
        return what not in self.ut.unseen

    def check_resident(self, tag: Tag, nbytes: int, why: str = "") -> None:
        """So many bytes of the tag are resident, where memory can be seen."""
        if self.sees("memory"):
            found = self.ut.resident(tag)
            assert found == nbytes, why or f"{found} bytes of {tag.value}, not {nbytes}"

    async def anew(self) -> None:
        """Close the engine, and go on with a fresh one, started as the first was."""
        await self.close()
        await self.replica.close()
        await self.ut.stop()
        self.engine = await self.ut.start()
        self.replica = self.ut.front(self.engine)
        await self.replica.start()

    # -- weights ------------------------------------------------------------------------------

    def transfer(self, version: int, **options: Any) -> MemoryTransfer:
        """A sender of the weights of ``version``; options as for :meth:`sender`."""
        return self.sender(MemoryTransfer, version, **options)

    def sender(
        self,
        kind: type[T],
        version: int,
        *,
        tensors: Tensors | None = None,
        label: Version | None = None,
        scope: Scope = FULL,
        **options: Any,
    ) -> T:
        """A sender of that kind: the weights of ``version`` (or ``tensors``), labelled 0.version."""
        options.setdefault("bucket_bytes", self.ut.bucket_sizes[0])
        return kind(
            self.ut.weights(version) if tensors is None else tensors,
            version=label or Version(0, version),
            scope=scope,
            **options,
        )

    async def send(
        self, transfer: MemoryTransfer, *, deadline: float | None = None
    ) -> UpdateReport:
        """Update the replica with it."""
        manifest = transfer.manifest
        return await self.replica.update_weights(
            transfer, version=manifest.version, scope=manifest.scope, deadline=deadline
        )

    async def load(self, version: int) -> UpdateReport:
        """A full update that must succeed, and what its users do after it."""
        report = await self.send(self.transfer(version))
        await self.ut.settle(self.replica)
        return report

    async def steps(self) -> Steps:
        """A new client that updates in steps; sessions of older ones are over."""
        self._steps.append(await self.ut.steps(self.replica))
        return self._steps[-1]

    def fed(self) -> list[str]:
        """Groups that a full update carries."""
        return sorted({spec.group for spec, _ in self.ut.weights(1)})

    def unfed(self) -> list[str]:
        """Groups that no update reaches: they are never discarded."""
        return sorted(set(self.caps.groups) - set(self.fed()))

    def off_device(self) -> Retention:
        """Some retention that really takes weights off the device."""
        for retention in (Retention.DISCARD, Retention.BACKUP):
            if retention in self.caps.retentions and self.caps.release:
                return retention
        raise NotApplicable("weights never leave the device")

    # -- requests -----------------------------------------------------------------------------

    def request(
        self, prompt: Sequence[int], tokens: int | None = None, **more: Any
    ) -> GenerateRequest:
        """A greedy request with a new id; what the model calls an end does not end it."""
        self._count += 1
        length = tokens or self.ut.tokens
        more.setdefault("sampling", Sampling(temperature=0, max_tokens=length, ignore_eos=True))
        return GenerateRequest(f"r{self._count}", tuple(prompt), **more)

    def submit(self, prompt: Sequence[int], tokens: int | None = None, **more: Any) -> Running:
        """Start reading a request in the background."""
        return self.read(self.request(prompt, tokens, **more))

    def read(self, request: GenerateRequest) -> Running:
        """Start reading this request in the background."""
        running = Running(self.replica.generate(request))
        self._requests.append(running)
        return running

    async def caught(self, *prompts: Sequence[int], endless: bool = False) -> list[Running]:
        """Long requests, each caught after its first token. ``endless``: the case will end them."""
        tokens = (endless and self.ut.endless_tokens) or self.ut.long_tokens
        running = [self.submit(prompt, tokens) for prompt in prompts]
        for request in running:
            await request.started()
        return running

    async def cut(self, running: Sequence[Running], version: int) -> None:
        """These, of the first prompts in order, go on; then they are dropped, and gone.

        All that came of each is what ``version`` makes of its prompt.
        """
        for one in running:
            await one.goes_on()
        for one in running:
            one.task.cancel()
        await asyncio.wait({one.task for one in running})
        for one, prompt in zip(running, self.ut.prompts, strict=False):
            want = self.ut.golden(prompt, version, len(one.tokens))
            assert one.tokens == want, f"tokens {one.tokens} and version {version} makes {want}"
        async with asyncio.timeout(self.ut.deadlines.drain):
            while (await self.replica.status()).backend.running:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def complete(
        self, prompt: Sequence[int], tokens: int | None = None, **more: Any
    ) -> Completion:
        """A request from beginning to end."""
        return await self.submit(prompt, tokens, **more).result()

    async def check_golden(self, version: int) -> None:
        """Every prompt's tokens are those of ``version``, and say so."""
        for prompt in self.ut.prompts:
            done = await self.complete(prompt)
            self.check_tokens(done, prompt, version)

    def check_tokens(
        self, done: Completion, prompt: Sequence[int], version: int, *, cut: bool = False
    ) -> None:
        """All its tokens are what ``version`` makes of ``prompt``; its span says so.

        ``cut``: it may have been ended before its time.
        """
        check_spans(done)
        ended = done.finish_reason
        assert cut or ended is not FinishReason.ABORT, f"ended with {ended}: {done.error}"
        want = self.ut.golden(prompt, version, len(done.token_ids))
        assert list(done.token_ids) == want, (
            f"tokens {list(done.token_ids)} and version {version} makes {want}"
        )
        made_by = {span.version for span in done.spans} if self.sees("spans") else set()
        assert made_by <= {Version(0, version)}, f"made by {version}, labelled {made_by}"

    def check_uncached(self, done: Completion, what: str) -> None:
        """None of its prompt came from a cache, where that is told. ``what`` would have."""
        if self.sees("cached tokens"):
            assert done.cached_tokens == 0, f"{done.cached_tokens} {what}"

    def begin(self, verb: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Start a verb in the background; it is given up with the case, if it has not ended."""
        self._begun.append(asyncio.create_task(verb))
        return self._begun[-1]

    async def moment(self) -> None:
        """Long enough for an engine that could make a token to have made one."""
        await asyncio.sleep(self.ut.moment)

    async def pausing(self) -> None:
        """Until a pause that was asked for is held; a wire does not keep the order of two calls."""
        async with asyncio.timeout(self.ut.deadlines.inspect):
            while not (await self.replica.status()).is_paused:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    # -- state --------------------------------------------------------------------------------

    async def states(self) -> dict[str, str]:
        """Group -> state, without the version."""
        status = await self.replica.status()
        return {name: state.partition("(")[0] for name, state in status.groups.items()}

    async def check_states(self, want: str, *, kv: str | None = None) -> None:
        """Every fed group is in state ``want`` (and the KV cache in ``kv``), where that is seen."""
        if not self.sees("states"):
            return
        status = await self.replica.status()
        states = await self.states()
        got = {name: states[name] for name in self.fed()}
        assert set(got.values()) == {want}, f"wanted {want}, the groups are {got}"
        assert kv is None or status.kv == kv, f"the KV cache is {status.kv}, not {kv}"

    async def label(self) -> Version | None:
        """The version that the target group says it has."""
        return (await self.replica.status()).versions.get(TARGET)

    async def snapshot(self) -> Snapshot:
        """What must not change when a verb is refused."""
        status = await self.replica.status()
        return Snapshot(
            dict(status.groups),
            status.kv,
            status.health,
            tuple((p.owner, p.mode) for p in status.pauses),
            *(self.ut.resident(tag) if self.sees("memory") else 0 for tag in Tag),
        )

    async def close(self) -> None:
        """Stop reading whatever is still read, give up verbs that were begun, and let go of sessions."""
        requests, self._requests = self._requests, []
        begun, self._begun = self._begun, []
        tasks = [*(request.task for request in requests), *begun]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._steps:
            await self._steps.pop().close()


def check_spans(done: Completion) -> None:
    """Spans are contiguous and cover every token; there is a logprob a token."""
    end = 0
    for span in done.spans:
        assert span.start == end, f"a gap or overlap in {done.spans}"
        assert span.end > span.start, f"an empty span in {done.spans}"
        end = span.end
    assert end == len(done.token_ids), f"{done.spans} do not cover {len(done.token_ids)} tokens"
    assert len(done.logprobs) == len(done.token_ids), "a logprob is missing or left over"


def check_aborted(done: Completion, *, retryable: bool | None = None) -> None:
    """It was ended before its time."""
    assert done.finish_reason is FinishReason.ABORT, f"finished with {done.finish_reason}"
    if retryable is not None:
        assert done.retryable is retryable, f"retryable is {done.retryable}"
        assert done.error, "nothing says why it ended"
