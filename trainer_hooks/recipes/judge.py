"""A generative reward model that shares the device: a COLOCATED replica with a manager of its own.

It sleeps at level 1 (weights backed up on the host, KV gone) and is never synced. It wakes only when
policy engine and trainer are away, so the most that is held does not grow by it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport
from hotbunk.rollout.contract import Completion, Deployment, GenerateRequest, Sampling, collect
from hotbunk.rollout.errors import ConfigError, EngineFailed
from hotbunk.rollout.handle import LocalHandle, ReplicaHandle
from hotbunk.rollout.registry import create_backend
from hotbunk.rollout.replica import Replica
from hotbunk.trainer_hooks.recipes.config import JudgeConfig
from hotbunk.trainer_hooks.recipes.models import encode_sample, ensure_smollm2, load_bundle
from hotbunk.trainer_hooks.recipes.tasks import Sample

NAME = "judge"


class Judge:
    """See the module. Made by :meth:`start`; asleep between calls of :meth:`score`."""

    def __init__(self, config: JudgeConfig, model_dir: Path, handle: ReplicaHandle) -> None:
        self.config = config
        self.handle = handle
        self.unreadable = 0  # verdicts without a number, so far; each counts as 0
        self._bundle = load_bundle(model_dir)
        self._manager = CheckpointEngineManager(
            [handle], NaiveTransport(), deployment=Deployment.COLOCATED
        )
        self._pattern = re.compile(config.pattern)
        self._asked = 0

    @classmethod
    async def start(cls, config: JudgeConfig, stack: AsyncExitStack) -> Judge:
        """Load its model and put it to sleep; the stack closes it.

        :raises ConfigError: no such model.
        :raises Unsupported: its backend cannot keep a backup.
        """
        model_dir = judge_model(config)
        backend = create_backend(config.backend, model=str(model_dir), **config.options)
        replica = Replica(backend, name=NAME)
        stack.push_async_callback(replica.close)
        await replica.start()
        made = cls(config, model_dir, LocalHandle(replica))
        await made._manager.sleep_replicas()
        return made

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> list[float]:
        """What each of these responses is worth, in [0, 1]. It has the device meanwhile.

        :raises EngineFailed: a verdict that was not finished.
        """
        await self._manager.wake_replicas()
        try:
            requests = [self._request(s, t) for s, t in zip(samples, texts, strict=True)]
            done = await asyncio.gather(*(collect(self.handle.generate(r)) for r in requests))
        finally:
            await self._manager.sleep_replicas()
        return [self._verdict(one) for one in done]

    def _request(self, sample: Sample, text: str) -> GenerateRequest:
        config = self.config
        fields = {"prompt": sample.prompt, "answer": sample.answer, "completion": text}
        # Filled in one after another, a response could write the question.
        question = re.sub(
            r"\{(prompt|answer|completion)\}", lambda found: fields[found[1]], config.template
        )
        asked = Sample(question, "", messages=({"role": "user", "content": question},))
        tokenizer = self._bundle.tokenizer
        self._asked += 1
        return GenerateRequest(
            f"{NAME}{self._asked}",
            tuple(encode_sample(tokenizer, asked)),
            Sampling(0.0, config.max_tokens, 0, (tokenizer.eos_id,)),
        )

    def _verdict(self, said: Completion) -> float:
        if said.error or not said.token_ids:
            raise EngineFailed(
                f"the judge did not finish {said.request_id!r}: "
                f"{said.error or said.finish_reason.value}"
            )
        found = self._pattern.search(self._bundle.tokenizer.decode(said.token_ids))
        try:
            number = float(found[1]) if found else None
        except (ValueError, TypeError, IndexError):  # the pattern found something else
            number = None
        if number is None:
            self.unreadable += 1
            return 0.0
        return min(max(number / self.config.scale, 0.0), 1.0)


def judge_model(config: JudgeConfig) -> Path:
    """The judge's model directory. :raises ConfigError: there is none."""
    if config.model is None:
        raise ConfigError("judge.model is not set", remedy="name a model directory, or smollm2")
    return ensure_smollm2() if config.model == "smollm2" else Path(config.model)
