"""The adapter's part in the process that holds the weights.

vLLM mixes :class:`WorkerExtension` into its worker (``worker_extension_cls``), which imports this
module before the model is loaded; the methods are called by name, through ``collective_rpc``.
Arguments and results are plain values.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hotbunk.rollout.arena import Survival
from hotbunk.rollout.backends.vllm.parked import storages
from hotbunk.rollout.backends.vllm.routes import Route, Routes
from hotbunk.rollout.binding import dtype_from, dtype_name

log = logging.getLogger(__name__)
_GREEDY = 1e-5  # a lower temperature counts as greedy in vLLM


class WorkerExtension:
    """Methods that ``collective_rpc`` reaches on every rank, named so that none clashes."""

    model_runner: Any
    vllm_config: Any
    hotbunk_engine: Any
    _hotbunk_tempered = False
    _hotbunk_routes: Routes

    def hotbunk_bind(self, folder: str) -> dict[str, Any]:
        """Find where every checkpoint tensor lies, and be a rank of the adapter from now on.

        Called once, before the first request. The adapter listens in ``folder``, at this rank's
        number.
        """
        from hotbunk.rollout.backends.vllm import inside  # this module comes before the model

        engine = inside.WorkerEngine(self)
        self.hotbunk_engine = engine
        self._hotbunk_routes = engine.weights.routes
        self.hotbunk_temper()
        parallel = self.vllm_config.parallel_config
        shards = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        inside.serve(engine, f"{folder}/{inside.rank_of(self)}", sharded=shards > 1)
        found: dict[str, Any] = engine.found()
        return found

    def hotbunk_call(self, method: str, *args: Any) -> tuple[str, Any]:
        """Another of these methods: what went wrong (empty: nothing), and what it returned.

        Where vLLM has several workers it stops reading answers at the first that raised. Those of the
        others stay, and every later call takes them for its own: so nothing may be raised to it.
        """
        try:
            return "", getattr(self, method)(*args)
        except Exception as error:  # the boundary to vLLM's workers, see above
            log.exception("%s failed in worker %s", method, os.getpid())
            return f"{type(error).__name__}: {error}", None

    def hotbunk_temper(self) -> None:
        """Log-probs are at the request's temperature from now on, also without an adapter here."""
        if not self._hotbunk_tempered:
            _temper(self.model_runner.sampler)
            self._hotbunk_tempered = True

    def hotbunk_load(self, path: str, table: list[list[Any]]) -> None:
        """Write tensors of the base from a file.

        :param table: ``[names, dtype, shape, offset]`` of each tensor; it goes to all its names.
        """
        _write(path, table, self._hotbunk_routes)
        self.model_runner.reset_lora_state()

    def hotbunk_load_adapter(
        self, path: str, table: list[list[Any]], name: str, alpha: float | None
    ) -> None:
        """The same for all of an adapter."""
        shapes = {names[0]: tuple(shape) for names, _, shape, _ in table}
        _write(path, table, self.hotbunk_engine.adapters.routes(name, shapes, alpha))

    def hotbunk_addresses(self) -> dict[str, Any]:
        """Where everything lies, for whoever reads this process's memory from outside."""
        weights, kv = storages(self)
        pool = getattr(self, "hotbunk_pool", None)
        arenas: dict[str, list[tuple[int, int]]] = {}
        for arena in () if pool is None else pool.pool.arenas():
            arenas.setdefault(arena.tag, []).append((arena.address, arena.size))
        return {
            "pid": os.getpid(),
            "state": 0 if pool is None or pool.binding is None else _state(pool.binding.arena),
            "arenas": arenas or {"weights": list(weights.items()), "kv_cache": list(kv.items())},
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


def _write(path: str, table: list[list[Any]], routes: Mapping[str, Route]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for names, dtype, shape, offset in table:
        tensor = torch.empty(shape, dtype=dtype_from(dtype))
        if tensor.numel():
            flat = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            tensor = flat.view(tensor.shape)
        for name in names:
            routes[name].write(tensor)


def _state(arena: Any) -> int:
    """Bytes that are kept through every release."""
    return sum(r.nbytes for r in arena.regions.values() if r.survival is Survival.STATE)


def _temper(sampler: Any) -> None:
    """Make the sampler's raw log-probs those of the contract: at the request's temperature.

    vLLM gives either raw ones (before the temperature) or processed ones (after truncation, too).
    """
    (_temper_v1 if isinstance(sampler, nn.Module) else _temper_v2)(sampler)


def _temper_v1(sampler: Any) -> None:
    """A module, whose log-probs are a method of their own."""
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


def _temper_v2(sampler: Any) -> None:
    """The same for the V2 model runner, which cannot run where this was written (it needs Triton).

    Its processed log-probs are of what ``sample`` returns beside the tokens, and of nothing else.
    """
    inner, states = sampler.sample, sampler.sampling_states

    def sample(
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        *args: Any,
        return_logprobs: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        where = (expanded_idx_mapping, idx_mapping, idx_mapping_np)
        # It need not know of log-probs: only then may it use its fused kernels.
        sampled, processed = inner(logits, *where, *args, **kwargs)
        if not return_logprobs:
            return sampled, processed
        tempered = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        states.apply_temperature(tempered, expanded_idx_mapping, idx_mapping_np)
        return sampled, tempered

    sampler.sample = sample
    sampler.logprobs_mode = "processed_logprobs"
