"""Real verl: its registries, its workers, and whole jobs of it on a private Ray."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

# Elsewhere than in .venv-verl there is nothing to test.
collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # verl and Ray warn while they are imported, before any item has marks.
    config.addinivalue_line("filterwarnings", "ignore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # What verl, Ray and their libraries deprecate and forget to close is not ours.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def jobs() -> ModuleType:
    """``jobs.py`` beside this file: tests are no package."""
    spec = spec_from_file_location("verl_jobs", Path(__file__).with_name("jobs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every job is about."""
    from hotbunk.trainer_hooks.verl.tiny import make

    return make(tmp_path_factory.mktemp("verl"))
