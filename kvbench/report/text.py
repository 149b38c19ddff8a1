"""What the user's terminal can show."""

from __future__ import annotations

from typing import TextIO


def unicode_ok(stream: TextIO) -> bool:
    """Return whether ``stream`` can encode box drawing and the plus-minus sign."""
    return (stream.encoding or "ascii").lower().replace("-", "").startswith("utf")
