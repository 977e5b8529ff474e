"""Checksums of files of any size, in bounded memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["file_sha256"]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; reads it once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
