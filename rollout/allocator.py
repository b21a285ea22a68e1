"""Torch's caching allocator beside a pool: a setting that conflicts, and a cache that hides memory.

Expandable segments are the allocator's own use of virtual memory. An engine that lets torch
allocate from a pool of its own (``torch.cuda.MemPool``, a pluggable allocator) asserts at start
with them, or releases nothing. :data:`EXPANDABLE` turns them off for a scope. Arenas of
:class:`~hotbunk.rollout.memory.NativePool` do not come from torch and do not mind.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
"""Where the setting may come from, in torch's own order."""

_KEY = "expandable_segments"
# Whatever the spelling; a backend that is stricter refuses it at start by itself.
_SETTING = re.compile(rf"(?:^|,)\s*{_KEY}\s*:\s*(\w+)\s*(?=,|$)", re.IGNORECASE)


def is_on(settings: str) -> bool:
    """Whether a settings string turns expandable segments on; the last mention counts."""
    found = _SETTING.findall(settings)
    return bool(found) and found[-1].lower() in ("true", "1")


def preflight(environ: Mapping[str, str] = os.environ) -> str:
    """The environment variable that turns expandable segments on; empty: none does."""
    return next((name for name in VARIABLES if is_on(environ.get(name, ""))), "")


def _changed(settings: str, on: bool) -> str:
    """The settings with only this one changed: a string that leaves others out may reset them."""
    rest = _SETTING.sub("", settings).strip(", ")
    return f"{rest},{_KEY}:{on}" if rest else f"{_KEY}:{on}"


class ExpandableSegments:
    """The setting of one allocator, turned off in scopes.

    :param get: the allocator's settings as a string.
    :param put: sets them.
    """

    def __init__(self, get: Callable[[], str], put: Callable[[str], None]) -> None:
        self._get, self._put = get, put
        self._lock = threading.Lock()
        self._inside = 0
        self._before = ""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Off inside. After the outermost scope, of any thread, as before the first."""
        with self._lock:
            now = self._get()
            if not self._inside:
                self._before = now
            if is_on(now):
                self._put(_changed(now, False))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and is_on(self._before):
                    self._put(_changed(self._before, True))


def _torch_settings() -> str:
    import torch

    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # torch 2.9
    told = str(get()) if get is not None else ""
    found = (told, *(os.environ.get(name, "") for name in VARIABLES))
    return next((one for one in found if one), "")


def _set_torch(settings: str) -> None:
    import torch

    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (torch.cuda.memory._set_allocator_settings if put is None else put)(settings)


EXPANDABLE = ExpandableSegments(_torch_settings, _set_torch)
"""Torch's own allocator of this process."""


def empty_cache(device: str) -> Callable[[], None] | None:
    """What makes torch give its cached memory of a device back; None: it keeps none there."""
    kind = device.partition(":")[0]
    if kind not in ("cuda", "npu"):
        return None

    def empty() -> None:
        import torch

        getattr(torch, kind).empty_cache()

    return empty
