"""placeholder"""

from pathlib import Path


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """placeholder"""
    raise NotImplementedError
