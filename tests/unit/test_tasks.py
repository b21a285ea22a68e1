"""Tasks and rewards: determinism, exact values, and what a broken file or function leads to."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hotbunk.rollout.errors import ConfigError
from hotbunk.trainer_hooks.recipes.tasks import JsonlTask, Sample, make_task


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -- built-in tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["copy", "digit_plus_one", "arithmetic"])
def test_same_seed_same_samples(name: str) -> None:
    task = make_task(name)
    first = task.sample(random.Random(7), 20)
    assert first == make_task(name).sample(random.Random(7), 20)
    assert first != task.sample(random.Random(8), 20)
    assert len({sample.prompt for sample in first}) > 10


@pytest.mark.parametrize("name", ["copy", "digit_plus_one", "arithmetic"])
def test_answers_are_worth_one_and_fit_the_hint(name: str) -> None:
    task = make_task(name)
    for sample in task.sample(random.Random(0), 200):
        assert task.reward(sample, sample.answer) == 1.0
        assert len(sample.answer) == task.max_response_tokens
        assert task.reward(sample, "") == 0.0
        assert task.reward(sample, "xx") == 0.0


def test_copy_answers() -> None:
    for sample in make_task({"name": "copy", "digits": 5}).sample(random.Random(0), 50):
        assert sample.prompt == sample.answer + "="
        assert len(sample.answer) == 5


def test_digit_plus_one_wraps_without_carry() -> None:
    drawn = make_task("digit_plus_one").sample(random.Random(0), 300)
    for sample in drawn:
        for before, after in zip(sample.prompt[:-1], sample.answer, strict=True):
            assert after == "1234567890"[int(before)]
    assert any("9" in sample.prompt for sample in drawn)


def test_arithmetic_adds() -> None:
    for sample in make_task("arithmetic").sample(random.Random(0), 300):
        left, right = sample.prompt.rstrip("=").split("+")
        assert int(sample.answer) == int(left) + int(right)
        assert len(sample.answer) == 2


@pytest.mark.parametrize(
    "completion, reward",
    [("123", 1), ("12", 2 / 3), ("129", 2 / 3), ("x23", 2 / 3), ("321", 1 / 3), ("1234", 3 / 4)],
)
def test_reward_is_dense_and_length_counts(completion: str, reward: float) -> None:
    task = make_task("copy")
    assert task.reward(Sample("123=", "123"), completion) == pytest.approx(reward)


# -- the registry -----------------------------------------------------------------------------


def test_unknown_task_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"no task 'arithmetik'; did you mean 'arithmetic'"):
        make_task("arithmetik")


def test_unknown_option_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"'copy' has no option 'digit'; did you mean 'digits'"):
        make_task({"name": "copy", "digit": 3})


@pytest.mark.parametrize("digits", [0, -1, 65, 10**9, "3", True, 2.5])
def test_hostile_digits(digits: object) -> None:
    with pytest.raises(ConfigError):
        make_task({"name": "copy", "digits": digits})


@pytest.mark.parametrize("config", [{}, {"name": None}, {"name": 3}, {"name": "jsonl"}])
def test_incomplete_config(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_task(config)


def test_a_struct_with_unset_options_is_a_config() -> None:
    class TaskConfig(msgspec.Struct):
        name: str = "copy"
        digits: int | None = 4
        path: str | None = None

    assert make_task(TaskConfig()).max_response_tokens == 4


def test_every_task_takes_a_response_length(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "b" * 40})
    assert make_task({"name": "jsonl", "path": str(path)}).max_response_tokens == 80
    for name, more in (("copy", {}), ("arithmetic", {}), ("jsonl", {"path": str(path)})):
        task = make_task({"name": name, "max_response_tokens": 7, **more})
        assert task.max_response_tokens == 7
        for wrong in (0, -1, True, "7"):
            with pytest.raises(ConfigError):
                make_task({"name": name, "max_response_tokens": wrong, **more})


# -- JSONL ------------------------------------------------------------------------------------


def test_jsonl_reads_prompts_chats_and_meta(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028?"}]
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "b", "level": 3})
    with path.open("a", encoding="utf-8") as file:
        file.write("\n   \n" + json.dumps({"prompt": chat, "answer": "c"}, ensure_ascii=False))
    task = JsonlTask(path)
    assert [sample.answer for sample in task.samples] == ["b", "c"]
    assert task.samples[0].meta == {"level": 3, "line": 1}
    assert task.samples[0].messages is None
    assert task.samples[1].meta == {"line": 4}
    assert task.samples[1].messages == tuple(chat)
    assert task.samples[1].prompt == "system: Be brief.\nuser: Hi\u2028?"


def test_jsonl_draws_each_line_before_it_repeats(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": "x"} for i in range(5)]
    task = JsonlTask(write(tmp_path / "t.jsonl", *rows))
    drawn = [sample.prompt for sample in task.sample(random.Random(1), 12)]
    assert len(drawn) == 12
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == [f"p{i}" for i in range(5)]


@pytest.mark.parametrize(
    "line, says",
    [
        ("{", "not JSON"),
        ("[1]", "must be an object, not list"),
        ('{"prompt": "a"}', "no 'answer'"),
        ('{"promt": "a", "answer": "b"}', "no 'prompt'; did you mean 'promt'"),
        ('{"prompt": "a", "answer": 3}', "'answer' must be a string, not int"),
        ('{"prompt": 3, "answer": "b"}', "'prompt' must be"),
        ('{"prompt": "", "answer": "b"}', "'prompt' is empty"),
        ('{"prompt": [], "answer": "b"}', "'prompt' must be"),
        ('{"prompt": ["a"], "answer": "b"}', "each message"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "each message"),
        ('{"prompt": [{"role": "user", "content": null}], "answer": "b"}', "each message"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "b"})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError) as caught:
        JsonlTask(path)
    assert f"{path}:2" in str(caught.value)
    assert says in str(caught.value)


def test_no_file_empty_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no task file"):
        JsonlTask(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        JsonlTask(tmp_path)
    path = tmp_path / "t.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="has no samples"):
        JsonlTask(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        JsonlTask(path)


@pytest.mark.parametrize(
    "reward, completion, value",
    [
        ("exact", " Paris\n", 1.0),
        ("exact", "paris", 0.0),
        ("contains", "It is PARIS.", 1.0),
        ("contains", "It is Rome.", 0.0),
        ("per_char", "Pa", 0.4),
    ],
)
def test_built_in_rewards(tmp_path: Path, reward: str, completion: str, value: float) -> None:
    path = write(tmp_path / "t.jsonl", {"prompt": "Capital of France?", "answer": "Paris"})
    task = make_task({"name": "jsonl", "path": str(path), "reward": reward})
    assert task.reward(task.sample(random.Random(0), 1)[0], completion) == pytest.approx(value)


# -- a user's reward function -----------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "t.jsonl", {"prompt": "p", "answer": "a"})


def test_function_from_a_file_gets_what_the_file_says(tmp_path: Path, prompts: Path) -> None:
    module = tmp_path / "my.py"
    module.write_text("def half(prompt, answer, completion):\n    seen.append((prompt, answer))\n"
                      "    return 0.5\nseen = []\n")  # fmt: skip
    task = JsonlTask(prompts, f"{module}:half")
    assert task.reward(task.samples[0], "c") == 0.5


def test_a_file_may_use_dataclasses_and_have_a_namesake(tmp_path: Path, prompts: Path) -> None:
    values = []
    for place, worth in (("a", 0.25), ("b", 0.75)):
        module = tmp_path / place / "my.py"
        module.parent.mkdir()
        module.write_text(
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            f"@dataclass\nclass Score:\n    value: float = {worth}\n"
            "def f(prompt, answer, completion):\n    return Score().value\n"
        )
        values.append(JsonlTask(prompts, f"{module}:f"))
    assert [task.reward(task.samples[0], "c") for task in values] == [0.25, 0.75]


def test_chat_prompts_reach_the_function_as_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", {"prompt": [{"role": "user", "content": "hi"}], "answer": "a"}
    )
    module = tmp_path / "my.py"
    module.write_text("def f(prompt, answer, completion):\n    return prompt[0]['content'] == 'hi'")
    task = JsonlTask(path, f"{module}:f")
    assert task.reward(task.samples[0], "c") == 1.0


def test_function_from_a_module(prompts: Path) -> None:
    task = JsonlTask(prompts, "hotbunk.trainer_hooks.recipes.rewards:contains")
    assert task.reward(task.samples[0], "xAx") == 1.0


@pytest.mark.parametrize(
    "spec, says",
    [
        ("exakt", "no reward 'exakt'; did you mean 'exact'"),
        ("{dir}/none.py:f", "there is no file"),
        ("{dir}/my.py:rewrd", "no function 'rewrd'; did you mean 'reward'"),
        ("{dir}/my.py:number", "is not a function"),
        ("{dir}/bad.py:f", "raised SyntaxError"),
        ("{dir}/boom.py:f", "raised ZeroDivisionError"),
        ("no_such_package_of_anyone:f", "raised ModuleNotFoundError"),
        (":f", "not of the form"),
        ("my.py:", "not of the form"),
    ],
)
def test_reward_that_cannot_be_found(tmp_path: Path, prompts: Path, spec: str, says: str) -> None:
    (tmp_path / "my.py").write_text("number = 3\ndef reward(p, a, c): return 1\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "boom.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        JsonlTask(prompts, spec.format(dir=tmp_path))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "body, says",
    [
        ("raise KeyError('k')", "raised KeyError: 'k'"),
        ("return 1.5", "returned 1.5, outside [0, 1]"),
        ("return -0.1", "outside [0, 1]"),
        ("return float('nan')", "outside [0, 1]"),
        ("return float('inf')", "outside [0, 1]"),
        ("return 10**9000", "outside [0, 1]"),
        ("return None", "returned NoneType, not a number"),
        ("return '1'", "returned str, not a number"),
        ("return [1]", "returned list, not a number"),
    ],
)
def test_reward_that_misbehaves(tmp_path: Path, prompts: Path, body: str, says: str) -> None:
    module = tmp_path / "my.py"
    module.write_text(f"def f(prompt, answer, completion):\n    {body}\n")
    task = JsonlTask(prompts, f"{module}:f")
    with pytest.raises(ConfigError) as caught:
        task.reward(task.samples[0], "c")
    assert says in str(caught.value)
    assert f"{prompts}:1" in str(caught.value)


@pytest.mark.parametrize("body, value", [("True", 1.0), ("False", 0.0), ("1 + 1e-12", 1.0)])
def test_booleans_and_rounding_are_fine(
    tmp_path: Path, prompts: Path, body: str, value: float
) -> None:
    module = tmp_path / "my.py"
    module.write_text(f"def f(prompt, answer, completion):\n    return {body}\n")
    task = JsonlTask(prompts, f"{module}:f")
    assert task.reward(task.samples[0], "c") == value


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, hotbunk.trainer_hooks.recipes.tasks, hotbunk.trainer_hooks.recipes.recorder,"
        " hotbunk.trainer_hooks.recipes.report\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
