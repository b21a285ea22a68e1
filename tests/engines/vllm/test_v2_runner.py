"""vLLM's V2 model runner, SIMULATED: it needs Triton and never runs here.

What is real: vLLM's own scheduler, told that the runner is V2, and the payloads it makes (what a
frozen request is sent as after a resume, whose KV it may use); the runner's own bookkeeping, which
takes those payloads (``finish_requests``, ``add_requests``) on stand-ins; and the signatures of
what the adapter reaches into.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.triton_utils import HAS_TRITON
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from hotbunk.conformance.backends.vllm import SIZES
from hotbunk.conformance.kit import save_model
from hotbunk.rollout.backends.vllm.adapters import PATH
from hotbunk.rollout.backends.vllm.worker import _temper

BLOCK = 16
PROMPT = list(range(100, 140))  # two whole blocks, and a half
V2 = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", 0, tmp_path_factory.mktemp("v2") / "model", **SIZES)


class Core:
    """A scheduler, and a runner that says one token a step. ``said``: the payloads, in order."""

    def __init__(self, config: VllmConfig) -> None:
        layers = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        config.cache_config.num_gpu_blocks = 64
        groups = [KVCacheGroupSpec(["layer"], layers)]
        kv = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        manager = StructuredOutputManager(config)
        self.scheduler = Scheduler(config, kv, manager, BLOCK)
        self.said: list[SchedulerOutput] = []

    def add(self, name: str, salt: str = "0.0", adapter: LoRARequest | None = None) -> None:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                name,
                PROMPT,
                params,
                None,
                lora_request=adapter,
                cache_salt=salt,
                block_hasher=self._hasher,
            )
        )

    def step(self, token: int = 7) -> SchedulerOutput:
        said = self.scheduler.schedule()
        told = copy.deepcopy(said)  # as it is sent: the scheduler goes on with the same lists
        self.said.append(told)
        names = list(said.num_scheduled_tokens)
        order = {name: n for n, name in enumerate(names)}
        out = ModelRunnerOutput(names, order, [[token] for _ in names])
        self.scheduler.update_from_output(said, out)
        return told

    def pause(self, *, clear_cache: bool) -> None:
        """As vLLM's ``pause_scheduler("keep")`` does, once nothing is under way."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if clear_cache:
            assert self.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)


def configured(model: Path, *, v2: bool, patch: pytest.MonkeyPatch, **more: Any) -> VllmConfig:
    """vLLM's own configuration; V2 is chosen after it was checked, as the check wants Triton."""
    patch.setenv(V2, "0")
    args = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        block_size=BLOCK,
        enforce_eager=True,
        async_scheduling=False,
        **more,
    )
    config = args.create_engine_config()
    patch.setenv(V2, str(int(v2)))
    assert config.use_v2_model_runner is v2
    return config


