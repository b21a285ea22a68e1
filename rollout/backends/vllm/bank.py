"""The adapters of one worker: what syncs brought, and where vLLM gets it from.

vLLM keeps a few adapters in the model's slots and a few more beside them, by number, and reads what
it lacks from a directory; one that changes under its number it would never look at again. Here its
reading ends in this bank, so it may drop what it likes, and whatever is written here is dropped
there first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

from hotbunk.rollout.arena import ALIGN, Arena, MemoryPool
from hotbunk.rollout.backends.vllm.adapters import PATH, Adaptable, group_of, parsed
from hotbunk.rollout.backends.vllm.routes import Piece, Route, Routes
from hotbunk.rollout.binding import dtype_name, tensor_over
from hotbunk.rollout.contract import Tag


@dataclass
class Adapter:
    """One adapter's matrices by the names they came with; ``loaded``: vLLM's number for it."""

    tensors: dict[str, torch.Tensor]
    arena: Arena | None
    alpha: float | None = None
    loaded: set[int] = field(default_factory=set)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


class AdapterBank:
    """All adapters by name. An engine core that stands still is assumed by all that writes.

    :param pool: where they lie, if memory is given back; host memory of their own else.
    """

    def __init__(self, worker: Any, routes: Routes, pool: MemoryPool | None) -> None:
        self._loader = worker.model_runner.lora_manager
        self._pool = pool
        self._adapters: dict[str, Adapter] = {}
        self._read = self._loader._load_adapter
        self._loader._load_adapter = self._load
        model = worker.model_runner.get_model()
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper = None if mapper is None else mapper.get_rename_mapper()
        config = self._loader.lora_config
        self._dtype: torch.dtype = config.lora_dtype
        self.adaptable = Adaptable(
            self._layers(routes), int(config.max_lora_rank), dtype_name(self._dtype)
        )

    def _layers(self, routes: Routes) -> dict[str, tuple[int, int]]:
        """Linear layers by checkpoint name, of those that vLLM has put slots into."""
        manager = self._loader._adapter_manager
        able = set()
        for module, layer in manager.modules.items():
            if isinstance(layer, BaseLinearLayerWithLoRA):
                able |= set(manager.packed_modules.get(module, [module]))
        found = {}
        for name, route in routes.items():
            layer, dot, kind = name.rpartition(".")
            if dot and kind == "weight" and len(route.shape) == 2 and self._own(layer) in able:
                found[layer] = (route.shape[0], route.shape[1])
        return found

    def _own(self, layer: str) -> str:
        """vLLM's name of a layer."""
        name: str = parse_fine_tuned_lora_name(f"{layer}.lora_A.weight", self._mapper)[0]
        return name

    def routes(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], alpha: float | None
    ) -> dict[str, Route]:
        """Where this adapter's tensors are to be written: where they were, if their shapes are.

        vLLM forgets it: whoever asks it next gets what is here then.

        :raises MemoryFault: there is not so much memory.
        """
        its = self._adapters.get(name)
        if its is None or its.shapes != dict(shapes):
            made = self._made(name, shapes, None if its is None else its.arena)
            if its is not None:
                made.loaded = its.loaded
            its = self._adapters[name] = made
        its.alpha = alpha
        self._drop(its)
        return {n: _whole(tensor) for n, tensor in its.tensors.items()}

    def tensors(self) -> dict[str, Route]:
        """Every adapter's tensors, as ``adapter:<name>/<tensor>``."""
        return {
            f"{group_of(name)}/{tensor_name}": _whole(tensor)
            for name, its in self._adapters.items()
            for tensor_name, tensor in its.tensors.items()
        }

    def forget(self) -> None:
        """vLLM lets go of every copy: its slots are about to lose their content."""
        self._loader.remove_all_adapters()
        for its in self._adapters.values():
            its.loaded.clear()

    def _drop(self, its: Adapter) -> None:
        for number in its.loaded:
            self._loader.remove_adapter(number)
        its.loaded.clear()

    def _made(self, name: str, shapes: Mapping[str, tuple[int, ...]], old: Arena | None) -> Adapter:
        if self._pool is None:
            tensors = {n: torch.zeros(shape, dtype=self._dtype) for n, shape in shapes.items()}
            return Adapter(tensors, None)
        sizes = {n: self._dtype.itemsize * s[0] * s[1] for n, s in shapes.items()}
        room = sum(-(-size // ALIGN) * ALIGN for size in sizes.values())
        if old is not None:
            self._pool.drop(old)
        arena = self._pool.arena(Tag.WEIGHTS, room, group_of(name))
        tensors = {}
        for tensor_name, shape in shapes.items():
            region = arena.add(tensor_name, sizes[tensor_name])
            flat = tensor_over(self._pool, arena, region, self._dtype)
            tensors[tensor_name] = flat.view(shape)
        return Adapter(tensors, arena)

    def _load(self, request: Any) -> LoRAModel:
        """In place of vLLM's own: an adapter of ours as vLLM has them. It changes what it gets."""
        if not request.lora_path.startswith(PATH):
            return self._read(request)
        its = self._adapters[request.lora_path.removeprefix(PATH)]
        pairs: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in its.tensors.items():
            found = parsed(name)
            assert found is not None
            pairs.setdefault(found[0], {})[found[1]] = tensor.clone()
        loras, largest = {}, 1
        for layer, pair in pairs.items():
            rank = int(pair["A"].shape[0])
            largest = max(largest, rank)
            scale = 1.0 if its.alpha is None else its.alpha / rank
            own = self._own(layer)
            loras[own] = LoRALayerWeights(own, rank, rank, pair["A"], pair["B"], scaling=scale)
        its.loaded.add(request.lora_int_id)
        return LoRAModel(request.lora_int_id, largest, loras)


def _whole(tensor: torch.Tensor) -> Route:
    shape = tuple(tensor.shape)
    return Route(shape, [Piece(tensor, 0, shape, tensor.stride())])
