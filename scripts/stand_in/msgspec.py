"""As much of msgspec as gpu_check.sh needs, where it is not installed: structs as dataclasses.

That check may download nothing. Nothing is validated here, which its options and reports do not need;
nothing else uses this file.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
import types
from typing import Any

field = dataclasses.field


class MsgspecError(ValueError):
    """Never raised here."""


class ValidationError(MsgspecError):
    """Nor is this."""


class Struct:
    """A dataclass in the clothes of ``msgspec.Struct``."""

    def __init_subclass__(cls, *, frozen: bool = False, **ignored: Any) -> None:
        dataclasses.dataclass(frozen=frozen)(cls)


def convert(values: dict[str, Any], into: type) -> Any:
    return into(**values)


def to_builtins(value: Any) -> Any:
    return dataclasses.asdict(value)


class json:  # noqa: N801 - a module of that name
    """Decoding, into whatever JSON holds."""

    @staticmethod
    def decode(data: bytes | str) -> Any:
        return json_module.loads(data)


structs = types.ModuleType("msgspec.structs")
structs.replace = dataclasses.replace  # type: ignore[attr-defined]
structs.fields = dataclasses.fields  # type: ignore[attr-defined]
sys.modules[structs.__name__] = structs
