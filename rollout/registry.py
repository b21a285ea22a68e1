"""Backends and transports by name, through entry points.

A factory imports its heavy package inside itself, so asking for a name costs nothing until the
thing is built, and asking for one that cannot be built says which pip extra brings it.
"""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast

from hotbunk.rollout.contract import Engine, Ticket, Transfer
from hotbunk.rollout.errors import BackendNotFound, MissingExtra, closest

BACKENDS = "hotbunk.backends"
TRANSPORTS = "hotbunk.transports"

# The module whose absence means "this extra is not installed", and the extra's name.
_EXTRAS = {
    "torch": "reference",
    "transformers": "reference",
    "safetensors": "reference",
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "trtllm",
    "vllm_ascend": "ascend",
    "verl": "verl",
    "ray": "ray",
    "nixl": "nixl",
    "mooncake": "mooncake",
    "httpx": "http",
    "tenacity": "http",
}

# Engines that configurations name and no adapter here drives. A package may bring one.
_NOT_HERE = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "vllm_ascend": "vLLM on Ascend NPUs"}

# Registered in this process, and found before what is installed.
_registered: dict[tuple[str, str], EntryPoint] = {}
# Of what is installed, what was asked for: looking reads the metadata of every package there is.
_found: dict[tuple[str, str], EntryPoint] = {}


class TransportFactory(Protocol):
    """What a transport's entry point gives: the receiving side needs only ``open``."""

    @staticmethod
    async def open(ticket: Ticket) -> Transfer:
        """Open the receiver's end of the sync that the ticket names."""
        ...


def register(group: str, name: str, factory: str) -> None:
    """Have a backend or transport in this process without installing it.

    ``factory`` is ``module:attribute``, as in an entry point of that group.
    """
    _registered[group, name] = EntryPoint(name, factory, group)


def names(group: str) -> list[str]:
    """Registered names, sorted."""
    here = {name for of, name in _registered if of == group}
    return sorted(here.union(point.name for point in entry_points(group=group)))


def find(group: str, name: str) -> EntryPoint:
    """The entry point. :raises BackendNotFound: none of that name, with the closest one."""
    if (group, name) in _registered:
        return _registered[group, name]
    if (group, name) in _found:
        return _found[group, name]
    kind = group.rsplit(".", 1)[1].rstrip("s")
    for point in entry_points(group=group):
        if point.name == name:
            _found[group, name] = point
            return point
    known = names(group)
    if group == BACKENDS and (lacking := without_adapter(name)):
        raise BackendNotFound(
            f"no backend named {name!r}{lacking}",
            remedy=f"install a package that registers {name!r} under the entry point group "
            f"{BACKENDS}, or choose one of {', '.join(known)}",
        )
    raise BackendNotFound(
        f"no {kind} named {name!r}{closest(name, known)}",
        remedy=f"installed: {', '.join(known) or 'none'}",
    )


def without_adapter(name: str) -> str:
    """What to say of a backend that configurations name and nothing here drives; "" of any other."""
    return f": this hotbunk has no adapter for {_NOT_HERE[name]}" if name in _NOT_HERE else ""


def _load(group: str, name: str) -> Any:
    point = find(group, name)
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise missing(name, error) from error


def missing(name: str, error: ModuleNotFoundError) -> MissingExtra | ModuleNotFoundError:
    """The error that names the extra bringing the absent module (or the error itself)."""
    extra = _EXTRAS.get((error.name or "").split(".")[0])
    if extra is None:
        return error
    return MissingExtra(
        f"{name!r} needs the package {error.name!r}, which is not installed",
        remedy=f"pip install 'hotbunk[{extra}]'",
    )


def create_backend(name: str, **options: Any) -> Engine:
    """Build (not start) a backend.

    :raises BackendNotFound: no such name.
    :raises MissingExtra: its package is not installed.
    :raises ConfigError: an option it does not know.
    """
    factory = _load(BACKENDS, name)
    try:
        return cast(Engine, factory(**options))
    except ModuleNotFoundError as error:
        raise missing(name, error) from error


def load_transport(name: str) -> Any:
    """A transport's class."""
    return _load(TRANSPORTS, name)


async def open_transfer(ticket: Ticket) -> Transfer:
    """The receiver's end of a sync, opened in this process.

    :raises TransferFailed: the offer is gone, or is not the ticket's.
    """
    factory: TransportFactory
    if find(TRANSPORTS, ticket.transport).module in sys.modules:
        factory = load_transport(ticket.transport)
    else:  # what it imports may take seconds, and an engine's loop must answer meanwhile
        factory = await asyncio.to_thread(load_transport, ticket.transport)
    return await factory.open(ticket)
