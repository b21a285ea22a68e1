"""`hotbunk doctor` shows verl, its plugins, and pins that cannot all be kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def doctor(**env: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "hotbunk", "doctor", "--json"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {(one["kind"], one["name"]): one for one in json.loads(done.stdout)}


def test_verl_and_its_plugins_are_shown() -> None:
    found = doctor()
    assert found["trainer", "verl"] == {
        "kind": "trainer",
        "name": "verl",
        "usable": True,
        "why": "0.9.1",
        "remedy": "",
    }
    assert found["verl plugin", "hotbunk"]["usable"]
    assert found["pins", "verl"]["usable"]


def test_a_plugin_that_is_kept_out_or_broken_is_shown(tmp_path: Path) -> None:
    made = tmp_path / "other-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[verl.plugins]\nother = nowhere.at_all\n")
    found = doctor(PYTHONPATH=str(tmp_path), VERL_USE_EXTERNAL_PLUGINS="auto")
    assert "nowhere.at_all" in found["verl plugin", "other"]["why"]
    assert not found["verl plugin", "other"]["usable"]
    found = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert not found["verl plugin", "hotbunk"]["usable"]
    assert "unset VERL_USE_EXTERNAL_PLUGINS" in found["verl plugin", "hotbunk"]["remedy"]


def test_pins_that_conflict_are_named_with_the_way_out(tmp_path: Path) -> None:
    made = tmp_path / "vllm-9.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 9\nRequires-Dist: numpy<1\n"
        "Requires-Dist: torch>=1\nRequires-Dist: absent>=4\n"
    )
    found = doctor(PYTHONPATH=str(tmp_path))["pins", "vllm"]
    assert not found["usable"]
    assert found["why"].startswith("numpy ")
    assert found["why"].endswith(" is not <1")
    assert "hotbunk.rollout_python" in found["remedy"]
