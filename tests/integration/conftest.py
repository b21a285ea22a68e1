"""Fixtures of the integration tests: tiny models, engines that are closed, goldens from elsewhere."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbunk.checkpoint_engine.policy import SyncReport
from hotbunk.checkpoint_engine.source import TensorSource, WeightSource, module_source
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout import errors
from hotbunk.rollout.contract import (
    FULL,
    Completion,
    GenerateRequest,
    Manifest,
    PauseMode,
    Sampling,
    TokenChunk,
    Transfer,
    Version,
    collect,
)
from hotbunk.rollout.fingerprint import KIND
from hotbunk.rollout.handle import LocalHandle
from hotbunk.rollout.memory import HostPool
from hotbunk.rollout.registry import create_backend, open_transfer
from hotbunk.rollout.replica import Replica
from hotbunk.rollout.status import Deadlines
from hotbunk.trainer_hooks.recipes.models import build_tiny, load_model

_numbers = itertools.count()

BuildModel = Callable[..., Path]
MakeReplica = Callable[..., Awaitable[Replica]]
MakeEngine = Callable[..., Awaitable[Any]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> BuildModel:
    """``tiny(family, seed, tied)``: a model directory, built once a session."""
    root = tmp_path_factory.mktemp("models")

    def build(
        family: str = "llama", seed: int = 0, *, tied: bool = False, context: int = 256
    ) -> Path:
        path = root / f"{family}-{seed}-{tied}-{context}"
        if not path.exists():
            build_tiny(
                path,
                family=family,
                seed=seed,
                hidden=64,
                tied=tied,
                context=context,
                scale=8.0 if tied else 5.0,
            )
        return path

    return build


@pytest.fixture
async def engine(tiny: BuildModel) -> AsyncIterator[MakeEngine]:
    """``await engine(model_dir, **options)``: a started reference engine, closed afterwards."""
    made: list[Any] = []

    async def start(model: Path | None = None, **options: Any) -> Any:
        backend = create_backend("reference", model=str(model or tiny()), **options)
        made.append(backend)
        await backend.start()
        return backend

    yield start
    for backend in made:
        await backend.close()


@pytest.fixture
async def replica(tiny: BuildModel) -> AsyncIterator[MakeReplica]:
    """``await replica(model_dir, **options)``: a started replica of the reference engine."""
    made: list[Replica] = []

    async def start(
        model: Path | None = None,
        *,
        name: str = "",
        deadlines: Deadlines | None = None,
        **options: Any,
    ) -> Replica:
        backend = create_backend("reference", model=str(model or tiny()), **options)
        one = Replica(backend, name=name or f"replica{len(made)}", deadlines=deadlines)
        made.append(one)
        await one.start()
        return one

    yield start
    for one in made:
        await one.close()


def request(
    prompt: Sequence[int], max_tokens: int = 12, *, name: str = "", **sampling: Any
) -> GenerateRequest:
    """A request of a fresh id; greedy unless told otherwise."""
    sampling = {"temperature": 0.0, "ignore_eos": True, **sampling}
    drawn = Sampling(max_tokens=max_tokens, **sampling)
    return GenerateRequest(name or f"r{next(_numbers)}", tuple(prompt), drawn)


async def complete(target: Any, prompt: Sequence[int], *args: Any, **kw: Any) -> Completion:
    """One whole greedy response of an engine or a replica."""
    return await collect(target.generate(request(prompt, *args, **kw)))


async def first_tokens(stream: AsyncIterator[TokenChunk], count: int) -> list[int]:
    """The next ``count`` tokens of a stream that goes on."""
    got: list[int] = []
    while len(got) < count:
        got.extend((await anext(stream)).token_ids)
    return got


def prompts(count: int, *, shortest: int = 1, longest: int = 40, seed: int = 7) -> list[list[int]]:
    """Random byte prompts of various lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(0, 256, (n,), generator=draw).tolist() for n in lengths]


def golden(model_dir: Path, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
    """Greedy tokens by transformers' own ``generate``."""
    model = loaded(model_dir)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(t) for t in out[0, len(prompt) :]]


_models: dict[Path, Any] = {}


def loaded(model_dir: Path) -> Any:
    """The model of that directory, as a trainer has it; one object a session. Do not change it."""
    if model_dir not in _models:
        _models[model_dir] = load_model(model_dir)
    return _models[model_dir]


def source(model_dir: Path) -> TensorSource:
    """Weights of a model directory, from a trainer's module."""
    return module_source(loaded(model_dir))


async def failed(syncing: Awaitable[Any]) -> SyncReport:
    """The report of a sync that fails."""
    with pytest.raises(errors.SyncFailed) as caught:
        await syncing
    report = caught.value.report
    assert isinstance(report, SyncReport)
    return report


