"""The adapter's part in the process that holds the weights.

vLLM mixes :class:`WorkerExtension` into its worker (``worker_extension_cls``), which imports this
module before the model is loaded; the methods are called by name, through ``collective_rpc``.
Arguments and results are plain values.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import nn
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform

from hotbunk.rollout.backends.vllm.routes import Route, Routes
from hotbunk.rollout.binding import dtype_from, dtype_name
from hotbunk.rollout.kernels import fingerprint

_GREEDY = 1e-5  # a lower temperature counts as greedy in vLLM


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = nn.functional.linear


# On CPUs vLLM packs linear weights into copies that no update reaches (a tied head goes stale
# without a word) and drops the originals. Plain ones decode about 1.5 times slower.
if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear


class WorkerExtension:
    """Methods that ``collective_rpc`` reaches on every rank, named so that none clashes."""

    model_runner: Any
    vllm_config: Any

    def hotbunk_bind(self) -> dict[str, Any]:
        """Find where every checkpoint tensor lies. Called once, before the first request."""
        model = self.model_runner.get_model()
        loader = get_model_loader(self.vllm_config.load_config)
        checkpoint = loader.get_all_weights(self.vllm_config.model_config, model)
        contiguous = ((name, tensor.contiguous()) for name, tensor in checkpoint)
        routes = self._hotbunk_routes = Routes(model, model.load_weights, contiguous)
        _temper(self.model_runner.sampler)
        return {
            "tensors": {
                name: (dtype_name(route.dtype), route.shape, route.elements)
                for name, route in routes.items()
            },
            "ties": routes.ties(),
            "transformed": routes.transformed(),
            "uncovered": routes.uncovered(model),
        }

    def hotbunk_load(self, path: str, table: list[list[Any]]) -> dict[str, list[int]]:
        """Write tensors from a file, then read each back: name -> [fingerprint, elements].

        :param table: ``[names, dtype, shape, offset]`` of each tensor; it goes to all its names.
        """
        descriptor = os.open(path, os.O_RDONLY)
        try:
            data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        for names, dtype, shape, offset in table:
            tensor = torch.empty(shape, dtype=dtype_from(dtype))
            if tensor.numel():
                flat = torch.frombuffer(
                    data, dtype=tensor.dtype, count=tensor.numel(), offset=offset
                )
                tensor = flat.view(tensor.shape)
            for name in names:
                self._hotbunk_routes[name].write(tensor)
        return self.hotbunk_digest([name for names, *_ in table for name in names])

    def hotbunk_digest(self, names: list[str] | None) -> dict[str, list[int]]:
        """name -> [fingerprint as it lies here, how many elements this rank holds]."""
        routes = self._hotbunk_routes
        found: dict[str, Route | torch.Tensor] = {n: routes[n] for n in names or routes}
        if names is None:
            found |= dict(self.model_runner.get_model().named_buffers())
        return {
            name: [fingerprint(it.read()), it.elements]
            if isinstance(it, Route)
            else [fingerprint(it.cpu()), it.numel()]
            for name, it in found.items()
        }

    def hotbunk_memory(self) -> dict[str, int]:
        """Bytes of weights and of KV cache that this rank holds, each storage once."""
        weights, kv = self._hotbunk_storages()
        return {"weights": sum(weights.values()), "kv_cache": sum(kv.values())}

    def hotbunk_addresses(self) -> dict[str, Any]:
        """Where everything lies, for whoever reads this process's memory from outside."""
        weights, kv = self._hotbunk_storages()
        return {
            "pid": os.getpid(),
            "weights": list(weights.items()),
            "kv_cache": list(kv.items()),
            "tensors": {
                name: [
                    dtype_name(route.dtype),
                    list(route.shape),
                    [
                        [p.into.data_ptr(), list(p.into.stride()), p.offset, p.shape, p.stride]
                        for p in route.pieces
                    ],
                ]
                for name, route in self._hotbunk_routes.items()
            },
        }

    def _hotbunk_storages(self) -> tuple[dict[int, int], dict[int, int]]:
        model = self.model_runner.get_model()
        parameters = [*model.parameters(), *model.buffers()]
        return _storages(parameters), _storages(self.model_runner.kv_caches)


def _storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of every storage behind the tensors."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for one in tensor if isinstance(tensor, (list, tuple)) else (tensor,):
            storage = one.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def _temper(sampler: Any) -> None:
    """Make the sampler's raw log-probs those of the contract: at the request's temperature.

    vLLM gives either raw ones (before the temperature) or processed ones (after truncation, too).
    """
    temperatures: list[torch.Tensor | None] = [None]

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        temperatures[0] = metadata.temperature

    def after(*_: Any) -> None:
        temperatures[0] = None

    def compute(logits: torch.Tensor) -> torch.Tensor:
        temperature = temperatures[0]
        if temperature is not None:
            divisor = torch.where(temperature < _GREEDY, 1.0, temperature)
            logits = logits / divisor.unsqueeze(1)
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    sampler.register_forward_pre_hook(before, with_kwargs=True)
    sampler.register_forward_hook(after, always_call=True)
    sampler.compute_logprobs = compute
