"""vLLM, as the suite sees it: goldens from transformers, bytes read past it from ``/proc``.

Starting vLLM takes seconds, so one engine serves all cases: between two of them it is brought back
to where a fresh one would be (nothing in flight, version 0 sent whole and verified, caches empty,
generation open), and started anew if that cannot be done. ``fresh=True`` starts one for each case.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hotbunk.checkpoint_engine.source import specs_of
from hotbunk.conformance.backends import vllm_inside, vllm_places
from hotbunk.conformance.kit import (
    brought,
    check_told_apart,
    greedy,
    make_adapter,
    make_model,
    merged,
    save_model,
    save_tokenizer,
    text_of,
    version_of,
)
from hotbunk.conformance.scratch import Scratch
from hotbunk.conformance.transfers import MemoryTransfer
from hotbunk.conformance.under_test import BackendUnderTest, Tensors
from hotbunk.rollout.contract import (
    ADAPTER_PREFIX,
    FULL,
    TARGET,
    AbortReport,
    BackendStatus,
    Cache,
    Digests,
    Engine,
    GenerateRequest,
    MemoryReport,
    PauseMode,
    PauseReport,
    Retention,
    Scope,
    Tag,
    Ticket,
    TokenChunk,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.errors import HotbunkError
from hotbunk.rollout.kernels import as_bytes
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.status import Deadlines

# vLLM's attention on CPUs takes heads of 32 and more.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


class VllmUnderTest(BackendUnderTest):
    """Options go to the backend. ``family``, ``tied`` and ``tokenizer`` make the model directory, or
    ``model`` brings one: versions are then that model with noise; it is read, and not changed.
    """

    name = "vllm"
    prompts = (
        tuple(range(100, 170)),  # more than two blocks: its KV can be found again
        (11, 12, 13, 14, 15, 16, 17, 18, 19),
        (21, 32, 43, 54, 65, 76, 87, 98, 109, 120, 131, 142),
    )
    bucket_sizes = (1 << 20, 10_007, 1024)
    long_tokens = 200
    endless_tokens = 900  # of two engine cores one may be done before the other has begun
    case_deadline = 360.0  # two workers and a busy machine: an engine may start in it
    # Who is held while long requests drain must not run out of time because the machine is busy.
    deadlines = Deadlines(hold=10.0, drain=20.0, memory=20.0, update=20.0, inspect=2.0, grace=2.0)
    one_loop = True

    def __init__(
        self,
        *,
        family: str = "llama",
        tied: bool = False,
        tokenizer: bool = True,
        fresh: bool = False,
        model: str | None = None,
        **options: Any,
    ) -> None:
        self._options = {
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            **options,
        }
        self._fresh = fresh
        disk = None if model is None else brought(model)
        self._folder = Scratch()
        make = partial(make_model, family, tied=tied, **SIZES)
        if disk is not None:
            self._disk, tokenizer = disk, False  # its tokenizer is not ours
            make = partial(version_of, self._disk)
            tied = bool(make(0).config.tie_word_embeddings)
        else:
            self._disk = self._folder.path / "model"
            save_model(family, 0, self._disk, tied=tied, **SIZES)
            if tokenizer:
                save_tokenizer(self._disk)
        self._says = tokenizer
        self.expected_not_run = {
            "positional_draws_continue": "its draws depend on the steps before; it declares so",
            "groups_that_take_no_update": "there is one weight group, and it takes updates",
            "every_group_moves_with_an_update": "there is one weight group",
            "verification_reads_memory": "its buckets are written and compared in one call",
        }
        if not tied:
            self.expected_not_run["tied_tensors"] = "this model ties nothing; tied=true does"
        if not tokenizer:
            self.expected_not_run["stop_strings_end_a_response"] = "no tokenizer of ours"
        self._engine: Engine | None = None
        self._ranks: list[dict[str, Any]] = []  # of each worker: where its memory lies
        # Goldens and weights are asked for again and again; they never change.
        self.model = cache(make)
        self._weights = cache(self._weights_of)
        self._golden = cache(lambda prompt, version, n: greedy(self.model(version), prompt, n))
        self._adapter = cache(
            lambda name, version: make_adapter(self.model(0), name, version)  # shapes alone
        )
        self._merged = cache(
            lambda base, name, version: merged(self.model(base), self._adapter(name, version))
        )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the suite's own words are read
        try:
            self._create()  # says now what is wrong with the options
            if disk is not None:
                check_told_apart(
                    disk, self.prompts, lambda prompt, v: self.golden(prompt, v, self.tokens)
                )
        except BaseException:
            self.close()
            raise

    async def start(self) -> Engine:
        return Reused(self)

    async def finish(self) -> None:
        """Stop the engine, and remove the model directory that was made."""
        await self._drop()
        self.close()

    def close(self) -> None:
        self._folder.remove()

    async def engine(self) -> Engine:
        """The running engine as a fresh one: version 0, nothing in flight, generation open."""
        if self._engine is not None and (self._fresh or not await self._reset(self._engine)):
            await self._drop()
        if self._engine is None:
            engine = self._create()
            await engine.start()
            self._ranks = await self._places(engine)
            self._engine = engine
        return self._engine

    def weights(self, version: int) -> Tensors:
        return list(self._weights(version))

    def golden(self, prompt: Sequence[int], version: int, n: int) -> list[int]:
        return list(self._golden(tuple(prompt), version, n))

    def adapter(self, name: str, version: int) -> Tensors:
        tensors = self._adapter(name, version)
        return [
            (spec, as_bytes(tensors[spec.name]).numpy().tobytes())
            for spec in specs_of(tensors.items(), ADAPTER_PREFIX + name).values()
        ]

    def adapter_golden(
        self, prompt: Sequence[int], version: int, name: str, adapter_version: int, n: int
    ) -> list[int]:
        return greedy(self._merged(version, name, adapter_version), prompt, n)

    def text(self, tokens: Sequence[int]) -> str | None:
        return text_of(tokens) if self._says else None

    @property
    def _where(self) -> dict[str, Any]:
        """The first worker's."""
        return self._ranks[0]

    def read_weight(self, name: str) -> bytes:
        return vllm_places.read(self._ranks, name)

    def corrupt_weight(self, name: str) -> bool:
        return vllm_places.corrupt(self._ranks, name)

    def host_backup(self) -> int | None:
        return sum(map(vllm_places.backup, self._ranks))

    @property
    def _told(self) -> Path:
        """Where the suite's part in the workers looks for a word that breaks something."""
        engine: Any = self._engine
        return Path(engine._links.folder)

    def sabotage(self, point: str, how: str) -> bool:
        """In the adapter, for what it does itself; in the worker by a word left in a file.

        It takes offers and buckets in the loop that the suite is in, so nothing hangs there.
        """
        engine: Any = self._engine
        if point in vllm_inside.POINTS:
            vllm_inside.ask(self._told, point, how)
            return True
        if point in vllm_inside.RECEIVER:
            return how == "fail" and vllm_inside.fail_once(point)
        inside = vllm_inside.IN_ADAPTER

        async def broken(*_: Any) -> None:
            delattr(engine, inside[point])
            if how == "hang":
                await asyncio.Event().wait()
            raise RuntimeError(f"{point} breaks")

        setattr(engine, inside[point], broken)
        return True

    def starve(self, tag: Tag) -> bool:
        engine: Any = self._engine
        if not engine.capabilities.release:
            return False
        vllm_inside.ask(self._told, f"starve {tag.value}")
        return True

    async def kill(self) -> bool:
        os.kill(self._ranks[-1]["pid"], signal.SIGKILL)
        return True

    def resident(self, tag: Tag) -> int:
        return sum(vllm_places.resident(place, tag) for place in self._ranks)

    # -- inside -------------------------------------------------------------------------------

    def _create(self) -> Engine:
        engine: Any = create_backend("vllm", model=str(self._disk), **self._options)
        engine.worker_extension = vllm_inside.EXTENSION
        made: Engine = engine
        return made

    async def _places(self, engine: Engine) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await engine.everywhere(  # type: ignore[attr-defined]
            "hotbunk_addresses"
        )
        return found

    async def _reset(self, engine: Engine) -> bool:
        start = Version(0, 0)
        transfer = MemoryTransfer(self.weights(0), version=start)
        try:
            async with asyncio.timeout(self.deadlines.update):
                await engine.abort(None)
                await engine.pause_generation(PauseMode.ABORT, clear_cache=True)
                await engine.resume(None)
                report = await engine.update_weights(transfer, version=start)
                await engine.reset_caches(None)
                await engine.resume_generation()
                status = await engine.status()
        except (HotbunkError, TimeoutError):
            return False
        idle = not (status.running or status.waiting or status.frozen or status.paused)
        return report.verified == "applied" and idle

    async def _drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def _weights_of(self, version: int) -> Tensors:
        named = dict(self.model(version).named_parameters(remove_duplicate=False))
        return [
            (spec, as_bytes(named[spec.name]).numpy().tobytes())
            for spec in specs_of(named.items(), TARGET).values()
        ]


class Reused(Engine):
    """A case's view of the one engine: starting it resets that one, closing it leaves it be."""

    def __init__(self, owner: VllmUnderTest) -> None:
        self._owner = owner
        self._engine: Engine = owner._create()  # only for what it declares
        self.capabilities = self._engine.capabilities

    async def start(self) -> None:
        self._engine = await self._owner.engine()
        self.capabilities = self._engine.capabilities  # one elsewhere knows them only now
        self._engine.on_lost = self._tell  # whoever drives this one is to know

    def _tell(self, why: str) -> None:
        if self.on_lost is not None:
            self.on_lost(why)

    async def close(self) -> None:
        """The next case resets what this one leaves."""

    async def resume(self, tags: Collection[str] | None = None) -> MemoryReport:
        return await self._engine.resume(tags)

    async def release(
        self,
        tags: Collection[str] | None = None,
        *,
        retention: Retention = Retention.DISCARD,
        overrides: Mapping[str, Retention] | None = None,
        keep_kv: bool = False,
    ) -> MemoryReport:
        return await self._engine.release(
            tags, retention=retention, overrides=overrides, keep_kv=keep_kv
        )

    async def release_kv_cache(self, *, keep_kv: bool = False) -> MemoryReport:
        return await self._engine.release_kv_cache(keep_kv=keep_kv)

    async def resume_kv_cache(self) -> MemoryReport:
        return await self._engine.resume_kv_cache()

    async def open_transfer(self, ticket: Ticket) -> Transfer:
        opened: Transfer = await self._engine.open_transfer(ticket)  # type: ignore[attr-defined]
        return opened

    async def update_weights(
        self, transfer: Transfer, *, version: Version, scope: Scope = FULL
    ) -> UpdateReport:
        return await self._engine.update_weights(transfer, version=version, scope=scope)

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._engine.generate(request)

    async def pause_generation(
        self, mode: PauseMode = PauseMode.ABORT, *, clear_cache: bool = True
    ) -> PauseReport:
        return await self._engine.pause_generation(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._engine.resume_generation()

    async def abort(self, request_ids: Sequence[str] | None = None) -> AbortReport:
        return await self._engine.abort(request_ids)

    async def reset_caches(self, which: Collection[Cache] | None = None) -> None:
        await self._engine.reset_caches(which)

    async def status(self) -> BackendStatus:
        return await self._engine.status()

    async def digest(self, names: Collection[str] | None = None) -> Digests:
        return await self._engine.digest(names)

    async def memory(self) -> MemoryReport:
        return await self._engine.memory()
