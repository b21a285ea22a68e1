"""Adapters through the manager: the base first where it is missing, and never again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager  # noqa: E402
from hotbunk.checkpoint_engine.policy import Outcome, SyncPolicy  # noqa: E402
from hotbunk.checkpoint_engine.source import state_dict_source  # noqa: E402
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport  # noqa: E402
from hotbunk.conformance.kit import greedy, make_adapter, merged  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.contract import ADAPTER_PREFIX, Retention, Tag, Version, collect  # noqa: E402
from hotbunk.rollout.handle import LocalHandle  # noqa: E402

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
BASE = Version(0, 1)


class Counting:
    """A source that counts its walks."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.walks = inner, 0

    def specs(self) -> Any:
        return self.inner.specs()

    def tensors(self) -> Iterator[Any]:
        self.walks += 1
        return self.inner.tensors()


class Job:
    """A trainer with a frozen base and one adapter, and the engines it syncs to."""

    def __init__(self, kit: Any, model: Any, *replicas: Any, **options: Any) -> None:
        self.model = kit.loaded(model)
        self.kit = kit
        self.replicas = replicas
        self.base = Counting(kit.source(model))
        self.manager = CheckpointEngineManager(
            [LocalHandle(r) for r in replicas],
            NaiveTransport(),
            policy=SyncPolicy(bucket_bytes=10_000),
            **options,
        )

    def adapter(self, step: int) -> Any:
        return make_adapter(self.model, "a", step)

    async def sync(self, step: int, tensors: Any = None) -> Any:
        given = self.adapter(step) if tensors is None else tensors
        return await self.manager.update_adapter(
            "a",
            state_dict_source(given, group=f"{ADAPTER_PREFIX}a"),
            Version(0, step),
            base=self.base,
            base_version=BASE,
        )

    async def check(self, step: int, target: Any) -> None:
        """The adapter's tokens are those of merged weights, and the base's those of the base."""
        asked = self.kit.request(PROMPT, 10)
        done = await collect(target.generate(replace(asked, adapter="a")))
        assert list(done.token_ids) == greedy(merged(self.model, self.adapter(step)), PROMPT, 10)
        plain = await collect(target.generate(replace(asked, request_id=asked.request_id + "b")))
        assert list(plain.token_ids) == greedy(self.model, PROMPT, 10)
        versions = (await target.status()).versions
        assert versions == {"target": BASE, f"{ADAPTER_PREFIX}a": Version(0, step)}


async def test_the_first_sync_brings_the_base_then_the_adapter_l2(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target)
    report = await job.sync(1)
    (outcome,) = report.outcomes
    assert [update.groups for update in outcome.updates] == [("target",), (f"{ADAPTER_PREFIX}a",)]
    assert not outcome.updates[0].skipped
    await job.check(1, target)


@pytest.mark.parametrize("frozen_base", [True, False])
async def test_after_a_sleep_the_base_travels_only_if_it_was_discarded_l1(
    tiny: Any, kit: Any, replica: Any, frozen_base: bool
) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target, frozen_base=frozen_base)
    await job.sync(1)
    for step in (2, 3):
        await job.manager.sleep_replicas()
        whole = sum(spec.nbytes for spec in job.base.specs())
        assert ((await target.memory()).backup() >= whole) is frozen_base
        report = await job.sync(step)
        base, adapter = report.outcomes[0].updates
        assert base.skipped is frozen_base
        assert base.verified == "applied", "a base that was not sent was not compared either"
        assert not adapter.skipped
        assert job.base.walks == (1 if frozen_base else step)
        await job.check(step, target)


async def test_a_resident_base_whose_bytes_changed_is_sent_again(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target)
    await job.sync(1)
    with torch.no_grad():
        target.backend._runner.binding.tensor("model.layers.0.mlp.up_proj.weight")[0, 0] += 1
    report = await job.sync(2)
    assert not report.outcomes[0].updates[0].skipped
    await job.check(2, target)


async def test_adapters_go_to_awake_replicas_without_a_release_l3(
    tiny: Any, kit: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target, frozen_base=True)
    await job.sync(1)
    released: list[Any] = []
    release = target.release

    async def noting(tags: Any = None, **kw: Any) -> Any:
        released.append((tags, kw.get("retention")))
        return await release(tags, **kw)

    monkeypatch.setattr(target, "release", noting)
    await job.sync(2)
    assert released == []
    await job.manager.sleep_replicas()
    assert released == [(None, Retention.BACKUP)]
    assert (await target.memory()).resident(Tag.WEIGHTS) == 0
    await job.sync(3)
    await job.check(3, target)


async def test_a_refused_adapter_leaves_base_and_old_adapter(
    tiny: Any, kit: Any, replica: Any
) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target)
    await job.sync(1)
    bad = dict(job.adapter(2))
    bad["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 3)
    with pytest.raises(errors.SyncFailed) as caught:
        await job.sync(2, bad)
    (outcome,) = caught.value.report.outcomes
    assert (outcome.outcome, outcome.error_type) == (Outcome.ROLLED_BACK, "ShapeMismatch")
    assert job.base.walks == 1
    await job.check(1, target)


async def test_the_same_payload_twice_is_told_l5(
    tiny: Any, kit: Any, replica: Any, caplog: Any
) -> None:
    """An adapter that never changes looks like staleness: the trainer is told."""
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target)
    first = await job.sync(1)
    second = await job.sync(2)
    payloads = [report.outcomes[0].updates[-1].fingerprint for report in (first, second)]
    assert payloads[0] != payloads[1]
    assert "same content" not in caplog.text
    await job.sync(3, job.adapter(2))
    assert "adapter 'a' has the same content at 0.3 as at 0.2" in caplog.text


async def test_an_adapter_is_walked_once_a_version_l7(tiny: Any, kit: Any, replica: Any) -> None:
    target = await replica(tiny(seed=0), load="empty")
    job = Job(kit, tiny(seed=1), target)
    for step in (1, 2):
        counted = Counting(state_dict_source(job.adapter(step), group=f"{ADAPTER_PREFIX}a"))
        for _ in range(2):
            report = await job.manager.update_adapter(
                "a", counted, Version(0, step), base=job.base, base_version=BASE
            )
        assert report.outcomes[0].updates[-1].skipped, "the same version again was sent again"
        assert counted.walks == 1
    await job.check(2, target)
