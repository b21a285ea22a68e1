"""Images, videos and audio as plain data, so that they can travel to an engine's own process.

An engine finds them in ``GenerateRequest.media``: an image as a PNG (nothing is lost), an array as
its bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any


def payload(value: Any) -> Any:
    """``value`` without objects of PIL, numpy or torch; containers are walked."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): payload(one) for key, one in value.items()}
    if hasattr(value, "save") and hasattr(value, "mode"):  # PIL's images, without importing PIL
        data = io.BytesIO()
        value.save(data, format="PNG")
        return {"kind": "image", "format": "png", "data": data.getvalue()}
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        shape = [int(n) for n in value.shape]
        return {"kind": "array", "dtype": str(value.dtype), "shape": shape, "data": value.tobytes()}
    if isinstance(value, Sequence):
        return [payload(one) for one in value]
    return value  # what cannot travel is refused where it is encoded, by its type
