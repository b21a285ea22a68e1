"""The server actor, its handle, and verl's BaseRollout over it: a real engine, a real Ray, no trainer."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from verl.workers.config import RolloutConfig

from hotbunk.rollout.contract import Deployment, GenerateRequest, PauseMode, Sampling, collect
from hotbunk.rollout.errors import (
    ReplicaLost,
    SyncFailed,
    Unsupported,
    UsageError,
    WeightsNotLoaded,
)
from hotbunk.rollout.process.messages import encode
from hotbunk.rollout.status import Health, ReplicaStatus
from hotbunk.trainer_hooks.verl import settings
from hotbunk.trainer_hooks.verl.handle import RayHandle
from hotbunk.trainer_hooks.verl.replica import server_name
from hotbunk.trainer_hooks.verl.rollout import HotbunkRollout
from hotbunk.trainer_hooks.verl.server import RolloutServer, ServerOptions

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
LORA = SimpleNamespace(lora_alpha=8)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """A Ray of our own; its sockets need a short path."""
    folder = tempfile.mkdtemp(prefix="vs", dir="/tmp")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RANK"] = "0"
    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80_000_000,
        _temp_dir=folder,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def config(**said: Any) -> RolloutConfig:
    told = {
        "name": "hotbunk_reference",
        "dtype": "float32",
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 16,
        "max_num_seqs": 8,
        **said,
    }
    return RolloutConfig(**told)


@pytest.fixture
def weights(assets: Path) -> dict[str, torch.Tensor]:
    return load_file(assets / "model" / "model.safetensors")


class Served:
    """A server, its handle, and the BaseRollout of a trainer's only worker."""

    def __init__(
        self,
        assets: Path,
        deployment: Deployment,
        adapter: str | None,
        number: int = 0,
        **said: Any,
    ) -> None:
        self.number = number
        self.config = config(**said)
        self.model = SimpleNamespace(local_path=str(assets / "model"))
        spec = settings.replica_spec(
            self.config, self.model, name=server_name(number), deployment=deployment, device="cpu"
        )
        options = ServerOptions(
            deployment,
            bool(self.config.free_cache_engine),
            self.config.prompt_length,
            self.config.response_length,
            adapter=adapter,
        )
        made = ray.remote(RolloutServer).options(
            name=server_name(number), num_cpus=0, max_restarts=-1
        )
        self.actor = made.remote(encode(spec), encode(options))

    async def start(self) -> Served:
        await self.actor.start.remote()
        self.handle = await RayHandle.of(self.actor)
        self.rollout = HotbunkRollout(self.config, self.model, None, self.number)
        return self

    async def generate(self, **sampling: Any) -> Any:
        told = {"temperature": 0.0, "logprobs": True, "max_tokens": 4, **sampling}
        return await self.actor.generate.remote(PROMPT, told, request_id="r")


@pytest.fixture
async def served(assets: Path) -> AsyncIterator[Any]:
    """``await served(deployment, **rollout keys)``: a server of the test's own."""
    made: list[Served] = []

    async def serve(
        deployment: Deployment = Deployment.HYBRID, adapter: str | None = None, **said: Any
    ) -> Served:
        one = Served(assets, deployment, adapter, **said)
        made.append(one)
        return await one.start()

    yield serve
    for one in made:
        await one.handle.close()


@pytest.fixture(scope="module")
async def standalone(assets: Path) -> AsyncIterator[Served]:
    """One server for all that only look at it, with weights in it at step 1."""
    one = await Served(assets, Deployment.STANDALONE, None, number=1).start()
    weights = load_file(assets / "model" / "model.safetensors")
    await one.rollout.update_weights(iter(weights.items()), global_steps=1)
    yield one
    await one.handle.close()


async def test_a_step_as_verls_own_trainer_takes_it(
    served: Any, weights: dict[str, torch.Tensor]
) -> None:
    """Sleep, wake weights, update, wake KV; the same step again fills what was discarded."""
    one = await served()
    with pytest.raises(WeightsNotLoaded):
        await one.generate()
    request = GenerateRequest("r", tuple(PROMPT), Sampling(max_tokens=2))
    with pytest.raises(WeightsNotLoaded):
        await collect(one.handle.generate(request))
    for step in (0, 0, 1):  # verl wakes replicas by updating to the step they are at
        await one.rollout.release()
        await one.rollout.resume(["weights"])
        await one.rollout.update_weights(iter(weights.items()), global_steps=step)
        await one.rollout.resume(["kv_cache"])
        done = await one.generate()
        assert len(done.token_ids) == len(done.log_probs) == 4
        assert done.stop_reason == "completed"
        assert done.extra_fields["global_steps"] == step


