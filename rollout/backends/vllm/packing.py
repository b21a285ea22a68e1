"""Linear weights on CPUs stay as they were loaded.

vLLM packs them into copies that no update reaches (a tied head goes stale without a word) and drops
the originals. Plain ones decode about 1.5 times slower, so only engines that take our updates keep
them: those whose weight-transfer engine is ours.
"""

from __future__ import annotations

from typing import Any

from hotbunk.rollout.backends.vllm.plugin import BACKEND


def turn_off() -> None:
    """From now on in this process, for models that are loaded for ``BACKEND``. Idempotent."""
    import vllm.model_executor.layers.utils as layer_utils
    from torch import nn
    from vllm.config import get_current_vllm_config_or_none

    pack = layer_utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "by_hotbunk", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Who loads weights again (verl's own rollout does) has no configuration at hand: a layer
        # then stays what it was made.
        config = get_current_vllm_config_or_none()
        chosen = config.weight_transfer_config if config is not None else None
        plain = layer.__dict__.get("cpu_linear") is nn.functional.linear
        if plain if config is None else chosen is not None and chosen.backend == BACKEND:
            layer.cpu_linear = nn.functional.linear
        else:
            pack(layer, remove_weight)

    dispatch.by_hotbunk = True  # type: ignore[attr-defined]
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
