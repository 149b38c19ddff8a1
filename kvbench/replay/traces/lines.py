"""Lines of a trace file, plain or gzip, one at a time; what is wrong with a file as such is said here."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from kvbench.errors import UsageError, printable

MOST_LINE = 64 << 20  # bytes: a context of 8 million one-token blocks
GZIP = b"\x1f\x8b"


def bad(path: Path, number: int, what: str, *, got: object = None, expected: str = "", mend: str = "") -> UsageError:
    """Return the error for line ``number`` of ``path``."""
    return UsageError(what, where=f"{path.name}:{number}", got=got, expected=expected, mend=mend)


def _kind(path: Path) -> str:
    """Return what ``path`` is, in words."""
    mode = path.stat().st_mode
    kinds = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((word for test, word in kinds if test(mode)), "a device")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for reading, through gzip where its first bytes say so. Raises UsageError otherwise."""
    try:
        if not path.exists():
            raise UsageError(
                "no such trace file", where=printable(path.name), expected="a file, or the name of a preset",
            )  # fmt: skip
        if not path.is_file():
            raise UsageError(
                "not a regular file", where=printable(path.name or str(path)), got=_kind(path),
                expected="a file: it is read more than once", mend="write it to a file first",
            )  # fmt: skip
        file = path.open("rb")
    except OSError as error:
        raise UsageError("cannot be read", where=printable(path.name), got=os.strerror(error.errno or 0)) from None
    with file:
        if file.peek(2)[:2] == GZIP:
            with gzip.GzipFile(fileobj=file, mode="rb") as packed:
                yield cast(IO[bytes], packed)
        else:
            yield file


def lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield (number from 1, text, whether a line end follows) of each line of ``path`` that is not blank.

    Raises UsageError with the line number for what is no UTF-8 text, a line too long and a damaged gzip file.
    """
    number = 0
    with opened(path) as file:
        while True:
            try:
                line = file.readline(MOST_LINE)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise bad(
                    path, number + 1, "the compressed file ends early or is damaged", got=str(error),
                    mend="fetch or compress it again",
                ) from None  # fmt: skip
            except OSError as error:
                raise bad(path, number + 1, "cannot be read", got=os.strerror(error.errno or 0)) from None
            if not line:
                return
            number += 1
            if len(line) >= MOST_LINE and not line.endswith(b"\n"):
                raise bad(path, number, "the line is too long", expected=f"less than {MOST_LINE >> 20} MiB")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise bad(path, number, "not UTF-8 text", got=printable(repr(line[:24]), 60)) from None
            if text.strip():
                yield number, text.rstrip("\r\n"), text.endswith("\n")


def sha256(path: Path) -> str:
    """Return the sha256 of the bytes of ``path`` as they lie on disk, in hexadecimal."""
    found = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    except OSError as error:
        raise UsageError("cannot be read", where=printable(path.name), got=os.strerror(error.errno or 0)) from None
    return found.hexdigest()


class _Twice(Exception):
    """A JSON object has a name twice: which value counts is anybody's guess."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for i, name in enumerate(names) if name in names[:i]))
    return found


def parsed(path: Path, number: int, text: str, whole: bool) -> dict[str, Any]:
    """Return the JSON object on a line. ``whole``: a line end follows; without one the file was cut."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        raise bad(
            path, number, "a field is there twice", got=printable(str(error), 40), expected="each name once"
        ) from None
    except (ValueError, RecursionError) as error:
        if not whole:
            raise bad(
                path, number, "the file ends within a line", got=printable(text[-40:], 60),
                mend="fetch it again, or remove the last line",
            ) from None  # fmt: skip
        raise bad(path, number, "not JSON", got=printable(text, 60), expected=printable(str(error), 100)) from None
    if not isinstance(found, dict):
        raise bad(path, number, "not a JSON object", got=printable(text, 60))
    return found
