"""Devices whose memory processes share: their drivers, their identities, and a ledger of handles."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING

from hotbunk.rollout.errors import ConfigError, TransferFailed

if TYPE_CHECKING:
    from hotbunk.rollout.memory import NativePool

_DRIVERS = {"cuda": "cuda", "npu": "acl", "acl": "acl", "fake": "fake"}


def driver_of(device: str) -> str:
    """The pool's driver for a device. :raises ConfigError: there is none with handles."""
    kind, _, rest = device.partition(":")
    if kind not in _DRIVERS or (rest and not rest.isdecimal()):
        raise ConfigError(
            f"no memory of {device!r} can be shared by handles",
            remedy="devices: cuda:N, npu:N, or fake (simulated)",
        )
    if _DRIVERS[kind] == "fake":
        return device
    return f"{_DRIVERS[kind]}:{rest or 0}"


class Ledger:
    """Handles of one side: given out, mapped, and unmapped again. From any thread."""

    def __init__(self) -> None:
        self.exports = 0
        self.imports = 0
        self.closes = 0
        self._lock = threading.Lock()

    @property
    def live(self) -> int:
        """What is mapped now. Never below 0."""
        return self.imports - self.closes

    def exported(self) -> None:
        with self._lock:
            self.exports += 1

    def imported(self) -> None:
        with self._lock:
            self.imports += 1

    def closed(self) -> None:
        with self._lock:
            self.closes += 1


#: Of this process as a receiver.
received = Ledger()
_pools: dict[str, NativePool] = {}
_making = threading.Lock()


def receiver_pool(kind: str, device: str) -> NativePool:
    """This process's pool on the sender's device; one for as long as the process lives.

    :param device: the device's id, as :func:`identity` says it; "" where there is one at most.
    :raises TransferFailed: this process does not see that device, or cannot use it.
    """
    from hotbunk.rollout.errors import HotbunkError
    from hotbunk.rollout.memory import NativePool

    if kind not in ("cuda", "acl", "fake"):
        raise TransferFailed(f"the sender's memory is of the kind {kind!r}")
    driver = kind if kind == "fake" else f"{kind}:{_ordinal(kind, device)}"
    with _making:
        if driver not in _pools:
            try:
                _pools[driver] = NativePool(driver)
            except HotbunkError as error:
                raise TransferFailed(f"the sender's device: {error}") from error
        return _pools[driver]


def identity(driver: str) -> str:
    """What all processes call that device, whatever number it has in each: its UUID."""
    kind, _, index = driver.partition(":")
    if kind == "cuda" and (uuids := _cuda_uuids()):
        return uuids[int(index or 0)]
    return "" if kind == "fake" else index


def _ordinal(kind: str, device: str) -> int:
    uuids = _cuda_uuids() if kind == "cuda" else []
    if device in uuids:
        return uuids.index(device)
    if uuids or not (device.isdecimal() or not device):
        raise TransferFailed(
            f"this process does not see the sender's device {device}",
            remedy="let both processes see it (CUDA_VISIBLE_DEVICES)",
        )
    return int(device or 0)


def _cuda_uuids() -> list[str]:
    """By ordinal of this process. Empty without torch, or without a GPU."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(n).uuid) for n in range(count)]
