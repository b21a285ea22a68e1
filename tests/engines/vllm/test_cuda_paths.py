"""What runs on GPUs only, on a simulated one: vLLM's own worker, sleep backend and allocator over
host memory. The stand-ins for its C functions and for what this adapter calls have the signatures
of the vLLM that is installed, so one that has moved on fails here."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import vllm.device_allocator as allocators
import vllm.device_allocator.cumem as cumem
from torch import nn
from vllm.device_allocator import AllocationData
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm import declared, options, plugin
from hotbunk.rollout.backends.vllm.parked import Own
from hotbunk.rollout.backends.vllm.pooled_worker import PooledCPUWorker
from hotbunk.rollout.backends.vllm.transfer_engine import HotbunkWeightTransferEngine
from hotbunk.rollout.backends.vllm_http.client import RemoteLLM
from hotbunk.rollout.contract import Retention, Tag

LOST = 0xCC  # what unmapped memory reads as, here


class SimulatedGpu:
    """Host memory in place of a device's, under vLLM's own allocator."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._buffers: dict[int, bytearray] = {}
        # Its constructor would load the driver's allocator.
        self.allocator = cumem.CuMemAllocator.__new__(cumem.CuMemAllocator)
        self.allocator.pointer_to_data = {}
        patch.setattr(cumem, "create_and_map", self._like(cumem.create_and_map, self._map))
        release = self._like(cumem.unmap_and_release, self._unmap)
        patch.setattr(cumem, "unmap_and_release", release)
        runtime = create_autospec(CudaRTLibrary, instance=True)
        runtime.cudaMemcpy.side_effect = ctypes.memmove
        patch.setattr(cumem, "libcudart", runtime)
        found = create_autospec(allocators.get_mem_allocator_instance, return_value=self.allocator)
        patch.setattr(allocators, "get_mem_allocator_instance", found)
        for name, answer in (
            ("synchronize", lambda *_: None),
            ("empty_cache", lambda: None),
            ("get_memory_info", lambda *_: self._free()),
        ):
            its = getattr(torch.accelerator, name)
            patch.setattr(torch.accelerator, name, self._like(its, answer))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)

    def tensor(self, tag: str, content: torch.Tensor) -> torch.Tensor:
        """The same content, in memory of that tag."""
        buffer = bytearray(content.numpy().tobytes())
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._buffers[address] = buffer
        data = AllocationData((0, len(buffer), address, 0), tag)
        self.allocator.pointer_to_data[address] = data
        return torch.frombuffer(buffer, dtype=content.dtype).view(content.shape)

    def asleep(self) -> set[str]:
        """Tags that are."""
        return {one.tag for one in self.allocator.pointer_to_data.values() if one.is_asleep}

    @staticmethod
    def _like(function: Callable[..., Any], does: Callable[..., Any]) -> Any:
        return create_autospec(function, side_effect=does)

    def _free(self) -> tuple[int, int]:
        held = [one for one in self.allocator.pointer_to_data.values() if not one.is_asleep]
        return 1 << 30, (1 << 30) + sum(one.handle[1] for one in held)

    def _map(self, handle: Any) -> None:
        self.calls.append(f"map {self.allocator.pointer_to_data[handle[2]].tag}")

    def _unmap(self, handle: Any) -> None:
        self.calls.append(f"unmap {self.allocator.pointer_to_data[handle[2]].tag}")
        self._buffers[handle[2]][:] = bytes([LOST]) * handle[1]


class Layer(nn.Module):
    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.weight = nn.Parameter(gpu.tensor("weights", torch.arange(64.0)))
        self.register_buffer("table", gpu.tensor("weights", torch.arange(8.0) + 0.5))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    return SimulatedGpu(monkeypatch)


@pytest.fixture
def worker(gpu: SimulatedGpu) -> Worker:
    """vLLM's own GPU worker, without what its constructor does to a device."""
    it = Worker.__new__(Worker)
    model = Layer(gpu)
    it.model_config = SimpleNamespace(sleep_preserve_parameter_names=[])
    it.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False, enable_sleep_mode=True)
    )
    kv = gpu.tensor("kv_cache", torch.zeros(256))
    it.model_runner = SimpleNamespace(model=model, get_model=lambda: model, kv_caches=[kv])
    it._sleep_mode_backend = CuMemBackend()
    it._sleep_saved_buffers, it._sleep_saved_draft_buffers = {}, {}
    it._sleep_saved_parameters = {}
    it.get_draft_model = lambda: None
    it.synchronize_device = lambda: None
    return it


def test_level_1_brings_the_weights_back(gpu: SimulatedGpu, worker: Worker) -> None:
    own, model = Own(worker), worker.model_runner.model
    before = model.weight.detach().clone()
    report = own.release(list(Tag), Retention.BACKUP, {})
    assert (report.freed, report.resident()) == (64 * 4 + 8 * 4 + 256 * 4, 0)
    assert gpu.asleep() == {"weights", "kv_cache"}
    assert not torch.equal(model.weight, before)
    own.resume([Tag.WEIGHTS])
    assert gpu.asleep() == {"kv_cache"}
    assert torch.equal(model.weight, before)
    assert own.resume([Tag.KV_CACHE]).resident() == report.freed
    assert gpu.asleep() == set()


