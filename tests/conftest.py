"""What holds for every test of ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


class _Unretrieved(logging.Handler):
    """Tasks and futures that ended with an error which nobody ever looked at."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "exception was never retrieved" in record.getMessage():
            self.found.append(self.format(record))


@pytest.fixture(scope="session")
def _unretrieved() -> Iterator[_Unretrieved]:
    handler = _Unretrieved()
    logging.getLogger("asyncio").addHandler(handler)
    yield handler
    logging.getLogger("asyncio").removeHandler(handler)


@pytest.fixture(autouse=True)
def _every_task_has_an_owner(_unretrieved: _Unretrieved) -> Iterator[None]:
    """A background task's error is retrieved by whoever started it, also while all comes down.

    Seen when the task is collected, so the test that is told may be the one after.
    """
    yield
    found, _unretrieved.found = _unretrieved.found, []
    assert not found, "\n".join(found)
