"""Which code this is."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def code_digest() -> str:
    """Changes with every change of Atoll's code."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