def test_level_2_keeps_buffers_and_nothing_else(gpu: SimulatedGpu, worker: Worker) -> None:
    own, model = Own(worker), worker.model_runner.model
    before, table = model.weight.detach().clone(), model.table.clone()
    own.release(list(Tag), Retention.DISCARD, {})
    own.resume([Tag.WEIGHTS])
    assert torch.equal(model.table, table), "state that no sync brings back"
    assert not torch.equal(model.weight, before)
    assert gpu.asleep() == {"kv_cache"}
    own.resume([Tag.KV_CACHE])


def test_kv_alone_leaves_the_weights_where_they_are(gpu: SimulatedGpu, worker: Worker) -> None:
    own, model = Own(worker), worker.model_runner.model
    before, address = model.weight.detach().clone(), model.weight.data_ptr()
    assert own.release([Tag.KV_CACHE], Retention.DISCARD, {}).freed == 256 * 4
    assert gpu.calls == ["unmap kv_cache"]
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == address
    own.resume([Tag.KV_CACHE])
    assert gpu.asleep() == set()


def test_weights_after_kv_and_alone(gpu: SimulatedGpu, worker: Worker) -> None:
    """vLLM cannot sleep while it sleeps, nor release weights alone."""
    own, model = Own(worker), worker.model_runner.model
    before = model.weight.detach().clone()
    with pytest.raises(errors.Unsupported, match="weights alone"):
        own.release([Tag.WEIGHTS], Retention.DISCARD, {})
    assert gpu.asleep() == set()
    own.release([Tag.KV_CACHE], Retention.DISCARD, {})
    own.release([Tag.WEIGHTS], Retention.BACKUP, {})
    assert gpu.asleep() == {"weights", "kv_cache"}
    own.release(list(Tag), Retention.DISCARD, {})  # both are away: nothing changes
    own.resume(list(Tag))
    assert torch.equal(model.weight, before)
    for _ in range(3):
        own.release(list(Tag), Retention.BACKUP, {})
        own.resume(list(Tag))
    assert torch.equal(model.weight, before)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "is_cpu_build", lambda: False)
    monkeypatch.setattr(declared, "is_cpu_build", lambda: False)


@pytest.mark.usefixtures("on_gpu")
def test_options_and_promises_of_a_gpu() -> None:
    chosen = options.VllmOptions("m", tensor_parallel_size=2, data_parallel_size=2)
    known = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
    args = chosen.to_engine_args(known)
    assert args["enable_sleep_mode"] is True
    assert "worker_cls" not in args
    assert args["kv_cache_memory_bytes"] is None
    inspect.signature(AsyncEngineArgs).bind(**args)
    caps = declared.declared(chosen)
    assert caps.retentions == {Retention.BACKUP, Retention.DISCARD}
    assert (bool(caps.release), bool(caps.keep_release), caps.ranks) == (True, True, 4)
    still = declared.declared(options.VllmOptions("m", enable_sleep_mode=False))
    assert (bool(still.release), still.retentions) == (False, {Retention.RESIDENT})


def test_the_weight_transfer_engine_is_one_of_this_vllm() -> None:
    plugin.register()
    plugin.register()
    assert not HotbunkWeightTransferEngine.__abstractmethods__
    made = WeightTransferEngineFactory._registry[plugin.BACKEND]()
    assert made is HotbunkWeightTransferEngine
    for name in ("init_transfer_engine", "start_weight_update", "receive_weights", "shutdown"):
        ours = inspect.signature(getattr(HotbunkWeightTransferEngine, name))
        theirs = inspect.signature(getattr(WeightTransferEngine, name))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_the_pooled_worker_overrides_what_there_is() -> None:
    own = [name for name, it in vars(PooledCPUWorker).items() if inspect.isfunction(it)]
    for name in own:
        if name.startswith("__"):
            continue
        theirs = getattr(CPUWorker, name, None)
        if theirs is None:
            assert name.startswith(("hotbunk", "_hotbunk")), f"{name} is no method of CPUWorker"
            continue
        ours = list(inspect.signature(getattr(PooledCPUWorker, name)).parameters)
        passed_on = ours == ["self", "args", "kwargs"]
        assert passed_on or ours == list(inspect.signature(theirs).parameters), name


def test_the_face_over_http_is_that_of_the_engine() -> None:
    """What drives ``AsyncLLM`` drives its server: same names, same keyword arguments."""
    for name, ours in inspect.getmembers(RemoteLLM, inspect.iscoroutinefunction):
        if name.startswith("_"):
            continue
        theirs = inspect.signature(getattr(AsyncLLM, name)).parameters
        for key, parameter in inspect.signature(ours).parameters.items():
            if name in ("init_weight_transfer_engine", "update_weights") and key != "self":
                continue  # there it is a request that wraps the same mapping
            assert key in theirs, f"AsyncLLM.{name} has no {key}"
            if parameter.default is not parameter.empty and theirs[key].default is not None:
                assert parameter.default == theirs[key].default, f"{name}({key}=)"


def test_the_sampler_takes_its_temperatures_where_log_probs_look_for_them() -> None:
    parameters = list(inspect.signature(Sampler.forward).parameters)
    assert parameters[:3] == ["self", "logits", "sampling_metadata"]
    assert list(inspect.signature(Sampler.compute_logprobs).parameters)[-1:] == ["logits"]
