"""Many streams and many pauses, updates, releases and aborts at once: nobody is lost or lied to.

The weights reveal themselves: version ``v`` makes only tokens of class ``v`` (token modulo 64), so
each token says which weights made it; which token of the class it is depends on everything before
it, as transformers confirms afterwards. So a token that is lost, doubled, made from stale KV or
labelled with another version shows.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402

from hotbunk.checkpoint_engine.source import specs_of  # noqa: E402
from hotbunk.conformance.kit import make_model  # noqa: E402
from hotbunk.conformance.rig import check_spans  # noqa: E402
from hotbunk.conformance.transfers import MemoryTransfer  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.contract import (  # noqa: E402
    TARGET,
    Completion,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Version,
    collect_all,
)
from hotbunk.rollout.handle import LocalHandle  # noqa: E402
from hotbunk.rollout.partial import PartialRollout  # noqa: E402
from hotbunk.rollout.replica import Deadlines, Replica  # noqa: E402

pytestmark = pytest.mark.anyio
STREAMS, CYCLES, CLASSES, SEED = 64, 200, 64, 20240607


class Revealing:
    """A model whose version shows in every token."""

    def __init__(self) -> None:
        self.model = make_model("llama", 0)
        with torch.no_grad():
            self.model.model.embed_tokens.weight[:, 0] = 1.0  # a feature of every token
            for layer in self.model.model.layers:  # which nobody writes or reads
                attention, mlp = layer.self_attn, layer.mlp
                for writer in (attention.o_proj, mlp.down_proj):
                    writer.weight[0] = 0.0
                reading = (attention.q_proj, attention.k_proj, attention.v_proj)
                for reader in (*reading, mlp.gate_proj, mlp.up_proj):
                    reader.weight[:, 0] = 0.0
            self.model.model.norm.weight[0] = 1.0
            self.model.lm_head.weight[:, 0] = 0.0
        self._values = self.model.model.layers[1].self_attn.v_proj.weight.clone()
        self.become(0)

    @torch.no_grad()
    def become(self, version: int) -> Any:
        """The model at that version; also its values differ, so stale KV shows, too."""
        layer = self.model.model.layers[1].self_attn.v_proj
        noise = torch.Generator().manual_seed(version)
        changed = torch.randn(self._values.shape, generator=noise) * 0.3
        changed[:, 0] = 0.0
        layer.weight.copy_(self._values + changed)
        self.model.lm_head.weight[:, 0] = 0.0
        self.model.lm_head.weight[version % CLASSES :: CLASSES, 0] = 50.0
        return self.model

    def transfer(self, version: int) -> MemoryTransfer:
        named = dict(self.become(version).named_parameters())
        specs = specs_of(named.items(), TARGET).values()
        tensors = [(s, named[s.name].detach().numpy().tobytes()) for s in specs]
        return MemoryTransfer(tensors, version=Version(0, version), bucket_bytes=1 << 16)

    @torch.inference_mode()
    def best(self, context: list[int]) -> Any:
        return self.model(torch.tensor([context])).logits[0]


class Storm:
    """The clients, what happens to them, and what became of every request."""

    def __init__(self, target: Replica, weights: Revealing, seed: int) -> None:
        self.target, self.weights = target, weights
        self.rng = random.Random(seed)
        self.version = 0
        self.ending = False
        self.done: list[tuple[GenerateRequest, Completion]] = []
        self.refused = Counter[str]()
        self.dropped = self.asked = 0
        self.aborted: set[str] = set()
        self.stale: set[str] = set()  # kept KV over an update, by somebody's wish
        self.carried = 0
        self.ops = Counter[str]()
        self.kept = self.recomputed = 0
        prefix = random.Random(1)
        self.prefixes = [[prefix.randrange(256) for _ in range(24)] for _ in range(4)]

    # -- clients ------------------------------------------------------------------------------

    def request(self, rng: random.Random, client: int) -> GenerateRequest:
        self.asked += 1
        prompt = (*rng.choice(self.prefixes)[: rng.randrange(1, 25)], rng.randrange(256))
        wants = Sampling(0.0, max_tokens=rng.randrange(1, 40), n=1 if client % 4 else 2)
        return GenerateRequest(f"c{client}-{self.asked}", prompt, wants)

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        partial = PartialRollout([LocalHandle(self.target)])
        while not self.ending:
            request = self.request(rng, number)
            if number % 4 == 1:
                result = await partial.generate(request)
                self.carried += result.continuations
                self.done.append((request, result.completion))
            elif number % 4 == 2 and rng.random() < 0.3:
                await self.drop(request, rng.randrange(6))
            else:
                try:
                    for one in await collect_all(self.target.generate(request)):
                        self.done.append((request, one))
                except errors.ContractError as error:
                    self.refused[type(error).__name__] += 1
                    await asyncio.sleep(0.01)

    async def drop(self, request: GenerateRequest, after: int) -> None:
        """Go away after so many chunks."""
        stream = self.target.generate(request)
        try:
            async for _ in stream:
                after -= 1
                if after < 0:
                    break
        except errors.ContractError as error:
            self.refused[type(error).__name__] += 1
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        self.dropped += 1

    # -- what happens -------------------------------------------------------------------------

    async def steps(self, count: int) -> None:
        """Until the engine has made so many more steps (or stands still)."""
        before = (await self.target.status()).backend.steps
        for _ in range(100):
            if (await self.target.status()).backend.steps >= before + count:
                return
            await asyncio.sleep(0.002)

    async def update(self, kept_kv: bool = False) -> None:
        self.version += 1
        if kept_kv:
            self.stale |= set((await self.target.status()).running)
        transfer = self.weights.transfer(self.version)
        await self.target.update_weights(transfer, version=Version(0, self.version))

    async def paused(self) -> None:
        """A pause of any kind, and an update, a KV release or nothing under it."""
        rng = self.rng
        mode, clear = rng.choice([*PauseMode, PauseMode.KEEP]), rng.random() < 0.5
        keeps = mode is PauseMode.KEEP and not clear
        owners = ["caller", "other"][: 2 if rng.random() < 0.3 else 1]
        pause = self.target.pause_generation
        await asyncio.gather(*(pause(mode, clear_cache=clear, owner=owner) for owner in owners))
        what = rng.choice(["nothing", "update", "kv", "kv and update", "update and kv"])
        kv_away = False
        if what.startswith("update"):
            await self.update(kept_kv=keeps)
        if "kv" in what:
            report = await self.target.release_kv_cache(keep_kv=rng.random() < 0.5)
            self.kept += report.kept_requests
            self.recomputed += report.recomputed_requests
            kv_away = True
        if what.endswith("and update"):
            await self.update()
        if kv_away:
            await self.target.resume_kv_cache()
        await self.target.resume_generation(owner="other")
        await self.target.resume_generation()

    async def slept(self) -> None:
        """Sleep of either level, and the wake that belongs to it."""
        level = self.rng.choice([0, 1, 1, 2])
        mode = self.rng.choice([PauseMode.ABORT, PauseMode.KEEP])
        keep_kv = level == 1 and mode is PauseMode.KEEP and self.rng.random() < 0.5
        report = await self.target.sleep(level, mode=mode, clear_cache=not keep_kv, keep_kv=keep_kv)
        self.kept += report.kept_requests
        if level == 2:
            await self.target.wake_up(["weights"])
            await self.update()
        await self.target.wake_up()

    async def cycle(self) -> None:
        await self.steps(self.rng.randrange(12))
        what = self.rng.choices(
            ["pause", "sleep", "update", "abort", "reset"], [100, 60, 6, 30, 4]
        )[0]
        self.ops[what] += 1
        if what == "pause":
            await self.paused()
        elif what == "sleep":
            await self.slept()
        elif what == "update":  # drains first
            await self.update()
        elif what == "abort":
            running = (await self.target.status()).running
            chosen = self.rng.sample(running, min(3, len(running)))
            self.aborted |= set(chosen)
            await self.target.abort(chosen)
        else:
            await self.target.reset_caches()

    async def run(self, cycles: int) -> None:
        clients = [asyncio.create_task(self.client(n)) for n in range(STREAMS)]
        try:
            for _ in range(cycles):
                await self.cycle()
                gone = [c for c in clients if c.done()]
                assert not gone, f"a client ended: {gone[0].exception()!r}"
            self.ending = True
            async with asyncio.timeout(30):
                await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)

    # -- what became of them ------------------------------------------------------------------

    def check_ends(self) -> None:
        """Every request ended as it may, and every token is of the version it says."""
        ends = Counter[str]()
        for request, done in self.done:
            check_spans(done)
            ends[done.finish_reason] += 1
            if done.finish_reason is FinishReason.LENGTH:
                assert len(done.token_ids) == request.sampling.max_tokens, request
            else:
                assert done.finish_reason is FinishReason.ABORT
                assert done.retryable or request.request_id in self.aborted, done
            for span in done.spans:
                classes = {t % CLASSES for t in done.token_ids[span.start : span.end]}
                assert classes == {span.version.step % CLASSES}, f"{span} and tokens of {classes}"
        seen = Counter((r.request_id, d.index) for r, d in self.done)
        assert max(seen.values()) == 1, "a response came twice"
        assert ends["length"] > 100
        assert ends["abort"] > 100

    def check_tokens(self, most: int) -> int:
        """Transformers makes the same tokens, each span under its own weights; how many."""
        by_version: dict[int, list[tuple[list[int], int, int]]] = defaultdict(list)
        fresh = [(r, d) for r, d in self.done if r.request_id not in self.stale]
        random.Random(0).shuffle(fresh)
        fresh.sort(key=lambda pair: len(pair[1].spans), reverse=True)  # where things can go wrong
        for request, done in fresh[:most]:
            whole, p = [*request.prompt, *done.token_ids], len(request.prompt)
            for span in done.spans:
                by_version[span.version.step].append((whole, p + span.start, p + span.end))
        checked = 0
        for version, spans in by_version.items():
            self.weights.become(version)
            for whole, start, end in spans:
                logits = self.weights.best(whole[: end - 1])[start - 1 :]
                made = torch.tensor(whole[start:end])
                chosen = logits.gather(1, made[:, None]).squeeze(1)
                assert bool((logits.amax(-1) - chosen < 1e-3).all()), (version, start, end)
                checked += end - start
        return checked


@pytest.fixture(scope="module")
def revealing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Revealing, Path]:
    weights = Revealing()
    path = tmp_path_factory.mktemp("storm") / "model"
    weights.become(0).save_pretrained(path)
    return weights, path


def test_the_weights_reveal_themselves(revealing: Any) -> None:
    """Each version makes tokens of its own class, and those depend on the context."""
    weights, _ = revealing
    rng = random.Random(3)
    contexts = [[rng.randrange(256) for _ in range(12)] for _ in range(40)]
    for version in (0, 1, 63, 64, 130):
        weights.become(version)
        made = [int(weights.best(c)[-1].argmax()) for c in contexts]
        assert {t % CLASSES for t in made} == {version % CLASSES}
        assert len(set(made)) == 4, "the context does not show"


@pytest.mark.slow
async def test_64_streams_through_200_cycles_h2_h4_k1_v6_v12(revealing: Any, replica: Any) -> None:
    """No request lost, doubled or stuck; every token by the weights it names; nothing leaks."""
    weights, path = revealing
    target = await replica(
        path,
        block_size=8,
        kv_cache_tokens=768,
        max_num_seqs=48,
        max_num_batched_tokens=256,
        deadlines=Deadlines(hold=60.0, drain=30.0),
    )
    storm = Storm(target, weights, SEED)
    async with asyncio.timeout(90):
        await storm.run(CYCLES)
    storm.check_ends()
    assert storm.check_tokens(500) > 1000
    status = await target.status()
    assert (status.running, status.held, status.is_paused, status.health) == ((), (), False, "ok")
    assert status.backend.kv_blocks_used == 0
    assert (status.backend.running, status.backend.waiting) == ((), ())
    assert status.versions[TARGET] == Version(0, storm.version)
    assert target.backend._streams == {}
    target.backend.check_invariants()
    await target.check_invariants()
    # It was a storm: all of it happened.
    assert storm.version > 40
    assert min(storm.ops.values()) > 0
    assert storm.carried > 20
    assert storm.dropped > 10
    assert storm.kept > 20
    assert storm.recomputed > 20
    assert status.backend.preemptions > 0
    assert status.backend.cached_tokens > 0
    assert any(len(done.spans) > 1 for _, done in storm.done)
    last = msgspec.structs.replace(storm.request(random.Random(0), 1), request_id="after")
    [done] = await collect_all(target.generate(last))
    assert done.finish_reason is FinishReason.LENGTH
