"""Tasks a policy is trained on: where prompts come from and what a completion is worth.

Every reward is verifiable (computed from the text, no model) and lies in [0, 1]. No torch here.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from hotbunk.rollout.errors import ConfigError, closest
from hotbunk.trainer_hooks.recipes import rewards

Message = Mapping[str, str]


@dataclass(frozen=True)
class Sample:
    """One prompt with its reference answer.

    ``messages`` is set where the prompt is a conversation (each ``{"role", "content"}``);
    ``prompt`` is then its plain text, for logs. ``meta`` is passed through untouched.
    """

    prompt: str
    answer: str
    meta: Mapping[str, object] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None


class Task(ABC):
    """What a recipe asks of a task. Deterministic: the same ``rng`` state gives the same samples.

    ``max_response_tokens`` is a hint, in tokens of a byte-level tokenizer, of how long a right
    answer is; a recipe uses it where its configuration names no length.
    """

    name: str
    max_response_tokens: int

    @abstractmethod
    def sample(self, rng: random.Random, n: int) -> list[Sample]:
        """``n`` samples drawn with ``rng`` (nothing else is a source of chance)."""

    @abstractmethod
    def reward(self, sample: Sample, completion_text: str) -> float:
        """What ``completion_text`` (the decoded response alone) is worth, in [0, 1].

        :raises ConfigError: a reward function of the user's raised or returned nonsense.
        """


class _Digits(Task):
    """A string of random digits and one separator; the answer is a function of the digits."""

    separator: ClassVar[str]

    def __init__(self, digits: int = 3) -> None:
        if not 1 <= digits <= 64:
            raise ConfigError(f"task {self.name!r} needs 1 to 64 digits, not {digits}")
        self.digits = digits
        self.max_response_tokens = digits

    def answer(self, text: str) -> str:
        raise NotImplementedError

    def sample(self, rng: random.Random, n: int) -> list[Sample]:
        texts = ["".join(rng.choices("0123456789", k=self.digits)) for _ in range(n)]
        return [Sample(text + self.separator, self.answer(text)) for text in texts]

    def reward(self, sample: Sample, completion_text: str) -> float:
        return rewards.per_char(sample.prompt, sample.answer, completion_text)


class CopyTask(_Digits):
    """``123=`` -> ``123``; one share of the reward for each position."""

    name = "copy"
    separator = "="

    def answer(self, text: str) -> str:
        return text


class DigitPlusOneTask(_Digits):
    """``129>`` -> ``230``: each digit plus one, modulo ten, without carry."""

    name = "digit_plus_one"
    separator = ">"

    def answer(self, text: str) -> str:
        return "".join(str((int(digit) + 1) % 10) for digit in text)


class ArithmeticTask(Task):
    """``7+8=`` -> ``15``: two single digits added; the sum is written with two digits (``07``).

    Two digits always, so that a right answer has one length and the model need not learn to stop.
    """

    name = "arithmetic"
    max_response_tokens = 2

    def sample(self, rng: random.Random, n: int) -> list[Sample]:
        pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(n)]
        return [Sample(f"{a}+{b}=", f"{a + b:02d}") for a, b in pairs]

    def reward(self, sample: Sample, completion_text: str) -> float:
        return rewards.per_char(sample.prompt, sample.answer, completion_text)


class CapitalsTask(Task):
    """A chat question that an instruct model half knows; 1 where the answer names the capital."""

    name = "capitals"
    max_response_tokens = 24

    def sample(self, rng: random.Random, n: int) -> list[Sample]:
        drawn = [rng.choice(_CAPITALS) for _ in range(n)]
        return [self._ask(country, capital) for country, capital in drawn]

    @staticmethod
    def _ask(country: str, capital: str) -> Sample:
        text = f"What is the capital of {country}? Answer in one short sentence."
        return Sample(text, capital, messages=({"role": "user", "content": text},))

    def reward(self, sample: Sample, completion_text: str) -> float:
        return rewards.contains(sample.prompt, sample.answer, completion_text)


_CAPITALS = (
    ("Argentina", "Buenos Aires"),
    ("Australia", "Canberra"),
    ("Austria", "Vienna"),
    ("Canada", "Ottawa"),
    ("China", "Beijing"),
    ("Egypt", "Cairo"),
    ("France", "Paris"),
    ("Greece", "Athens"),
    ("Italy", "Rome"),
    ("Japan", "Tokyo"),
    ("Kenya", "Nairobi"),
    ("Norway", "Oslo"),
    ("Peru", "Lima"),
    ("Portugal", "Lisbon"),
    ("Spain", "Madrid"),
    ("Turkey", "Ankara"),
)


class JsonlTask(Task):
    """Prompts and answers from a file, one JSON object a line, scored by a named reward.

    A line is ``{"prompt": str | [{"role", "content"}, ...], "answer": str}``; further keys go to
    ``Sample.meta``. Blank lines are skipped. ``reward`` is a built-in name (see ``rewards``),
    ``path/to/file.py:function`` or ``package.module:function``, called as
    ``f(prompt, answer, completion) -> float`` with the prompt as the file has it. A relative
    ``path/to/file.py`` is looked up from the working directory.

    :raises ConfigError: missing or empty file, a broken line (named by its number), no such
        reward function.
    """

    name = "jsonl"

    def __init__(self, path: str | Path, reward: str = "exact") -> None:
        self.path = Path(path)
        self.samples = _read_samples(self.path)
        self.reward_name = reward
        self._reward = rewards.load_reward(reward)
        longest = max(len(sample.answer.encode()) for sample in self.samples)
        # Room for an answer that says more than the reference.
        self.max_response_tokens = max(16, 2 * longest)

    def sample(self, rng: random.Random, n: int) -> list[Sample]:
        """``n`` lines, none twice while there are others left."""
        drawn: list[Sample] = []
        while len(drawn) < n:
            count = min(n - len(drawn), len(self.samples))
            drawn += rng.sample(self.samples, count)
        return drawn

    def reward(self, sample: Sample, completion_text: str) -> float:
        prompt = sample.prompt if sample.messages is None else list(sample.messages)
        where = f"{self.path}:{sample.meta.get('line', '?')}"
        return rewards.call_reward(
            self._reward, self.reward_name, prompt, sample.answer, completion_text, where
        )


def _read_samples(path: Path) -> list[Sample]:
    """The samples of a JSONL file; ``meta["line"]`` is the line a sample came from (1-based)."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no task file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task file {path} cannot be read: {error}") from error
    # Not splitlines(): that also splits at U+2028 and others, which JSON strings may contain.
    lines = enumerate(text.split("\n"), start=1)
    samples = [
        _parse_line(line, f"{path}:{number}", number) for number, line in lines if line.strip()
    ]
    if not samples:
        raise ConfigError(f"task file {path} has no samples")
    return samples