async def test_tokens_are_those_of_the_weights_that_were_sent(
    standalone: Served, assets: Path
) -> None:
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(assets / "model", attn_implementation="eager")
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)
    assert (await standalone.generate()).token_ids == whole[0, len(PROMPT) :].tolist()


async def test_a_refused_update_leaves_what_was(
    standalone: Served, weights: dict[str, torch.Tensor]
) -> None:
    one = standalone
    before = (await one.generate()).token_ids
    with pytest.raises(SyncFailed, match=r"unknown to the engine: model\.wings"):
        await one.rollout.update_weights(
            iter([*weights.items(), ("model.wings", torch.ones(2))]), global_steps=2
        )
    with pytest.raises(RuntimeError, match="died"):
        await one.rollout.update_weights(_dying(weights), global_steps=2)
    after = await one.generate()
    assert (after.token_ids, after.extra_fields["global_steps"]) == (before, 1)


def _dying(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights.items())[:3]
    raise RuntimeError("a trainer rank died")


async def test_other_wire_formats_are_refused_after_the_walk(served: Any) -> None:
    one = await served()
    walked = iter([("a", torch.ones(1))])
    with pytest.raises(Unsupported, match="delta_flush"):
        await one.rollout.update_weights(walked, wire_format="delta_flush")
    assert next(walked, None) is None  # a collective of all ranks


async def test_an_adapter_over_a_base_that_survives_sleep(
    served: Any, weights: dict[str, torch.Tensor]
) -> None:
    """verl sends the base once; nothing in verl says that it must survive."""
    one = await served(adapter=settings.ADAPTER)
    base = [(f"base_model.model.{name}", tensor) for name, tensor in weights.items()]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    down = torch.randn(4, 64)
    for step, scale in enumerate((0.0, 3.0, 0.0)):
        await one.rollout.release()
        await one.rollout.resume(["weights"])
        if step == 0:
            await one.rollout.update_weights(
                iter(base), global_steps=step, peft_config=LORA, base_sync_done=False
            )
        adapter = [
            (f"{layer}.lora_A.weight", down),
            (f"{layer}.lora_B.weight", torch.full((64, 4), scale)),
        ]
        await one.rollout.update_weights(
            iter(adapter), global_steps=step, peft_config=LORA, base_sync_done=True
        )
        await one.rollout.resume(["kv_cache"])
        done = await one.generate()
        assert all(torch.isfinite(torch.tensor(done.log_probs)))
        if step == 0:
            plain = done
        else:
            assert (done.log_probs == plain.log_probs) is (scale == 0.0)


async def test_what_runs_is_ended_and_what_comes_is_held_or_turned_away(
    standalone: Served,
) -> None:
    one = standalone
    await one.actor.abort_all_requests.remote()
    held = asyncio.ensure_future(_awaited(one.generate()))
    await until(one, lambda status: status.held == ("r",))
    await one.actor.resume_generation.remote()
    assert (await held).stop_reason == "completed"
    await one.actor.abort_all_requests.remote(reject_request=True)
    turned = await one.generate()
    assert (turned.stop_reason, turned.token_ids) == ("aborted", [])
    await one.actor.resume_generation.remote()


async def _awaited(work: Any) -> Any:
    return await work


async def until(one: Served, holds: Callable[[ReplicaStatus], bool]) -> None:
    """The test's own timeout bounds it."""
    while not holds(await one.handle.status()):  # noqa: ASYNC110 - another process has it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "deployment, said, away",
    [
        (Deployment.STANDALONE, {}, False),
        (Deployment.HYBRID, {"free_cache_engine": False}, False),
        (Deployment.COLOCATED, {}, True),
    ],
)
async def test_sleep_means_what_the_deployment_says(
    deployment: Deployment, said: dict[str, Any], away: bool, served: Any
) -> None:
    """A judge's weights come back by themselves; where nothing is to be freed, nothing is."""
    one = await served(deployment, load_format="auto", **said)
    before = (await one.generate()).token_ids
    await one.actor.sleep.remote()
    assert (await one.handle.status()).is_sleeping is away
    await one.actor.release_kv_cache.remote()
    await one.actor.resume_kv_cache.remote()
    await one.actor.wake_up.remote()
    assert (await one.generate()).token_ids == before


