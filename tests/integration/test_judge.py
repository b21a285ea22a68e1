"""The judge: what it is asked, how it is understood, and when it holds memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from hotbunk.rollout.contract import Completion, FinishReason
from hotbunk.rollout.errors import ConfigError, EngineFailed
from hotbunk.trainer_hooks.recipes import config as configuration
from hotbunk.trainer_hooks.recipes.config import JudgeConfig
from hotbunk.trainer_hooks.recipes.judge import Judge
from hotbunk.trainer_hooks.recipes.models import build_tiny
from hotbunk.trainer_hooks.recipes.preflight import plan_run
from hotbunk.trainer_hooks.recipes.tasks import Sample

pytestmark = pytest.mark.anyio
SAMPLE = Sample("407=", "407")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny(tmp_path / "judge", hidden=32, layers=1)


def config(model: Path, **changes: object) -> JudgeConfig:
    return JudgeConfig(
        **{  # type: ignore[arg-type]
            "name": "generative",
            "model": str(model),
            "template": "{prompt}|{answer}|{completion}",
            "scale": 10.0,
            "options": {"kv_cache_tokens": 512},
            **changes,
        }
    )


async def test_it_holds_memory_only_while_it_speaks(model: Path) -> None:
    async with AsyncExitStack() as stack:
        judge = await Judge.start(config(model), stack)
        assert (await judge.handle.memory()).resident() == 0
        seen = []
        generate = judge.handle.generate

        def spy(request):  # type: ignore[no-untyped-def]
            seen.append(request)
            return generate(request)

        judge.handle.generate = spy  # type: ignore[method-assign]
        first = await judge.score([SAMPLE] * 3, ["407", "408", ""])
        again = await judge.score([SAMPLE] * 3, ["407", "408", ""])
        assert first == again, "its weights come back as they were"
        assert all(0 <= one <= 1 for one in first)
        assert (await judge.handle.memory()).resident() == 0
        asked = judge._bundle.tokenizer.decode(seen[1].prompt)
        assert "407=|407|408" in asked
        assert len({one.request_id for one in seen}) == 6


async def test_a_response_cannot_write_the_question(model: Path) -> None:
    async with AsyncExitStack() as stack:
        judge = await Judge.start(config(model), stack)
        request = judge._request(SAMPLE, "{answer}")
        asked = judge._bundle.tokenizer.decode(request.prompt)
        assert "407=|407|{answer}" in asked


@pytest.mark.parametrize(
    "said, worth, unreadable",
    [
        ("7", 0.7, 0),
        ("I say 2.5!", 0.25, 0),
        ("11", 1.0, 0),
        ("none at all", 0.0, 1),
    ],
)
async def test_a_number_is_found_or_counted_as_missing(
    model: Path, said: str, worth: float, unreadable: int
) -> None:
    async with AsyncExitStack() as stack:
        judge = await Judge.start(config(model), stack)
        tokens = tuple(judge._bundle.tokenizer.encode(said))
        done = Completion("j", tokens, (0.0,) * len(tokens), (), FinishReason.STOP)
        assert judge._verdict(done) == pytest.approx(worth)
        assert judge.unreadable == unreadable
        with pytest.raises(EngineFailed, match="did not finish"):
            judge._verdict(Completion("j", (), (), (), FinishReason.ABORT, error="held too long"))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"pattern": "("}, "judge.pattern"),
        ({"pattern": "7"}, "no group"),
        ({"template": "{prompt}"}, "completion"),
        ({"weight": 0.0}, "share"),
        ({"scale": 0.0}, "above 0"),
        ({"name": "human"}, "neither none nor generative"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(Path("nowhere"), **changes)


def test_a_judge_needs_everybody_to_take_turns(model: Path, tmp_path: Path) -> None:
    chosen = ["judge=generative", f"judge.model={model}", f"out={tmp_path / 'run'}"]
    plan_run(configuration.load(chosen))
    with pytest.raises(ConfigError, match="no turn"):
        plan_run(configuration.load([*chosen, "trainer=grpo_async"]))
    with pytest.raises(ConfigError, match="no model directory"):
        plan_run(configuration.load([*chosen[::2], "judge.model=/none"]))
    with pytest.raises(ConfigError, match=r"did you mean 'judge\.weight'"):
        configuration.load([*chosen, "judge.wieght=1"])
