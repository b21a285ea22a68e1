"""How an update gets to a vLLM server: through hotbunk's engine in its workers, or by a reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotbunk.rollout import errors
from hotbunk.rollout.backends.vllm_http.checkpoint import Checkpoint, Staged
from hotbunk.rollout.backends.vllm_http.options import ENGINE, RELOAD
from hotbunk.rollout.contract import (
    Capabilities,
    Scope,
    ScopeKind,
    Ticket,
    Transfer,
    UpdateReport,
    Version,
)
from hotbunk.rollout.http.relay import relay
from hotbunk.rollout.intake import check_offer

if TYPE_CHECKING:
    from hotbunk.rollout.backends.vllm_http.engine import VllmHttpEngine

_TRANSPORT = "shm"


class Weights:
    """One server's receiving end. ``way`` and ``why``: see ``declared.way_of``."""

    def __init__(self, engine: VllmHttpEngine, way: str, why: str) -> None:
        self._engine = engine
        self._way, self._why = way, why
        self._initialised = False

    @property
    def capabilities(self) -> Capabilities:
        """The server's, for the relay."""
        return self._engine.capabilities

    async def receive(self, transfer: Transfer, version: Version, scope: Scope) -> UpdateReport:
        """One update, as :meth:`RolloutBackend.update_weights` describes it."""
        backend = self.capabilities.backend
        allowed = {ScopeKind.FULL} | ({ScopeKind.PARTIAL} if self.capabilities.partial else set())
        if scope.kind not in allowed:
            raise errors.Unsupported(f"{scope.kind.value} updates", backend)
        if self._way == ENGINE:
            manifest = transfer.manifest
            await relay(self, transfer, _TRANSPORT, self._engine.options.deadlines.update)
            await self._engine.forget_old_versions()
            await self._engine.label(version)
            # Each worker has taken all it needs of what is offered, or none has committed.
            return UpdateReport(
                version,
                applied=len(manifest.tensors),
                nbytes=manifest.total_bytes,
                verified="none" if manifest.fingerprint == "none" else "applied",
            )
        if self._way == RELOAD:
            return await self._reloaded(transfer, version)
        raise errors.Unsupported("update_weights", backend, self._why)

    async def update_weights(
        self, source: Ticket, *, version: Version, scope: Scope
    ) -> UpdateReport:
        """The relay's offer: each worker of the server opens its own end, and they vote together."""
        llm = self._engine.llm
        if not self._initialised:
            await llm.init_weight_transfer_engine({})
            self._initialised = True
        await llm.start_weight_update()
        info = {
            "transport": source.transport,
            "address": source.address,
            "ranks": source.ranks,
            "deadline": self._engine.options.deadlines.update,
        }
        await llm.update_weights(info)
        await llm.finish_weight_update()
        return UpdateReport(version)

    async def _reloaded(self, transfer: Transfer, version: Version) -> UpdateReport:
        """As a checkpoint that the server's own loader reads. Needs host memory for all of it.

        :raises Unsupported: the loader would leave something stale.
        """
        manifest, engine = transfer.manifest, self._engine
        config = engine.surface.config
        if config.device_config.device == "cpu" and any(it.aliases for it in manifest.tensors):
            # Their packed copy of a tied head is not made anew, and nothing tells.
            raise errors.Unsupported(
                "tied weights by reload",
                self.capabilities.backend,
                "vLLM keeps a stale head on CPUs; use its weight-transfer engine",
            )
        checkpoint = Checkpoint(config.model_config.model)
        check_offer(manifest, checkpoint.placements, [{name} for name in checkpoint.placements])
        with Staged(manifest) as staged:
            await transfer.accept(None)
            async for bucket in transfer.buckets():
                staged.write(bucket)
            applied = staged.intake.finish()
            expected = await transfer.fingerprints()
            staged.check(expected)
            with staged.directory() as folder:
                await engine.llm.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(folder)}
                )
            await engine.forget_old_versions()
            await transfer.commit()
            await engine.label(version)
            return UpdateReport(
                version,
                applied=applied,
                nbytes=staged.intake.nbytes,
                buckets=staged.intake.buckets,
                verified="transfer" if expected else "none",
            )
