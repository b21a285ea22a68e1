"""verl on a machine without an accelerator: try a configuration on a laptop.

A plugin of its own (``verl.plugins``), and nothing at all unless ``VERL_PLATFORM=hotbunk_cpu`` asks
for it. Then it registers the platform, and mends what verl and its libraries take for granted:

- torch.cpu lacks the memory calls that verl makes: they do nothing here;
- verl asks for the process group ``cpu:gloo,cpu:gloo``, which torch refuses;
- FSDP2's offload policy pins memory, which needs a device;
- flash attention, verl's default, has no CPU kernels: models are loaded with eager attention;
- the FSDP engine is the one registered for CUDA (``VERL_ENGINE_DEVICE``).

Ray hands out GPUs that are not there: ``ray_kwargs.ray_init.num_gpus``, which ``configs/verl/cpu``
sets with the other keys that a laptop needs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotbunk.trainer_hooks.verl.late import when_loaded
from hotbunk.trainer_hooks.verl.plugin import loudly

NAME = "hotbunk_cpu"


def _nothing(*args: Any, **kw: Any) -> None:
    """There is no device to do it to."""


def _zero(*args: Any, **kw: Any) -> int:
    return 0


def _complete_torch_cpu() -> None:
    import torch

    calls: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("empty_cache", "ipc_collect"), _nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_accumulated_memory_stats"), _nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), _zero),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _zero),
        "mem_get_info": lambda *args: (0, 0),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    }
    for name, call in calls.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, call)


def _accept_gloo_twice() -> None:
    import torch.distributed as dist

    made = dist.init_process_group

    @functools.wraps(made)
    def init_process_group(backend: Any = None, *args: Any, **kw: Any) -> Any:
        return made("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kw)

    dist.init_process_group = init_process_group


def _never_pin() -> None:
    import sys

    module: Any = sys.modules["torch.distributed.fsdp"]
    pinning: type = module.CPUOffloadPolicy

    class CPUOffloadPolicy(pinning):  # type: ignore[misc]
        """FSDP2's, on a host whose memory cannot be pinned."""

        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    module.CPUOffloadPolicy = CPUOffloadPolicy


def _eager_attention() -> None:
    import sys

    PreTrainedModel: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel  # noqa: N806

    checked = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(checked)
    def check(self: Any, attn_implementation: str | None, *args: Any, **kw: Any) -> Any:
        flash = attn_implementation is not None and "flash" in attn_implementation
        return checked(self, "eager" if flash else attn_implementation, *args, **kw)

    PreTrainedModel._check_and_adjust_attn_implementation = check


def _register_platform() -> None:
    import torch
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    @PlatformRegistry.register(platform=NAME)
    class CpuPlatform(PlatformBase):  # type: ignore[misc]
        """A host with nothing but its own processors and memory."""

        device_name = "cpu"
        vendor_name = "hotbunk"
        device_module = torch.cpu
        empty_cache = set_allocator_settings = set_device = synchronize = _nothing
        profiler_start = profiler_stop = cudart = _nothing

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return False  # never unless it is asked for

        def current_device(self) -> str:
            return "cpu"  # verl uses it as tensor.to(...)

        def device_count(self) -> int:
            return 1

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def ray_resource_name(self) -> str:
            return "GPU"  # verl checks for no other but an NPU

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False


def install() -> None:
    """The platform, and what it needs mended, in this process."""
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _complete_torch_cpu()
    _accept_gloo_twice()
    _register_platform()
    when_loaded("torch.distributed.fsdp", loudly("offloading on a host", _never_pin))
    when_loaded("transformers.modeling_utils", loudly("a model on a host", _eager_attention))


if os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME:
    loudly(f"VERL_PLATFORM={NAME}", install)()
