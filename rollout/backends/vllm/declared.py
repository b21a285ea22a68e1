"""What a vLLM engine of these options can do on this machine."""

from __future__ import annotations

from hotbunk.rollout import native
from hotbunk.rollout.backends.vllm.compat import ADAPTERS, KV_ALONE, Surface, installed
from hotbunk.rollout.backends.vllm.options import VllmOptions, is_cpu_build
from hotbunk.rollout.contract import (
    NATIVE,
    Ability,
    Cache,
    Capabilities,
    Gate,
    PauseMode,
    Retention,
    Support,
    unsupported,
)

_CACHES = frozenset({Cache.PREFIX, Cache.MULTIMODAL, Cache.ENCODER, Cache.CONNECTORS})


def no_sleep(options: VllmOptions) -> str:
    """Why memory cannot be given back; empty: it can."""
    if not options.enable_sleep_mode:
        return "vLLM was started with enable_sleep_mode=false"
    if is_cpu_build() and not native.path().is_file():
        return "stock vLLM frees nothing on CPUs, and hotbunk was installed without its native pool"
    return ""


def _adapter(options: VllmOptions, surface: Surface) -> Ability:
    if not options.adapter_rank:
        return unsupported("vLLM was started without enable_lora")
    if ADAPTERS not in surface:
        return unsupported(f"this vLLM lacks {ADAPTERS}")
    return Ability(Support.NATIVE, f"of rank {options.adapter_rank} or less, on linear layers")


def declared(options: VllmOptions, surface: Surface | None = None) -> Capabilities:
    """From the device, what is installed, and the options.

    :param surface: of the vLLM that is driven; None: the one that is installed.
    """
    why = no_sleep(options)
    sleep = kv_alone = unsupported(why) if why else NATIVE
    if sleep and not is_cpu_build() and KV_ALONE not in (surface or installed()):
        kv_alone = unsupported(f"this vLLM lacks {KV_ALONE}, and level 2 would drop the weights")
    every = frozenset(Retention) if is_cpu_build() else frozenset(Retention) - {Retention.RESIDENT}
    return Capabilities(
        backend="vllm",
        release=sleep,
        release_kv_cache=kv_alone,
        retentions=frozenset({Retention.RESIDENT}) if why else every,
        pause={
            PauseMode.ABORT: NATIVE,
            # vLLM's own wait leaves queued requests queued, also those a keep put there.
            PauseMode.WAIT: Ability(
                Support.NATIVE, "the adapter lets what is in flight end, then pauses vLLM"
            ),
            PauseMode.KEEP: NATIVE,
        },
        keep_release=sleep,
        gate=Gate.ENGINE_PAUSE,
        adapter=_adapter(options, surface or installed()),
        layout=NATIVE,
        caches=_CACHES,
        memory_measured_by="process" if is_cpu_build() and not why else "accounting",
        sharded=NATIVE,
        ranks=options.grid.size,
    )
