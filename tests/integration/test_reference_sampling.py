"""The reference engine's log-probs, ends of responses, pins, and requests carried over pauses."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import msgspec  # noqa: E402

from hotbunk.checkpoint_engine.manager import CheckpointEngineManager  # noqa: E402
from hotbunk.checkpoint_engine.transports.naive import NaiveTransport  # noqa: E402
from hotbunk.rollout import errors  # noqa: E402
from hotbunk.rollout.backends.reference.requests import RequestRules  # noqa: E402
from hotbunk.rollout.backends.reference.scheduler import Sequence  # noqa: E402
from hotbunk.rollout.contract import (  # noqa: E402
    Completion,
    FinishReason,
    GenerateRequest,
    PauseMode,
    Sampling,
    Version,
    collect,
)
from hotbunk.rollout.handle import LocalHandle  # noqa: E402
from hotbunk.rollout.partial import PartialResult, PartialRollout  # noqa: E402

pytestmark = pytest.mark.anyio
EOS = 257  # of the byte tokenizer


@torch.inference_mode()
def logprobs_of(kit: Any, model: Path, prompt: Any, response: Any, temperature: float) -> Any:
    """[response tokens, vocabulary]: what transformers gives, in float32."""
    logits = kit.loaded(model)(torch.tensor([[*prompt, *response]])).logits[0].float()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


# -- log-probs --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
async def test_log_probs_are_transformers_own(
    tiny: Any, kit: Any, engine: Any, temperature: float
) -> None:
    """Within 1e-4 in float32, in any batch, with prefix hits and under preemption."""
    model = tiny()
    backend = await engine(model, block_size=4, kv_cache_tokens=128, max_num_batched_tokens=16)
    prompts = kit.prompts(8, longest=30) * 2
    asked = {"temperature": temperature, "logprobs": 5, "top_k": 50}
    done: list[Completion] = await asyncio.gather(
        *(kit.complete(backend, p, 12, seed=n, **asked) for n, p in enumerate(prompts))
    )
    assert (await backend.status()).preemptions > 0
    for prompt, c in zip(prompts, done, strict=True):
        want = logprobs_of(kit, model, prompt, c.token_ids, temperature or 1.0)
        chosen = want.gather(1, torch.tensor(c.token_ids)[:, None]).squeeze(1)
        assert torch.allclose(torch.tensor(c.logprobs), chosen, atol=1e-4, rtol=0)
        assert len(c.top_logprobs) == len(c.token_ids)
        best = want.topk(5).values
        found = torch.tensor([[p for _, p in top] for top in c.top_logprobs])
        assert torch.allclose(found, best, atol=1e-4, rtol=0)
        ids = torch.tensor([[t for t, _ in top] for top in c.top_logprobs])
        assert torch.allclose(want.gather(1, ids), found, atol=1e-4, rtol=0)


async def test_seeded_draws_do_not_depend_on_neighbours_cache_or_preemption(
    tiny: Any, kit: Any, engine: Any
) -> None:
    model = tiny()
    roomy, tight = await engine(model), await engine(model, kv_cache_tokens=96, block_size=4)
    prompts = kit.prompts(10, shortest=4, longest=20)
    hot = {"temperature": 1.2, "top_p": 0.95}
    alone = [
        list((await kit.complete(roomy, p, 20, seed=n, **hot)).token_ids)
        for n, p in enumerate(prompts)
    ]
    crowd = await asyncio.gather(
        *(kit.complete(tight, p, 20, seed=n, **hot) for n, p in enumerate(prompts))
    )
    assert (await tight.status()).preemptions > 0
    assert [list(c.token_ids) for c in crowd] == alone
    greedy = [kit.golden(model, p, 20) for p in prompts]
    assert sum(a == g for a, g in zip(alone, greedy, strict=True)) < 3, "nothing was drawn"


# -- where a response ends --------------------------------------------------------------------


def with_eos(model: Path, to: Path, *, config: Any = None, generation: Any = None) -> Path:
    """A copy of a model that names other ends of sequence."""
    shutil.copytree(model, to)
    said = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**said, "eos_token_id": config}))
    if generation is not None:
        (to / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return to


@pytest.mark.parametrize("where", ["config", "config list", "generation_config"])
async def test_the_models_own_end_ends_a_response_unless_ignored(
    tiny: Any, kit: Any, engine: Any, tmp_path: Path, where: str
) -> None:
    model = tiny()
    [prompt] = kit.prompts(1, shortest=10)
    golden = kit.golden(model, prompt, 12)
    end = golden[5]
    stops = golden.index(end) + 1
    named: dict[str, Any] = {
        "config": {"config": end},
        "config list": {"config": [EOS, end]},
        "generation_config": {"config": EOS, "generation": [EOS, end]},
    }[where]
    backend = await engine(with_eos(model, tmp_path / "model", **named))
    done = await kit.complete(backend, prompt, 12, ignore_eos=False)
    assert (list(done.token_ids), done.finish_reason) == (golden[:stops], FinishReason.STOP)
    done = await kit.complete(backend, prompt, 12, ignore_eos=True)
    assert (list(done.token_ids), done.finish_reason) == (golden, FinishReason.LENGTH)
    other = golden[2]
    done = await kit.complete(backend, prompt, 12, ignore_eos=True, stop_token_ids=(other, 9999))
    assert list(done.token_ids) == golden[: golden.index(other) + 1]
    assert done.finish_reason is FinishReason.STOP
    backend.check_invariants()


def printable_pair(tokens: list[int]) -> int:
    """Where two printable characters stand side by side for the first time."""
    pairs = pairwise(tokens)
    return next(n for n, (a, b) in enumerate(pairs) if 33 <= a < 127 and 33 <= b < 127)


async def test_a_stop_string_ends_with_the_token_that_completes_it(
    tiny: Any, kit: Any, engine: Any
) -> None:
    """Over token boundaries, also where a cut lies in the middle of the string."""
    model = tiny()
    backend = await engine(model)
    for prompt in kit.prompts(6, shortest=5):
        golden = kit.golden(model, prompt, 60)
        at = printable_pair(golden)
        text = bytes(golden[at : at + 2]).decode()
        done = await kit.complete(backend, prompt, 60, stop=("never said", text))
        assert (list(done.token_ids), done.finish_reason) == (golden[: at + 2], "stop")
        asked = kit.request([*prompt, *golden[: at + 1]], 60 - at - 1, stop=(text,))
        rest = await collect(backend.generate(msgspec.structs.replace(asked, continued=at + 1)))
        assert (list(rest.token_ids), rest.finish_reason) == ([golden[at + 1]], "stop")
        fresh = await kit.complete(backend, asked.prompt, 60 - at - 1, stop=(text,))
        assert fresh.token_ids[: len(rest.token_ids)] == rest.token_ids
        assert len(fresh.token_ids) > 1, "text of the prompt counts as said"


def rules(kit: Any, model: Path) -> RequestRules:
    return RequestRules(kit.loaded(model).config, model, 4096)


def ends_at(rules: RequestRules, tokens: list[int], *stop: str, prompt: bytes = b"say: ") -> int:
    """After how many of these tokens the response ends (0: it does not)."""
    wants = Sampling(max_tokens=len(tokens) + 1, stop=stop, ignore_eos=True)
    sequence = Sequence(GenerateRequest("r", tuple(prompt), wants))
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if rules.finished(sequence, token) is FinishReason.STOP:
            return count
    return 0


def test_stop_strings_are_found_wherever_they_end(tiny: Any, kit: Any) -> None:
    it = rules(kit, tiny())
    said = list("the end of a naïve 東京 answer".encode())
    assert ends_at(it, said, "end") == 7
    assert ends_at(it, said, "answer", "東京") == len("the end of a naïve 東京".encode())
    assert ends_at(it, said, "ï") == len("the end of a naï".encode())
    assert ends_at(it, said, "t") == 1
    assert ends_at(it, said, "END") == 0
    assert ends_at(it, list(b"abcabcabd"), "abcabd") == 9
    assert ends_at(it, list(b"x" * 500 + b"stop"), "xstop") == 504
    assert ends_at(it, list(b"nd"), "end", prompt=b"the e") == 0, "text of the prompt is not said"
    assert ends_at(it, list(b"a . b"), " .") == 3, "the decoder tidied the text up"


def test_special_tokens_inside_a_stop_string_do_not_hide_it(tiny: Any, kit: Any) -> None:
    it = rules(kit, tiny())
    said = [*b"ab", *[EOS] * 40, *b"cd"]
    assert ends_at(it, said, "abcd") == len(said)


def test_requests_that_cannot_be_meant(tiny: Any, kit: Any) -> None:
    it = rules(kit, tiny())
    wrong: list[dict[str, Any]] = [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"top_k": -1},
        {"n": 0},
        {"max_tokens": 0},
        {"logprobs": -1},
        {"logprobs": 10_000},
        {"stop": ("a", "")},
    ]
    for sampling in wrong:
        with pytest.raises(errors.UsageError):
            it.check(GenerateRequest("r", (1, 2), Sampling(**sampling)))
    for request in (
        GenerateRequest("r", (), Sampling()),
        GenerateRequest("r", (1, 259), Sampling()),
        GenerateRequest("r", (1, -1), Sampling()),
        GenerateRequest("r", (1, 2), Sampling(), continued=3),
        GenerateRequest("r", (1, 2), Sampling(), continued=-1),
    ):
        with pytest.raises(errors.UsageError):
            it.check(request)
    it.check(GenerateRequest("r", (1, 2), Sampling(stop=("x",)), continued=2))


async def test_stop_strings_without_a_tokenizer_are_unsupported_at_once(
    tiny: Any, kit: Any, engine: Any, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny(), bare, ignore=shutil.ignore_patterns("*token*"))
    backend = await engine(bare)
    with pytest.raises(errors.Unsupported, match="stop strings"):
        await kit.complete(backend, [1, 2, 3], stop=("x",))
    assert list((await kit.complete(backend, [1, 2, 3])).token_ids) == kit.golden(tiny(), [1, 2, 3])


# -- pinned versions --------------------------------------------------------------------------


async def test_a_pinned_request_is_made_by_its_version_or_ends(
    tiny: Any, kit: Any, replica: Any
) -> None:
    """New, held and frozen ones: none is continued by other weights (V6)."""
    one, two = tiny(seed=0), tiny(seed=1)
    target = await replica(one)
    manager = CheckpointEngineManager([LocalHandle(target)], NaiveTransport())
    old, new = Version(0, 0), Version(0, 1)

    def pinned(version: Version, count: int = 8) -> GenerateRequest:
        return msgspec.structs.replace(kit.request([5, 6, 7], count), version=version)

    done = await collect(target.generate(pinned(old)))
    assert list(done.token_ids) == kit.golden(one, [5, 6, 7], 8)
    with pytest.raises(errors.RequestRejected):
        await collect(target.generate(pinned(new)))
    stream = target.generate(pinned(old, 100))
    begun = await kit.first_tokens(stream, 3)
    await target.pause_generation(PauseMode.KEEP)
    held_old = asyncio.ensure_future(collect(target.generate(pinned(old))))
    held_new = asyncio.ensure_future(collect(target.generate(pinned(new))))
    await asyncio.sleep(0)
    await manager.update_weights(kit.source(two), new)
    await target.resume_generation()
    rest = await collect(stream)
    assert (rest.finish_reason, rest.retryable) == (FinishReason.ABORT, True)
    assert {s.version for s in rest.spans} <= {old}
    cut = begun + list(rest.token_ids)
    assert cut == kit.golden(one, [5, 6, 7], len(cut))
    with pytest.raises(errors.RequestRejected):
        await held_old
    assert list((await held_new).token_ids) == kit.golden(two, [5, 6, 7], 8)
    target.backend.check_invariants()


# -- cut off and continued --------------------------------------------------------------------


async def cut_up(target: Any, requests: list[GenerateRequest], cuts: int) -> list[PartialResult]:
    """These requests by a partial rollout, while pauses cut them off again and again."""
    client = PartialRollout([LocalHandle(target)])
    running = [asyncio.ensure_future(client.generate(r)) for r in requests]
    for _ in range(cuts):
        made = (await target.status()).backend.tokens_generated
        while (await target.status()).backend.tokens_generated < made + 3 * len(requests):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await target.pause_generation(PauseMode.ABORT)
        await target.resume_generation()
    return await asyncio.gather(*running)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 40}], ids=str)
async def test_a_continued_response_equals_the_uninterrupted_one_v1_v5(
    tiny: Any, kit: Any, replica: Any, sampling: dict[str, Any]
) -> None:
    """Greedy and, draws being positional, also sampled with the same seed."""
    model = tiny()
    target = await replica(model, block_size=4)
    prompts = kit.prompts(6, longest=20)
    requests = [kit.request(p, 60, seed=n, logprobs=2, **sampling) for n, p in enumerate(prompts)]
    plain = [await collect(target.generate(r)) for r in requests]
    async with asyncio.timeout(60):
        carried = await cut_up(target, requests, 5)
    for want, got in zip(plain, carried, strict=True):
        done = got.completion
        assert done.token_ids == want.token_ids
        assert done.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert len(done.top_logprobs) == 60
        assert done.finish_reason is FinishReason.LENGTH
    assert sum(r.continuations for r in carried) >= 5
    if not sampling:
        assert [list(r.completion.token_ids) for r in carried] == [
            kit.golden(model, p, 60) for p in prompts
        ]
    target.backend.check_invariants()
