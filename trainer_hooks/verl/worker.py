"""verl's actor workers, with one more method: a sync's word to a trainer rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_torch_device, set_expandable_segments
from verl.workers.engine_workers import ActorRolloutRefWorker

from hotbunk.trainer_hooks.verl.sending import ADAPTERS, WEIGHTS, Part, Sending
from hotbunk.trainer_hooks.verl.settings import ADAPTER
from hotbunk.trainer_hooks.verl.sources import EngineSource, Named, adapter_group


class _Engine:
    """A training engine of verl's, as parts of weights."""

    def __init__(self, worker: Any) -> None:
        self._engine = worker.actor.engine
        self._layered = bool(worker.config.rollout.get("layered_summon", False))
        self._merges = bool(self._engine.model_config.lora.get("merge", False))
        self._device = get_torch_device().current_device()

    def parts(self) -> Mapping[str, Part]:
        """The weights (an adapter merged into them, or its base), and an adapter apart."""
        return {
            WEIGHTS: Part(EngineSource(self._weights), dict),
            ADAPTERS: Part(EngineSource(self._adapter, group=adapter_group(ADAPTER)), self._alpha),
        }

    def _weights(self) -> Named:
        self._enter()
        if self._merges and _peft(self._engine) is not None:
            return _merged(self._engine)
        named, _ = self._engine.get_per_tensor_param(base_sync_done=False)
        return cast(Named, named)

    def _adapter(self) -> Named:
        self._enter()
        named, _ = self._engine.get_per_tensor_param(
            layered_summon=self._layered, base_sync_done=True
        )
        return cast(Named, named)

    def _alpha(self) -> Mapping[str, Any]:
        peft = _peft(self._engine)
        return {} if peft is None else {"lora_alpha": float(peft.lora_alpha)}

    def _enter(self) -> None:
        """A walk is in a thread of its own, and a device is a thread's choice."""
        set_expandable_segments(False)
        if self._device != "cpu":
            get_torch_device().set_device(self._device)

    def let_go(self) -> None:
        """As verl does it after an update: parameters go where they wait, caches are emptied."""
        if self._engine.is_param_offload_enabled:
            self._engine.to("cpu", model=True, optimizer=False, grad=False)
        get_torch_device().synchronize()
        get_torch_device().empty_cache()
        set_expandable_segments(True)


def _peft(engine: Any) -> Any:
    """The configuration of the adapter that is trained; None: the whole model is."""
    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    found: Mapping[str, Any] = getattr(module, "peft_config", None) or {}
    return found.get("default")


def _merged(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Base and adapter as one, as they are trained: verl's own walk rounds them to bfloat16."""
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name
    from verl.utils.model import convert_weight_keys

    module = engine.module
    with merged_lora_context(module, backup_adapters=True):
        held = normalize_peft_param_name(module.state_dict())
        held = convert_weight_keys(held, getattr(module, "_fsdp_wrapped_module", module))
        for name, tensor in held.items():
            # Copies: merging is undone when the walk ends.
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
            yield name, whole.detach()


class _Sends:
    """Mixed into verl's workers."""

    _sending: Sending | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def hotbunk(self, verb: str, args: bytes) -> bytes:
        """A sync's word to this rank; see :mod:`hotbunk.trainer_hooks.verl.sending`."""
        if self._sending is None:
            engine = _Engine(self)
            self._sending = Sending(
                engine.parts(), engine.let_go, rank=dist.get_rank(), world=dist.get_world_size()
            )
        return await self._sending.answer(verb, args)


class HotbunkActorWorker(_Sends, ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's actor (rollout, reference) worker, which a sync can ask for weights."""


class HotbunkDetachWorker(_Sends, DetachActorWorker):  # type: ignore[misc]
    """Likewise verl's worker of ``separate_async``."""


def with_sync(worker: type) -> type:
    """Our worker in place of verl's."""
    return HotbunkDetachWorker if issubclass(worker, DetachActorWorker) else HotbunkActorWorker
