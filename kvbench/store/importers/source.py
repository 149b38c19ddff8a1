"""A file of another tool as bytes, text or JSON. Memory is bounded: a file over ``MAX_BYTES`` is refused unread."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvbench.errors import UsageError, printable
from kvbench.store.opened import refuse_open_database
from kvbench.units import format_bytes

MAX_BYTES = 32 << 20  # JSON takes up to 25 times its size in memory, and no tool here writes this much without samples
HEAD_BYTES = 64 << 10


class Malformed(ValueError):
    """The content is not what the tool writes: one line, without the name of the file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read: ``name`` without folders, its bytes and their sha256."""

    path: Path
    data: bytes = field(repr=False)
    sha256: str

    @property
    def name(self) -> str:
        return self.path.name


def read_source(path: str | Path, limit: int = MAX_BYTES) -> Source:
    """Return the content of a regular file of 1 to ``limit`` bytes. Raises UsageError for any other."""
    path = Path(path)
    data = read_bytes(path, limit)
    if not data.strip():
        raise UsageError("the file is empty", where=str(path), mend="nothing was imported")
    return Source(path, data, hashlib.sha256(data).hexdigest())


def read_head(path: str | Path) -> bytes:
    """Return the first 64 KiB of a regular file. Raises UsageError when it cannot be read."""
    return _read(Path(path), HEAD_BYTES, None)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file. Raises UsageError when it is larger than ``limit`` or cannot be read."""
    return _read(path, limit + 1, limit)


def _read(path: Path, most: int, limit: int | None) -> bytes:
    refuse_open_database(path, "a file to import")
    try:
        # O_NONBLOCK: opening a named pipe must not hang
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the file cannot be read ({reason})", where=str(path)) from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise UsageError("this is not a regular file", where=str(path), expected="a file to import")
    with os.fdopen(descriptor, "rb") as file:
        try:
            data = file.read(most) if limit is None or info.st_size <= limit else b""
        except OSError as error:
            raise UsageError(f"the file cannot be read ({error.strerror})", where=str(path)) from None
    size = max(info.st_size, len(data))
    if limit is not None and size > limit:
        raise UsageError(
            "the file is larger than an importer reads", where=str(path), got=format_bytes(size),
            expected=f"at most {format_bytes(limit)}",
            mend="split it, or leave its raw samples out; nothing was imported",
        )  # fmt: skip
    return data


def text_of(source: Source) -> str:
    """Return the file as text. Raises Malformed for anything but UTF-8 (a byte order mark is read over)."""
    if source.data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Malformed("the file is UTF-16, expected UTF-8; save it as UTF-8")
    try:
        return source.data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"byte {error.start} is no UTF-8; save the file as UTF-8") from None


def lines_of(source: Source) -> list[str]:
    """Return the lines of a text output, without what ends them.

    Raises Malformed for a last line without its end: a number at the cut would be another number.
    """
    text = text_of(source)
    if not text.endswith("\n"):
        raise Malformed("the file ends in the middle of a line; if it is whole, end its last line")
    if "\x00" in text:
        raise Malformed("the file holds a NUL, so it is no text")
    return [line.rstrip() for line in text.split("\n")[:-1]]


def json_of(source: Source) -> object:
    """Return the JSON document in the file. Raises Malformed for what is none, NaN, infinities and repeated keys."""
    text = text_of(source)
    try:
        return json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_repeats
        )  # fmt: skip
    except RecursionError:
        raise Malformed("the JSON is nested too deep") from None
    except json.JSONDecodeError as error:
        cut = " (cut off?)" if error.pos >= len(text.rstrip()) else ""
        raise Malformed(f"line {error.lineno} is not JSON: {printable(error.msg, 100)}{cut}") from None
    except Malformed:
        raise
    except ValueError as error:  # an integer of more digits than Python reads
        raise Malformed(f"not JSON: {printable(str(error), 100)}") from None


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is no JSON number and no measurement")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Malformed(f"the number {printable(text, 40)} is larger than any number here")
    return number


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"an object has the key {printable(repr(twice), 60)} twice")
    return found