async def offered(source: WeightSource, version: Version, bucket: int = 4096) -> Transfer:
    """The receiver's end of a naive transfer, for engines driven without a manager."""
    manifest = Manifest(version, source.specs(), FULL, bucket, KIND)
    offer = await NaiveTransport().offer(source, manifest)
    return await open_transfer(offer.tickets[0])


async def until(true: Callable[[], bool]) -> None:
    """Wait for it, for ten seconds."""
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen within ten seconds")


MEMORY_VERBS = {"release", "resume", "release_kv_cache", "resume_kv_cache", "sleep", "wake_up"}


class Recording(LocalHandle):
    """A handle that writes down which verbs were called, with their tags."""

    def __init__(self, replica: Replica, log: list[str]) -> None:
        super().__init__(replica)
        self._log = log

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in MEMORY_VERBS | {"update_weights", "pause_generation", "resume_generation"}:
            log = super().__getattribute__("_log")

            def called(*args: Any, **kw: Any) -> Any:
                tags = args[0] if args and isinstance(args[0], list) else []
                log.append(" ".join([name, *(t.value for t in tags)]))
                return found(*args, **kw)

            return called
        return found


class Slow:
    """A source that waits before its fourth tensor until it is told to go on; ``touched``: it waits."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.go, self.touched = inner, threading.Event(), threading.Event()

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[Any]:
        for number, tensor in enumerate(self.inner.tensors()):
            if number == 3:
                self.touched.set()
                self.go.wait(20)
            yield tensor


class Frozen:
    """Greedy requests of ``length`` tokens on a replica of the reference engine, to be frozen.

    ``computed`` counts the tokens the engine computes after the freeze.
    """

    def __init__(
        self, target: Replica, prompts: list[list[int]], length: int = 60, **options: Any
    ) -> None:
        self.target, self.prompts, self.length = target, prompts, length
        self.streams = [target.generate(request(p, length, **options)) for p in prompts]
        self.begun: list[list[int]] = []
        self.computed = 0
        engine: Any = target.backend
        self._scheduler, runner = engine._scheduler, engine._runner
        step = runner.step

        def counted(plan: Any) -> Any:
            self.computed += sum(chunk.count for chunk in plan.chunks)
            return step(plan)

        runner.step = counted

    async def freeze(self, clear_cache: bool = False) -> None:
        """Catch them after a few tokens each."""
        self.begun = list(await asyncio.gather(*(first_tokens(s, 5) for s in self.streams)))
        await self.target.pause_generation(PauseMode.KEEP, clear_cache=clear_cache)
        self.computed = 0

    def made(self) -> list[int]:
        """Response tokens each has in the engine (more than were read)."""
        return [s.produced for s in self._scheduler.in_flight()]

    async def thaw(self) -> list[list[int]]:
        """Let them end; their responses."""
        await self.target.resume_generation()
        rest = await asyncio.gather(*(collect(s) for s in self.streams))
        self.target.backend.check_invariants()  # type: ignore[attr-defined]
        return [[*a, *b.token_ids] for a, b in zip(self.begun, rest, strict=True)]

    def goldens(self, model: Path) -> list[list[int]]:
        """What the model makes of them, uninterrupted."""
        return [golden(model, p, self.length) for p in self.prompts]


def _program(name: str) -> Any:
    """A module of programs/, which lies on nobody's path."""
    full = f"hotbunk_test_{name}"
    if full not in sys.modules:
        path = Path(__file__).parent / "programs" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


@pytest.fixture(scope="session")
def programs() -> Callable[[str], Any]:
    """``programs("crew")``: a module of programs/."""
    return _program


@pytest.fixture(scope="session")
def zygotes() -> Iterator[None]:
    """What second processes are forked from."""
    program = _program("crew")
    for imports in (program.LIGHT, program.HEAVY):
        program.zygote(imports)
    yield
    _program("crew").close_zygotes()


@pytest.fixture
async def crew(zygotes: None) -> AsyncIterator[Any]:
    """Starts second processes, and ends them."""
    made = _program("crew").Crew()
    yield made
    await made.close()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool()
    yield made
    made.close()


class Kit:
    """The helpers above, for test modules: pytest's importlib mode has no sibling imports."""

    request = staticmethod(request)
    complete = staticmethod(complete)
    first_tokens = staticmethod(first_tokens)
    prompts = staticmethod(prompts)
    golden = staticmethod(golden)
    loaded = staticmethod(loaded)
    source = staticmethod(source)
    frozen = Frozen
    failed = staticmethod(failed)
    offered = staticmethod(offered)
    until = staticmethod(until)
    recording = Recording
    slow = Slow
    MEMORY_VERBS = frozenset(MEMORY_VERBS)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    """Requests, prompts and goldens."""
    return Kit
