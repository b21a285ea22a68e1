"""A reward manager that asks a judge: verl 0.9.1 hands one that takes turns the prompt and the response alone.

``reward.reward_manager.source=importlib``, ``.name=Judging``, ``.module.path=`` this file.
"""

from __future__ import annotations

import sys
from typing import Any

import aiohttp
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


async def verdict(address: str, question: str) -> str:
    """What the judge says to a question, greedily."""
    asked = {
        "model": "judge",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0.0,
        "max_tokens": 8,
    }
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"http://{address}/v1/chat/completions", json=asked) as answer,
    ):
        answer.raise_for_status()
        said = await answer.json()
    return str(said["choices"][0]["message"]["content"])


def worth(said: str) -> float:
    """A random judge says nothing that could be read; how long its words are will do, in (0, 1]."""
    return len(said.encode()) % 7 / 7 + 1 / 7


async def judged(data_source: str, solution_str: str, **kw: Any) -> float:
    """A reward function, where the judge has devices of its own."""
    said = await verdict(kw["reward_router_address"], f"grade: {solution_str}")
    sys.stderr.write(f"the judge said {said!r}\n")
    return worth(said)


class Judging(RewardManagerBase):  # type: ignore[misc]
    """See the module."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        assert reward_router_address is not None
        self.address = reward_router_address

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of one response."""
        one = data[0]
        ids = one.batch["responses"]
        length = int(one.batch["attention_mask"][-len(ids) :].sum())
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        score = await judged("", text, reward_router_address=self.address)
        return {"reward_score": score, "reward_extra_info": {}}
