"""The tests of vLLM's hazards fail where the cure is taken out: each is run once without it.

A cure is taken out of one module's source, in a copy that every process of that run imports instead
(``sitecustomize``), those that vLLM starts included. Numbers are those of README.md. Not in CI: each
starts vLLM anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
VLLM = "hotbunk.rollout.backends.vllm"
IMPORTS = """
import importlib.util, sys
from importlib.abc import MetaPathFinder

class Mutants(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_file_location(name, FILES[name]) if name in FILES else None

FILES = {files!r}
sys.meta_path.insert(0, Mutants())
"""


class Cure(NamedTuple):
    """``old`` of the module is the cure, ``new`` what is there without it.

    ``test`` then fails, and says ``because``: a pattern in what pytest prints.
    """

    module: str
    old: str
    new: str
    test: str
    because: str


CURES = {
    "1 nothing is packed": Cure(
        f"{VLLM}.packing",
        "chosen.backend == BACKEND:",
        "chosen.backend == BACKEND and False:",
        "test_adapter.py::test_a_tied_head_follows_as_in_a_fresh_engine",
        "",
    ),
    "2 quiesced first": Cure(
        f"{VLLM}.engine",
        '        self._must_stand_still("update_weights")\n',
        "",
        "test_adapter.py::test_an_update_under_running_steps_is_refused",
        "DID NOT RAISE|ReplicaLost|AssertionError",
    ),
    "3 a failed session is ended": Cure(
        f"{VLLM}.inside",
        """            worker.weight_transfer_engine.abort()
            worker._weight_update_active = False
""",
        "",
        "test_one_hop.py::test_a_broken_update_leaves_nothing_that_the_next_one_meets[Corrupted]",
        "already",
    ),
    "4 written where it lies": Cure(
        f"{VLLM}.worker",
        "_write(path, table, self._hotbunk_routes)",
        """from hotbunk.rollout.backends.vllm.routes import Piece

        whole = {
            n: torch.empty(shape, dtype=dtype_from(d)) for ns, d, shape, _ in table for n in ns
        }
        one = {n: Route(tuple(t.shape), [Piece(t, 0, tuple(t.shape), t.stride())])
               for n, t in whole.items()}
        _write(path, table, one)
        self.model_runner.reload_weights(weights_iterator=iter(whole.items()))""",
        "test_adapter.py::test_one_tensor_of_a_fused_matrix_can_be_sent_alone",
        "",
    ),
    "4 a full update is whole": Cure(
        "hotbunk.rollout.intake",
        "if manifest.scope.kind in (ScopeKind.FULL, ScopeKind.ADAPTER):",
        "if False:",
        "test_one_hop.py::test_what_is_not_whole_is_refused_before_a_byte"
        "[model.layers.0.self_attn.k_proj.weight]",
        "DID NOT RAISE",
    ),
    "5 woken past the core": Cure(
        f"{VLLM}.engine",
        "        self._away -= set(wanted)\n        return report\n",
        """        self._away -= set(wanted)
        if not self._away:
            await self.llm.resume_generation()  # as vLLM's wake_up does
        return report
""",
        "test_sleep.py::test_everything_awake_without_weights_makes_no_token",
        "AssertionError",
    ),
    "6 a resume ends a wait": Cure(
        f"{VLLM}.pauses",
        "            raise errors.SessionError("
        '"generation was resumed before the pause was complete")\n',
        "            return\n",
        "test_pauses.py::test_a_resume_ends_a_wait_that_is_pending",
        "DID NOT RAISE",
    ),
    "7 asleep is what sleep holds": Cure(
        "hotbunk.rollout.looking",
        "is_sleeping=SLEEP in gate.pauses",
        "is_sleeping=gate.closed",
        "test_sleep.py::test_merely_paused_is_not_asleep",
        "AssertionError|assert",
    ),
    "7 a tag that is not known": Cure(
        "hotbunk.rollout.vocabulary",
        "        if tag not in known:\n",
        "        if False:\n",
        "test_sleep.py::test_a_tag_that_does_not_exist_changes_nothing",
        "DID NOT RAISE",
    ),
    "8 by its own ids": Cure(
        f"{VLLM}.pauses",
        "internal = [stream.internal_id for stream in found.values()]",
        'internal = [f"cmpl-{key}" for key in found]',
        "test_pauses.py::test_abort_reaches_what_it_names",
        "EngineFailed|assert",
    ),
    "8 seen to end": Cure(
        f"{VLLM}.pauses",
        '            await self._until_ended(found, "abort")\n',
        "",
        "test_pauses.py::test_an_abort_that_aborts_nothing_is_an_error",
        "DID NOT RAISE",
    ),
    "9 of the bytes where they lie": Cure(
        f"{VLLM}.weights",
        "values[name] = fingerprint(route.read())",
        "values[name] = fingerprint(route.read().flatten()[:0])",
        "test_adapter.py::test_digest_and_memory_are_what_lies_there",
        "AssertionError|assert",
    ),
    "10 the label moves last": Cure(
        f"{VLLM}.engine",
        "        await transfer.commit()\n        await self.label(version, scope)\n",
        "        await self.label(version, scope)\n        await transfer.commit()\n",
        "test_one_hop.py::test_a_broken_update_leaves_nothing_that_the_next_one_meets"
        "[FailedElsewhere]",
        "the label moves last",
    ),
    "11 copied before the next bucket": Cure(
        f"{VLLM}.landing",
        "        copy_many(copies)\n",
        """        if not hasattr(self, "_late"):
            self._late, done = [], self.intake.finish
            self.intake.finish = lambda: (copy_many(self._late), done())[1]
        self._late += copies
""",
        "test_one_hop.py::test_a_broken_update_leaves_nothing_that_the_next_one_meets[Raising]",
        "VerifyFailed",
    ),
    "12 nothing is packed": Cure(
        f"{VLLM}.packing",
        "chosen.backend == BACKEND:",
        "chosen.backend == BACKEND and False:",
        "test_one_hop.py::test_the_trainer_writes_into_vllms_own_memory",
        "",
    ),
    "13 a pool under weights and KV": Cure(
        f"{VLLM}.parked",
        "        return self.pool.release(tags, {**groups, **overrides})\n",
        "        return self.pool.memory()\n",
        "test_sleep.py::test_little_of_what_is_tagged_stays_and_output_is_the_same[1]",
        "AssertionError|assert|ReleaseIncomplete",
    ),
    "14 nothing is raised to vLLM": Cure(
        f"{VLLM}.worker",
        '            log.exception("%s failed in worker %s", method, os.getpid())\n',
        "            raise\n",
        "test_lost.py::test_a_worker_that_fails_does_not_shift_what_others_answer",
        "Regex|AssertionError|Exception",
    ),
    "15 waited for, also by who gave up": Cure(
        "hotbunk.rollout.calls",
        "        task.add_done_callback(noted)\n        await asyncio.wait({task})\n        raise\n",
        "        raise\n",
        "test_lost.py::test_nothing_is_written_any_more_once_an_update_was_given_up",
        "is still to come",
    ),
    "adapters: dropped when written": Cure(
        f"{VLLM}.bank",
        "            self._loader.remove_adapter(number)\n",
        "            pass\n",
        "test_adapters.py::test_a_new_version_under_the_same_name_is_used_also_by_who_is_frozen",
        "AssertionError|assert",
    ),
    "adapters: read from the bank": Cure(
        f"{VLLM}.bank",
        "        self._loader._load_adapter = self._load\n",
        "",
        "test_adapters.py::test_more_of_them_than_vllm_keeps",
        "",
    ),
    "a core that does not answer": Cure(
        f"{VLLM}.pauses",
        "        on_silence(why)\n        given_up.cancel()\n        answer.cancel()\n",
        "        pass\n",
        "test_lost.py::test_a_core_that_hangs_when_it_is_to_stand_still_is_lost[pause-0.2]",
        "TimeoutError",
    ),
}


def without(cure: Cure, folder: Path) -> dict[str, str]:
    """An environment in which the module lacks its cure."""
    spec = find_spec(cure.module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(cure.old) >= 1, "the cure is not there any more"
    mutant = folder / "mutant.py"
    mutant.write_text(source.replace(cure.old, cure.new), encoding="utf-8")
    compile(mutant.read_text(encoding="utf-8"), str(mutant), "exec")
    files = {cure.module: str(mutant)}
    (folder / "sitecustomize.py").write_text(IMPORTS.format(files=files), encoding="utf-8")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CURES)
def test_without_its_cure_the_test_fails(name: str, tmp_path: Path) -> None:
    cure = CURES[name]
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    done = subprocess.run(
        [*asked, str(HERE / cure.test)],
        env=without(cure, tmp_path),
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 1, f"{cure.test}: {done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert re.search(r"\d (failed|error)", done.stdout), done.stdout[-3000:]
    assert re.search(cure.because, done.stdout), done.stdout[-3000:]


def test_every_cure_is_in_the_source(tmp_path: Path) -> None:
    """So that one that was rewritten is found in CI, and not when it is wanted."""
    for cure in CURES.values():
        without(cure, tmp_path)
        file, _, test = cure.test.partition("::")
        assert f"def {test.partition('[')[0]}(" in (HERE / file).read_text(encoding="utf-8")
