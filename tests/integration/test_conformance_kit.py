"""The suite's models: every family tied and untied, the same bits every time, versions told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hotbunk.conformance.backends.reference import ReferenceUnderTest
from hotbunk.conformance.case import REGISTRY, Status, all_cases
from hotbunk.conformance.kit import distinct, greedy, make_model
from hotbunk.conformance.runner import run_case

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
KINDS = [(family, tied) for family in FAMILIES for tied in (False, True)]
IDS = [f"{family}-{'tied' if tied else 'untied'}" for family, tied in KINDS]
VERSIONS = range(4)
CASES = (
    "goldens_of_two_versions",
    "an_update_equals_a_fresh_engine",
    "tied_tensors",
    "cycle_parity",
)

# What a process makes of the kit: a digest of every parameter and buffer, by kind and version.
DIGESTS = """
import hashlib, torch
from hotbunk.conformance.kit import make_model
torch.manual_seed({seed})
torch.rand(7)
for family in {families!r}:
    for tied in (False, True):
        for version in range(2):
            model = make_model(family, version, tied=tied)
            found = hashlib.sha256()
            for name, held in sorted([*model.named_parameters(), *model.named_buffers()]):
                found.update(name.encode() + held.numpy().tobytes())
            print(family, tied, version, found.hexdigest())
"""


@pytest.mark.parametrize("family, tied", KINDS, ids=IDS)
def test_versions_differ_on_every_prompt(family: str, tied: bool) -> None:
    prompts, n = ReferenceUnderTest.prompts, ReferenceUnderTest.tokens
    models = [make_model(family, version, tied=tied) for version in VERSIONS]
    goldens = [[greedy(model, prompt, n) for prompt in prompts] for model in models]
    assert distinct(goldens)


@pytest.mark.parametrize("family, tied", KINDS, ids=IDS)
def test_ties_and_buffers_are_there(family: str, tied: bool) -> None:
    model = make_model(family, 1, tied=tied)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) is tied
    assert head.data_ptr() == embedding.data_ptr() or not tied
    buffers = dict(model.named_buffers())
    assert buffers, "it has no state beside its parameters"
    assert not buffers.keys() <= model.state_dict().keys(), "each is in a checkpoint"


def _digests(seed: int, threads: str) -> list[str]:
    code = DIGESTS.format(seed=seed, families=FAMILIES)
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        text=True,
        capture_output=True,
        timeout=100,
        env=env,
    )
    return done.stdout.splitlines()


def test_two_processes_make_the_same_bits() -> None:
    """Whatever was drawn before, however many threads: goldens of one are goldens of another."""
    one, other = _digests(1, "1"), _digests(2, "2")
    assert one == other
    assert len({line.split()[-1] for line in one}) == len(one) == len(KINDS) * 2


@pytest.fixture(scope="module", params=KINDS, ids=IDS)
def kind(request: pytest.FixtureRequest) -> Iterator[ReferenceUnderTest]:
    family, tied = request.param
    made = ReferenceUnderTest(family=family, tied=tied)
    yield made
    made.close()


@pytest.mark.anyio
@pytest.mark.parametrize("name", CASES)
async def test_an_engine_says_what_transformers_says(kind: ReferenceUnderTest, name: str) -> None:
    """Tokens after updates, names that are bound together, and buffers over sleeps."""
    all_cases()
    result = await run_case(REGISTRY[name], kind)
    if name in kind.expected_not_run:
        assert result.status is Status.NOT_RUN, result.detail
    else:
        assert result.status is Status.PASS, result.detail


@pytest.mark.anyio
async def test_a_digest_covers_the_buffers(kind: ReferenceUnderTest) -> None:
    """What no update carries is compared over cycles, too."""
    engine = await kind.start()
    await engine.start()
    try:
        names = {name.rpartition("/")[2] for name in (await engine.digest()).values}
        buffers = {name for name, _ in kind.engine._runner.model.named_buffers()}
    finally:
        await engine.close()
    assert buffers
    assert buffers <= names, f"no digest of {sorted(buffers - names)}"
