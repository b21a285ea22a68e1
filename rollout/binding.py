"""A module's tensors, laid into an arena: every one of them, not only parameters.

Buffers, rotary caches and tensors kept as plain attributes (in lists, tuples and dicts, too) are
state that no sync brings back, so they are laid beside the parameters, as regions that survive
every release. Tensor objects keep their identity, and whatever shared storage before (ties, views)
shares it afterwards.

A module that was built under :func:`parameters_on_meta` gets its first memory here, as zeros: its
weights then exist once, in the arena.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from hotbunk.rollout.arena import ALIGN, Arena, MemoryPool, Region, Survival
from hotbunk.rollout.contract import Placement
from hotbunk.rollout.errors import Unsupported


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: the name that travels."""
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`. :raises Unsupported: not an element type of torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Unsupported(f"element type {name!r}", "torch")
    return dtype


class _DeviceBytes:
    """Bytes on a CUDA device, in the form that torch takes without a copy.

    Whoever made a tensor of it holds it, and with it the addresses.
    """

    def __init__(self, arena: Arena, region: Region) -> None:
        self._lease = arena.lease()
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,),
            "typestr": "|u1",
            # An empty array has no address.
            "data": (arena.address + region.offset if region.nbytes else 0, False),
            "strides": None,
            "version": 3,
        }


def tensor_over(
    pool: MemoryPool, arena: Arena, region: Region, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """A flat tensor of a region's bytes, on the pool's device; it keeps the addresses reserved.

    :raises Unsupported: torch cannot use memory of that device here.
    """
    if pool.device == "cpu":
        if not region.nbytes:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(arena.view(region), dtype=dtype)
    if pool.device.startswith("npu"):
        return _npu_bytes(pool, arena, region).view(dtype)
    if not pool.device.startswith("cuda"):
        raise Unsupported(f"tensors over memory of {pool.device}", "torch")
    return torch.as_tensor(_DeviceBytes(arena, region), device=pool.device).view(dtype)


def _npu_bytes(pool: MemoryPool, arena: Arena, region: Region) -> torch.Tensor:
    """Bytes on an NPU. Its tensors are of torch_npu's own kind, which only torch_npu can make.

    :raises Unsupported: there is no torch_npu, or one that cannot.
    """
    what = f"tensors over memory of {pool.device}"
    if find_spec("torch_npu") is None:
        raise Unsupported(what, "torch", "install torch_npu")
    if not region.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=pool.device)
    own = import_module("torch_npu")._C
    make_storage = getattr(own, "_construct_storage_from_data_pointer", None)
    make_tensor = getattr(own, "_construct_NPU_Tensor_From_Storage_And_Metadata", None)
    if make_storage is None or make_tensor is None:
        raise Unsupported(what, "this torch_npu", "it makes no tensors over memory of others")
    lie: dict[str, object] = {
        "data_ptr": arena.address + region.offset,
        "nbytes": region.nbytes,
        "device": torch.device(pool.device),
        "size": (region.nbytes,),
        "stride": (1,),
        "dtype": torch.uint8,
        "storage_offset": 0,
    }
    storage = make_storage(lie["data_ptr"], lie["device"], lie["nbytes"])
    # It frees nothing when it goes, and keeps nothing either: the addresses are held by what it holds.
    storage.hotbunk_lease = arena.lease()
    made: torch.Tensor = make_tensor(lie, storage)
    return made


_building = threading.Lock()  # of nn.Module's method that is replaced meanwhile


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread builds inside have parameters without memory, on ``meta``.

    One parameter at a time exists while it is made. Buffers and plain attributes are made as ever:
    nobody could compute them afterwards, which is why ``torch.device("meta")`` will not do. Ties
    that a module makes between its parameters hold.
    """
    me = threading.get_ident()

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == me and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(self, name, param)

    with _building:
        original = nn.Module.register_parameter
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def _storage_key(tensor: torch.Tensor) -> Hashable:
    """What tensors that share a storage have in common; on ``meta`` there are no addresses."""
    storage = tensor.untyped_storage()
    return ("meta", storage._cdata) if tensor.is_meta else storage.data_ptr()


def named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every tensor a module holds: ``(name, tensor, is_parameter)``, tied ones under each name."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                yield dot + name, parameter, True
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield dot + name, buffer, False
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for path, tensor in _tensors_in(value, dot + name):
                    yield path, tensor, False


def _tensors_in(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{path}.{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}.{key}")


def content_key(name: str, tensor: torch.Tensor) -> Hashable:
    """What tied names share and others do not: the bytes, or for empty tensors the name."""
    size = tensor.numel() * tensor.element_size()
    return (tensor.data_ptr(), size) if size else name


def _become(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Let a parameter on ``meta`` be ``data``; it stays the same object.

    Data cannot be set from another kind of device, but two objects can exchange what they are.
    """
    own = nn.Parameter(data, parameter.requires_grad)
    torch.utils.swap_tensors(parameter, own)  # type: ignore[no-untyped-call]


class ModuleBinding:
    """A module whose tensors lie in one arena of ``pool``.

    ``parameters`` maps each name to its tensor (tied names to the same bytes), ``state`` likewise
    everything else. Addresses never change. Parameters on ``meta`` become zeros; other tensors are
    moved, from the host or the pool's device.

    :param rebuilt: of state, by name: its holder fills it again after a release, so none is kept.

    :raises Unsupported: a tensor that cannot be bound; nothing was changed.
    """

    def __init__(
        self,
        module: nn.Module,
        pool: MemoryPool,
        tag: str,
        group: str,
        *,
        rebuilt: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        holders: dict[Hashable, list[torch.Tensor]] = {}
        labels: dict[Hashable, tuple[str, bool]] = {}
        empty: list[torch.Tensor] = []
        for name, tensor, is_parameter in named_state(module):
            (self.parameters if is_parameter else self.state)[name] = tensor
            key = _storage_key(tensor)
            if not tensor.untyped_storage().nbytes():
                if tensor.is_meta and is_parameter:
                    empty.append(tensor)
                continue
            if is_parameter and not tensor.is_contiguous():
                raise Unsupported("non-contiguous parameters", "module binding", name)
            if tensor.device.type not in ("cpu", "meta", torch.device(pool.device).type):
                raise Unsupported(f"tensors on {tensor.device}", "module binding", name)
            holders.setdefault(key, []).append(tensor)
            first, content = labels.get(key, (name, False))
            labels[key] = (first, content or is_parameter)
        for key, (name, content) in labels.items():
            if not holders[key][0].is_meta:
                continue
            if not content:
                raise Unsupported(
                    "state on meta, which nothing brings back", "module binding", name
                )
            if any(weakref.getweakrefs(t) for t in holders[key]):
                raise Unsupported("weakly held parameters on meta", "module binding", name)
        sizes = {key: held[0].untyped_storage().nbytes() for key, held in holders.items()}
        need = sum(-(-size // ALIGN) * ALIGN for size in sizes.values())
        self.arena: Arena = pool.arena(tag, need, group)
        for key, held in holders.items():
            name, content = labels[key]
            kept = Survival.ZERO if rebuilt(name) else Survival.STATE
            survival = Survival.CONTENT if content else kept
            region = self.arena.add(name, sizes[key], survival)
            raw = tensor_over(pool, self.arena, region)
            if not held[0].is_meta:
                old = torch.empty(0, dtype=torch.uint8, device=held[0].device)
                old.set_(held[0].untyped_storage())
                raw.copy_(old)
            storage = raw.untyped_storage()
            # A tied parameter comes once a name, and is one object.
            tensors = {id(t): (t, t.storage_offset(), t.size(), t.stride()) for t in held}
            for tensor, offset, size, stride in tensors.values():
                with torch.inference_mode(tensor.is_inference()):
                    view = torch.empty(0, dtype=tensor.dtype, device=raw.device)
                    view.set_(storage, offset, size, stride)
                    if not tensor.is_meta:
                        tensor.data = view
                        continue
                _become(tensor, view)
        for tensor in empty:
            _become(tensor, torch.empty_like(tensor, device=pool.device))

    def placements(self) -> dict[str, Placement]:
        """What a sync may write, by name: parameters, and buffers that have a name."""
        return {
            name: Placement(
                dtype_name(t.dtype), tuple(t.shape), max(t.data_ptr() - self.arena.address, -1)
            )
            for name, t in {**self.state, **self.parameters}.items()
            if t.is_contiguous()
        }

    def required(self) -> list[frozenset[str]]:
        """The contents a full sync must bring: tied names together."""
        ties: dict[Hashable, set[str]] = {}
        for name, tensor in self.parameters.items():
            ties.setdefault(content_key(name, tensor), set()).add(name)
        return [frozenset(names) for names in ties.values()]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, wherever it is kept."""
        found = self.parameters.get(name)
        return self.state[name] if found is None else found
