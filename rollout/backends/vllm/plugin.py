"""What vLLM finds through its ``vllm.general_plugins`` entry point, in each of its processes."""

from __future__ import annotations

BACKEND = "hotbunk"  # of ``WeightTransferConfig``


def register() -> None:
    """Make the weight-transfer engine known by name, where this vLLM has what it needs. Idempotent.

    It is in every vLLM of an environment with hotbunk, also those that never take our updates: it
    changes nothing for them.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Engines
    from vllm.platforms import current_platform

    if not hasattr(WeightTransferEngine, "start_weight_update") or BACKEND in Engines._registry:
        return
    Engines.register_engine(
        BACKEND, "hotbunk.rollout.backends.vllm.transfer_engine", "HotbunkWeightTransferEngine"
    )
    if current_platform.is_cpu():
        from hotbunk.rollout.backends.vllm.packing import turn_off

        turn_off()
