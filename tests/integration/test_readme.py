"""Every block of the README runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.splitlines()
]


def test_there_is_something_to_run() -> None:
    # console: not whole as it stands; bash: tests/engines/verl runs it.
    assert {kind for kind, _ in BLOCKS} == {"sh", "python", "console", "bash"}
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "python"])
def test_python_blocks_run(text: str) -> None:
    subprocess.run([sys.executable, "-c", text], check=True, timeout=60)


def test_make_targets_exist() -> None:
    targets = {c[1] for c in COMMANDS if c[0] == "make"}
    assert targets == {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.timeout(400)
def test_shell_blocks_run_in_order(tmp_path: Path) -> None:
    """As written, from a folder whose .venv is this one; only the port is one that is free."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    env["HOTBUNK_CACHE"] = str(tmp_path / "cache")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    behind = []
    ran = 0
    try:
        for command in COMMANDS:
            if command[0] == "make":
                continue
            command = [word.replace("8765", port) for word in command]
            ran += 1
            if command[-1] == "&":
                behind.append(subprocess.Popen(command[:-1], cwd=tmp_path, env=env))
                continue
            if command[0] == "curl":
                command.insert(1, "--fail-with-body")
            done = subprocess.run(
                command,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=110,
                check=False,
            )
            assert done.returncode == 0, f"{' '.join(command)}: {done.stdout} {done.stderr}"
    finally:
        for one in behind:
            one.terminate()
        ends = [one.wait(30) for one in behind]
    assert ends == [0]
    assert ran >= 9


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        if "://" not in target:
            assert (ROOT / target).exists(), target