async def test_a_lost_engine_is_started_anew_under_the_same_actor(
    standalone: Served, weights: dict[str, torch.Tensor]
) -> None:
    one = standalone
    before = (await one.generate()).token_ids
    await one.actor.restart.remote()  # it lives: nothing happens
    assert (await one.handle.status()).versions
    pid = ray.get(one.actor.__ray_call__.remote(lambda self: self.replica.pid))
    os.kill(pid, signal.SIGKILL)
    await until(one, lambda status: status.health is Health.LOST)
    with pytest.raises(ReplicaLost):
        await one.handle.memory()
    await one.actor.restart.remote()
    await one.rollout.update_weights(iter(weights.items()), global_steps=1)
    assert (await one.generate()).token_ids == before


async def test_an_actor_that_died_comes_back_and_is_filled(
    standalone: Served, weights: dict[str, torch.Tensor]
) -> None:
    """Ray starts it anew under its handle; until it has an engine again, it is lost."""
    one = standalone
    before = (await one.generate()).token_ids
    pid = ray.get(one.actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    await until(one, lambda status: status.health is Health.LOST)
    while True:
        try:
            await one.actor.restart.remote()
            break
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(0.1)
    with pytest.raises(WeightsNotLoaded):
        await one.generate()
    await one.rollout.update_weights(iter(weights.items()), global_steps=1)
    assert (await one.generate()).token_ids == before


async def test_a_judge_answers_by_http_and_comes_back_by_itself(served: Any) -> None:
    """verl's reward loop knows judges by an address. What is asked asleep waits; who died loads its own weights."""
    one = await served(Deployment.COLOCATED, load_format="auto")
    address = await one.actor.listen.remote("127.0.0.1")
    async with aiohttp.ClientSession(f"http://{address}") as client:

        async def ask() -> tuple[int, Any]:
            said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            async with client.post(
                "/v1/chat/completions", json={"model": "judge", "temperature": 0, **said}
            ) as answer:
                return answer.status, (await answer.json()).get("choices", [{}])[0].get("message")

        first = await ask()
        assert first[0] == 200
        await one.actor.sleep.remote()
        assert not sum(arena.resident for arena in (await one.handle.memory()).arenas)
        asked = asyncio.create_task(ask())
        async with client.post("/pause") as refused:
            assert refused.status == 404  # tokens are all that can be had
        assert not asked.done()
        await one.actor.wake_up.remote()
        assert await asked == first
        pid = ray.get(one.actor.__ray_call__.remote(lambda self: self.replica.pid))
        os.kill(pid, signal.SIGKILL)
        await until(one, lambda status: status.health is Health.LOST)
        await one.actor.wake_up.remote()
        assert await ask() == first


async def test_the_engine_goes_with_its_actor(served: Any) -> None:
    one = await served()
    pid = ray.get(one.actor.__ray_call__.remote(lambda self: self.replica.pid))
    process = psutil.Process(pid)
    ray.kill(one.actor)
    await asyncio.to_thread(process.wait, 30)
    status = await one.handle.status()
    assert status.health is Health.LOST


async def test_errors_cross_the_actor_as_they_are(standalone: Served) -> None:
    one = standalone
    with pytest.raises(UsageError, match="level"):
        await one.handle.sleep(7)
    report = await one.handle.pause_generation(PauseMode.KEEP)
    assert report.mode is PauseMode.KEEP
    await one.handle.resume_generation()


async def test_sampling_that_does_not_exist_is_refused(standalone: Served) -> None:
    one = standalone
    for said, word in (({"repetition_penalty": 1.2}, "repetition_penalty"), ({"topk": 3}, "top_k")):
        with pytest.raises(UsageError, match=word):
            await one.generate(**said)


async def test_a_stream_through_the_handle(standalone: Served) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    request = GenerateRequest("s", tuple(PROMPT), sampling)
    done = await collect(standalone.handle.generate(request))
    assert len(done.token_ids) == 4
    assert done.spans[0].version.step == 1


async def test_an_engine_in_an_environment_of_its_own(
    served: Any, standalone: Served, weights: dict[str, torch.Tensor]
) -> None:
    """Another interpreter, in which neither verl nor Ray is installed."""
    other = Path(__file__).parents[3] / ".venv" / "bin" / "python"
    told = {"hotbunk": {"rollout_python": str(other)}}
    one = await served(Deployment.STANDALONE, custom=told)
    pid = ray.get(one.actor.__ray_call__.remote(lambda self: self.replica.pid))
    assert psutil.Process(pid).cmdline()[0] == str(other)
    await one.rollout.update_weights(iter(weights.items()), global_steps=1)
    assert (await one.generate()).token_ids == (await standalone.generate()).token_ids