def _parse_line(line: str, where: str, number: int) -> Sample:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not JSON: {error}", where=where) from error
    except RecursionError:
        raise ConfigError("not usable JSON: nested too deeply", where=where) from None
    if not isinstance(row, dict):
        raise ConfigError(f"a line must be an object, not {type(row).__name__}", where=where)
    for key in ("prompt", "answer"):
        if key not in row:
            raise ConfigError(f"the line has no {key!r}{closest(key, row)}", where=where)
    answer = row["answer"]
    if not isinstance(answer, str):
        raise ConfigError(f"'answer' must be a string, not {type(answer).__name__}", where=where)
    meta = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    meta["line"] = number
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError("'prompt' is empty", where=where)
        return Sample(prompt, answer, meta)
    messages = _parse_messages(prompt, where)
    plain = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return Sample(plain, answer, meta, messages)


def _parse_messages(prompt: object, where: str) -> tuple[Message, ...]:
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError("'prompt' must be a string or a non-empty list of messages", where=where)
    for message in prompt:
        fine = isinstance(message, dict) and set(message) == {"role", "content"}
        if not fine or not all(isinstance(value, str) for value in message.values()):
            raise ConfigError(
                "each message must be {'role': string, 'content': string}", where=where
            )
    return tuple(prompt)


# -- registry ---------------------------------------------------------------------------------

_TASKS: dict[str, tuple[Callable[..., Task], frozenset[str]]] = {
    "copy": (CopyTask, frozenset({"digits"})),
    "digit_plus_one": (DigitPlusOneTask, frozenset({"digits"})),
    "arithmetic": (ArithmeticTask, frozenset()),
    "capitals": (CapitalsTask, frozenset()),
    "jsonl": (JsonlTask, frozenset({"path", "reward"})),
}


def make_task(config: str | Mapping[str, object] | msgspec.Struct) -> Task:
    """The task a configuration names: a bare name, or ``name`` with that task's options.

    Options that are None count as not given, so one struct can hold the options of all tasks.
    ``max_response_tokens`` is an option of every task and replaces its hint.

    :raises ConfigError: no task of that name, or an option that the task does not have.
    """
    if isinstance(config, str):
        options: dict[str, object] = {"name": config}
    elif isinstance(config, msgspec.Struct):
        options = msgspec.structs.asdict(config)
    else:
        options = dict(config)
    options = {key: value for key, value in options.items() if value is not None}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"a task needs a name, one of {', '.join(_TASKS)}")
    if name not in _TASKS:
        raise ConfigError(
            f"there is no task {name!r}{closest(name, _TASKS)}",
            remedy=f"use one of {', '.join(_TASKS)}",
        )
    factory, known = _TASKS[name]
    known |= {"max_response_tokens"}
    for key in options:
        if key not in known:
            raise ConfigError(f"task {name!r} has no option {key!r}{closest(key, known)}")
    if name == "jsonl" and "path" not in options:
        raise ConfigError("task 'jsonl' needs a path", remedy="set task.path to a .jsonl file")
    for key, value in options.items():
        wanted = int if key in ("digits", "max_response_tokens") else (str, Path)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"task option {key!r} cannot be {value!r}")
    length = options.pop("max_response_tokens", None)
    task = factory(**options)
    if isinstance(length, int):
        if length < 1:
            raise ConfigError(f"max_response_tokens must be 1 or more, not {length}")
        task.max_response_tokens = length
    return task
