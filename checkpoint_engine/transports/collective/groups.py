"""Process groups of our own: built aside from the trainer's, kept from sync to sync, and bounded.

Nothing here touches ``torch.distributed``'s default group, nor its registry of groups: a group is a
backend object over a store of ours. Rank 0 of each is the trainer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hotbunk.checkpoint_engine.transports.collective import descriptors
from hotbunk.rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    SessionError,
    TransferFailed,
    Unsupported,
)

_LOOK = 0.001  # seconds between looks at a device's work
DEVICES = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}  # by backend
BACKENDS = {device: backend for backend, device in DEVICES.items()}


def backend_for(device: str) -> str:
    """:raises ConfigError: no collective backend works on that device."""
    found = BACKENDS.get(device.partition(":")[0])
    if found is None:
        raise ConfigError(
            f"no collective backend for device {device!r}", remedy=f"devices: {sorted(BACKENDS)}"
        )
    return found


def open_store(address: str, seconds: float) -> tuple[TCPStore, int]:
    """A store that listens at ``address`` alone, and its port. Closed when it is dropped.

    :raises ConfigError: this machine has no such address.
    :raises TransferFailed: too few descriptors are left.
    """
    with descriptors.promised(descriptors.STORE, "a store"):
        return _open_store(address, seconds)


def _open_store(address: str, seconds: float) -> tuple[TCPStore, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {address}: {error.strerror}",
            remedy="set transport.options.address to an address of this machine",
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(address: str, port: int, seconds: float) -> TCPStore:
    """Somebody else's store. :raises TransferFailed: it cannot be reached."""
    try:
        return TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=seconds),
        )
    except RuntimeError as error:
        raise TransferFailed(f"the store at {address}:{port} cannot be reached: {error}") from error


class Group:
    """One process group of a trainer and some receiver ranks.

    ``name`` tells it from every other that ever was; ``generation`` counts what its trainer built.
    Work is done by a thread of its own, one piece at a time. After a failure it is good for nothing:
    whoever is in it may be at another piece of work.

    :param address: of this process, where others of the group reach it.
    """

    def __init__(
        self,
        name: str,
        generation: int,
        rank: int,
        size: int,
        *,
        backend: str,
        address: str,
    ) -> None:
        self.name = name
        self.generation = generation
        self.rank = rank
        self.size = size
        self.backend = backend
        self.broken = False
        self.executor = ThreadPoolExecutor(1, f"hotbunk-{backend}")
        self._address = address
        self._made: Any = None
        self._store: Store | None = None

    # -- in a thread --------------------------------------------------------------------------

    def init(self, host: str, port: int, seconds: float) -> None:
        """Build it, over the store at that place; returns when every rank has.

        :raises TransferFailed: the store cannot be reached, or too few descriptors are left.
        :raises DeadlineExceeded: naming the group, the ranks present and the ranks absent.
        :raises Unsupported: this torch has no such backend.
        """
        needed = descriptors.of_group(self.size)
        with descriptors.promised(needed, f"group {self.name!r}", seconds):
            self._init(host, port, seconds)

    def _init(self, host: str, port: int, seconds: float) -> None:
        # A client of its own: one that several threads share crashes.
        self._store = PrefixStore(self.name, join_store(host, port, seconds))
        try:
            self._store.set(f"here/{self.rank}", "1")
            self._made = _MAKERS[self.backend](
                self._store, self.rank, self.size, seconds, self._address
            )
        except RuntimeError as error:
            self.broken = True
            raise self._not_built(seconds, error) from error
        if self.broken:  # closed meanwhile
            self.close()

    def broadcast(self, buffer: torch.Tensor, seconds: float) -> None:
        """Rank 0's bytes to all; returns when they are there.

        :raises SessionError: it was never built, or an earlier piece of work failed.
        :raises TransferFailed: a rank is gone, or did not take part in time.
        """
        if self._made is None or self.broken:
            raise SessionError(
                f"group {self.name!r} is not initialised" if self._made is None else self._over()
            )
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            _finish(self._made.broadcast([buffer], options), seconds, self.backend)
        except RuntimeError as error:
            self.broken = True
            first = str(error).splitlines()[0] if str(error) else "no reason given"
            raise TransferFailed(f"a broadcast in group {self.name!r} failed: {first}") from error

    # -- anywhere -----------------------------------------------------------------------------

    def close(self) -> None:
        """Break the connections: whoever waits in it is let go. Idempotent."""
        self.broken = True
        made, self._made, self._store = self._made, None, None
        if made is not None:
            made.abort()
        self.executor.shutdown(wait=False)

    def _over(self) -> str:
        return f"group {self.name!r} (generation {self.generation}) is over"

    def _not_built(self, seconds: float, error: RuntimeError) -> DeadlineExceeded | TransferFailed:
        present: list[int] = []
        try:
            assert self._store is not None
            present = [r for r in range(self.size) if self._store.check([f"here/{r}"])]
        except RuntimeError:  # the store is gone with whoever kept it
            return TransferFailed(f"group {self.name!r} could not be built: {error}")
        absent = sorted(set(range(self.size)) - set(present))
        return DeadlineExceeded(
            f"building group {self.name!r} (generation {self.generation})",
            seconds,
            where=f"ranks present {present}, absent {absent}",
            remedy=str(error).splitlines()[0] if not absent and str(error) else "",
        )