@pytest.fixture(params=[True, False], ids=["V2", "V1"])
def v2(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def core(v2: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(configured(model, v2=v2, patch=monkeypatch))


@pytest.mark.skipif(HAS_TRITON, reason="there is Triton: run it for real")
def test_it_cannot_start_here(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(V2, "1")
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
        EngineArgs(model=str(model), skip_tokenizer_init=True).create_engine_config()


def test_nothing_is_scheduled_while_paused_and_all_is_computed_again_after(
    core: Core, v2: bool
) -> None:
    """V2 is sent a resumed request as a new one, with all of its tokens and none of its KV."""
    core.add("a")
    for _ in range(5):
        core.step()
    core.pause(clear_cache=True)
    still = core.step()
    assert still.total_num_scheduled_tokens == 0
    core.resume()
    first = core.step()
    assert first.num_scheduled_tokens == {"a": len(PROMPT) + 5}
    if not v2:
        assert first.scheduled_new_reqs == []
        assert first.scheduled_cached_reqs.resumed_req_ids == {"a"}
        return
    [again] = first.scheduled_new_reqs
    assert again.prefill_token_ids == [*PROMPT, *[7] * 5]
    assert again.num_computed_tokens == 0
    assert len(again.block_ids[0]) == 3
    assert first.scheduled_cached_reqs.req_ids == []
    # The runner must let go of what it has of it, in this step or in the empty one before.
    assert "a" in (still.preempted_req_ids or set()) | (first.preempted_req_ids or set())


def test_without_clearing_it_goes_on_where_it_was(core: Core) -> None:
    """Which is why the report of such a pause counts stale tokens."""
    core.add("a")
    for _ in range(3):
        core.step()
    core.pause(clear_cache=False)
    assert core.step().total_num_scheduled_tokens == 0
    core.resume()
    said = core.step()
    assert said.num_scheduled_tokens == {"a": 1}
    assert said.scheduled_new_reqs == []
    assert not said.scheduled_cached_reqs.resumed_req_ids


@pytest.mark.parametrize("salt", ["0.0", "0.1"])
def test_kv_is_found_by_version(core: Core, salt: str) -> None:
    """Of one version, a prompt's whole blocks; of another, of no version, never."""
    core.add("a")
    core.step()
    core.add("b", salt)
    core.step()
    [new] = [one for one in core.said[-1].scheduled_new_reqs if one.req_id == "b"]
    assert new.num_computed_tokens == (2 * BLOCK if salt == "0.0" else 0)


def test_the_runners_bookkeeping_takes_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2's own: the old state goes first, block tables are overwritten, the adapter comes along."""
    core = Core(configured(model, v2=True, patch=monkeypatch, enable_lora=True))
    core.add("a", adapter=LoRARequest("it", 1, f"{PATH}it"))
    core.step()
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    for part in ("model_state", "block_tables", "sampler", "prompt_logprobs_worker"):
        setattr(runner, part, Mock(name=part))
    for part in ("pooling_runner", "encoder_cache", "pp_handler", "adaptive_verification"):
        setattr(runner, part, None)
    runner.is_last_pp_rank = True
    held: dict[str, int] = {}
    states = runner.req_states = Mock(req_id_to_index=held)
    states.add_request.side_effect = lambda req_id, **_: held.update({req_id: len(held)})
    states.remove_request.side_effect = lambda req_id: held.pop(req_id, None)
    runner.lora_state = LoraState(max_num_reqs=4)
    seen = 0

    def told() -> None:
        nonlocal seen
        for said in core.said[seen:]:
            runner.finish_requests(said)
            runner.add_requests(said)
        seen = len(core.said)

    told()
    assert held == {"a": 0}
    core.pause(clear_cache=True)
    core.step()
    core.resume()
    core.step()
    states.reset_mock()
    runner.block_tables.reset_mock()
    told()
    assert held == {"a": 0}
    names = [call[0] for call in states.method_calls]
    assert names.index("remove_request") < names.index("add_request")
    said = states.add_request.call_args.kwargs
    assert said["all_token_ids"] == [*PROMPT, 7]
    assert (said["num_computed_tokens"], said["prompt_len"]) == (0, len(PROMPT))
    assert runner.block_tables.append_block_ids.call_args.kwargs == {"overwrite": True}
    [adapter] = runner.lora_state.get_activate_loras(["a"])
    assert (adapter.lora_int_id, adapter.lora_path) == (1, f"{PATH}it")


def test_its_log_probs_are_at_the_temperature_before_truncation() -> None:
    """Its sampler is no module, and has neither hooks nor ``compute_logprobs``."""
    sampler: Any = Sampler.__new__(Sampler)
    sampler.logprobs_mode = "raw_logprobs"
    sampler.sampling_states = create_autospec(SamplingStates, instance=True)
    divided: list[torch.Tensor] = []

    def divide(logits: torch.Tensor, mapping: torch.Tensor, _: np.ndarray) -> None:
        divided.append(logits)
        logits /= torch.tensor([2.0, 1.0])[mapping].unsqueeze(1)

    sampler.sampling_states.apply_temperature.side_effect = divide
    sampled = torch.tensor([1, 0])
    truncated = torch.full((2, 3), float("-inf"))
    sampler.sample = lambda *_, **__: (sampled, truncated)
    _temper(sampler)
    logits = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    mapping = torch.tensor([0, 1])
    took, given = sampler.sample(logits, mapping, mapping, mapping.numpy(), return_logprobs=True)
    assert took is sampled
    assert torch.equal(given, logits / torch.tensor([[2.0], [1.0]]))
    assert logits[0, 0] == 1.0, "what it samples from is its own"
    assert sampler.logprobs_mode == "processed_logprobs"
    _, given = sampler.sample(logits, mapping, mapping, mapping.numpy(), return_logprobs=False)
    assert given is truncated
    assert len(divided) == 1


def test_what_the_adapter_reaches_into_is_there() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert parameters(Sampler.sample)[:4] == [
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
    ]
    assert "return_logprobs" in parameters(Sampler.sample)
    assert parameters(SamplingStates.apply_temperature) == [
        "logits",
        "expanded_idx_mapping",
        "idx_mapping_np",
    ]
    for name in ("get_model", "reset_lora_state", "load_lora_model"):
        assert callable(getattr(GPUModelRunner, name)), name
    source = inspect.getsource(GPUModelRunner)
    for name in ("self.kv_caches = [", "self.sampler: Sampler | None", "self.lora_state"):
        assert name in source, name
    assert "self.logprobs_mode in PROCESSED_LOGPROBS_MODES" in inspect.getsource(Sampler.__call__)
