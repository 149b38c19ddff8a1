"""What text a store takes, and which labels can be found again. Standard library only: a bundle needs no database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvbench.errors import UsageError

MAX_LABEL = 200
MIN_PREFIX = 4  # digits of a UUID that select a run
_UUID_START = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NIL = "00000000-0000-0000-0000-000000000000"


def storable(value: Any) -> Any:
    """Return ``value`` with the characters no database takes written as escapes: NUL and lone surrogates.

    They come from file names and command lines that are not UTF-8, inside reasons and environment facts. Any other
    text, however hostile, is stored as it is.
    """
    if isinstance(value, str):
        if value.isascii() and "\x00" not in value:
            return value
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
    if isinstance(value, Mapping):
        return {storable(key): storable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [storable(entry) for entry in value]
    return value


def check_label(label: str, where: str = "--label") -> str:
    """Return ``label`` if runs can be found by it again. Raises UsageError."""
    if not label.strip() or len(label) > MAX_LABEL or storable(label) != label:
        raise UsageError(
            "not a usable label", where=where, got=label,
            expected=f"1 to {MAX_LABEL} characters, not blank, no NUL, valid Unicode",
        )  # fmt: skip
    if label == "latest" or label.startswith("latest~"):
        raise UsageError("this label is taken", where=where, got=label, expected="a name other than latest")
    check_no_uuid(label, where)
    return label


def check_no_uuid(label: str, where: str = "--label") -> None:
    """Raise UsageError for a label that may be the start of a UUID: of one, MIN_PREFIX digits are a selector."""
    if len(label) >= MIN_PREFIX and _UUID_START.fullmatch(label + _NIL[len(label) :]):
        raise UsageError(
            "this label reads as the UUID of a run", where=where, got=label,
            expected=f"a name that is not {MIN_PREFIX} or more hex digits",
            mend="put a letter past f or a word before it",
        )  # fmt: skip


def usable_label(label: str | None) -> str | None:
    """Return ``label`` as a bundle may carry it: one from before a rule refused it gets ``was-`` before it."""
    if label is None:
        return None
    for name in (label, f"was-{storable(label)}"[:MAX_LABEL]):
        try:
            return check_label(name)
        except UsageError:
            continue
    return None