def _finish(work: Any, seconds: float, backend: str) -> None:
    """Wait for a piece of work. :raises RuntimeError: it failed, or was not done in time."""
    try:
        if backend == "gloo":
            work.wait(timedelta(seconds=seconds))
            return
        # A wait of these backends only orders streams, and cannot end by itself.
        until = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"not done within {seconds:g} s")
            time.sleep(_LOOK)
        work.wait()
        torch.accelerator.synchronize()
    finally:
        del work  # the traceback of what is raised would keep the group's connections


def _gloo(store: Store, rank: int, size: int, seconds: float, address: str) -> Any:
    if not dist.is_gloo_available():
        raise Unsupported("gloo", "this torch")
    from torch.distributed import ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=seconds)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, seconds: float, address: str) -> Any:
    """Interfaces are NCCL's own business (``NCCL_SOCKET_IFNAME``)."""
    if not dist.is_nccl_available():
        raise Unsupported("nccl", "this torch", "a build of torch for CUDA has it")
    from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return ProcessGroupNCCL(store, rank, size, options)


def _hccl(store: Store, rank: int, size: int, seconds: float, address: str) -> Any:
    try:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL
    except ModuleNotFoundError:
        raise Unsupported("hccl", "this torch", "it comes with torch_npu") from None
    options = ProcessGroupHCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return ProcessGroupHCCL(store, rank, size, options)


_MAKERS: dict[str, Callable[[Store, int, int, float, str], Any]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "hccl": _hccl,
}


class Kept:
    """Groups kept from sync to sync, by what they are for; the one used longest ago goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: dict[Any, Group] = {}

    def get(self, key: Any) -> Group | None:
        """The group, if it is whole."""
        found = self._groups.pop(key, None)
        if found is None:
            return None
        if found.broken:
            found.close()
            return None
        self._groups[key] = found  # used last
        return found

    def put(self, key: Any, group: Group) -> None:
        self.drop(key)
        self._groups[key] = group
        while len(self._groups) > self._most:
            self.drop(next(iter(self._groups)))

    def drop(self, key: Any) -> None:
        """Close one. Idempotent."""
        found = self._groups.pop(key, None)
        if found is not None:
            found.close()

    def drop_if(self, chosen: Callable[[Any], bool]) -> None:
        """Close those whose key is chosen."""
        for key in [key for key in self._groups if chosen(key)]:
            self.drop(key)

    def names(self) -> tuple[str, ...]:
        """Of those that are whole."""
        return tuple(g.name for g in self._groups.values() if not g.broken)

    def close(self) -> None:
        while self._groups:
            self.drop(next(iter(self._groups)))
