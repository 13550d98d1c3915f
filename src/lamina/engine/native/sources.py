"""What the native kernels are built from. Read by `setup.py`, too, so that it imports nothing of Lamina."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent


def source_digest() -> str:
    """Of all C sources, by name and content: a library that was built from others is not loaded."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.[ch]")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
