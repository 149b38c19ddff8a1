"""The database files this process has open. Nothing else here may open one of them, not even to look at it.

Closing any descriptor of a file drops every lock the process holds on it (POSIX, fcntl(2)), SQLite's included. Another
process that closes the database then takes itself for the last one and removes the log that is still written to: what
was acknowledged is lost, and the file is damaged for good (sqlite.org/howtocorrupt.html, 2.2). ``stat`` does no harm.
Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvbench.errors import UsageError

SQLITE_MAGIC = b"SQLite format 3\x00"
_BESIDE = ("-wal", "-shm", "-journal")
# an entry a connection: device and inode, and the path SQLite names the files beside it by
_open: dict[object, tuple[int, int, str]] = {}


def hold_open(path: Path) -> Callable[[], None]:
    """Note that this process has the database ``path`` open; return what notes that it is closed, once."""
    info = path.stat()
    token = object()
    _open[token] = (info.st_dev, info.st_ino, os.path.realpath(path))

    def closed() -> None:
        _open.pop(token, None)

    return closed


def part_of_open(path: str | Path) -> str | None:
    """Return ``""`` for a database that is open here, ``-wal``, ``-shm`` or ``-journal`` for a file beside one.

    None for any other file, whatever it is called; by inode, so that links are seen through.
    """
    key = _inode(path)
    if key is None:
        return None
    for device, inode, real in tuple(_open.values()):
        if key == (device, inode):
            return ""
        for suffix in _BESIDE:
            if key == _inode(real + suffix):
                return suffix
    return None


def refuse_open_database(path: str | Path, expected: str) -> None:
    """Raise UsageError when ``path`` belongs to a database that is open here. To be called before opening a file."""
    if part_of_open(path) is not None:
        raise UsageError(
            "this file belongs to the open database", where=str(path), expected=expected,
            mend="give another file; nothing was changed",
        )  # fmt: skip


def refuse_database(path: str | Path, expected: str) -> None:
    """Raise UsageError when the file ``path`` is a database, open here or not. To be called before replacing a file.

    A file that cannot be read counts as none.
    """
    refuse_open_database(path, expected)
    try:
        with open(path, "rb") as file:
            head = file.read(len(SQLITE_MAGIC))
    except OSError:
        return
    if head == SQLITE_MAGIC:
        raise UsageError(
            "this is a database", where=str(path), expected=expected, mend="give another name; nothing was changed"
        )


def _inode(path: str | Path) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino
