"""Output files that appear whole or not at all, and replace nothing unless asked to."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kvbench.errors import StoreError, UsageError
from kvbench.store.opened import refuse_database


@contextlib.contextmanager
def new_file(path: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary file beside ``path`` that becomes ``path`` when the block ends well.

    Raises UsageError when ``path`` is there (unless ``force`` and it is a regular file, but never a database) or cannot
    be made, StoreError when writing fails.
    """
    path = Path(path)
    taken = UsageError("the file is there already", where=str(path), mend="give another name; nothing was changed")
    if _refuse_special(path):
        if not force:
            raise taken
        refuse_database(path, "a file to write")
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the file cannot be made ({reason})", where=str(path)) from None
    try:
        yield temporary
        _settle(temporary, path, force)
    except FileExistsError:
        raise taken from None
    except OSError as error:
        raise StoreError(
            f"the file cannot be written ({error.strerror})", where=str(path), mend="nothing was left behind"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _refuse_special(path: Path) -> bool:
    """Return whether a regular file is there. Raises UsageError for anything else: a rename would replace a device."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the file cannot be made ({reason})", where=str(path)) from None
    if stat.S_ISREG(mode):
        return True
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symbolic link"), (stat.S_ISFIFO, "named pipe"))
    kind = next((name for test, name in kinds if test(mode)), "device or socket")
    raise UsageError(
        f"this is a {kind}", where=str(path), expected="the name of a file to write", mend="nothing was changed"
    )


def _settle(temporary: Path, path: Path, force: bool) -> None:
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if force:
        if _refuse_special(path):  # it may have become one since
            refuse_database(path, "a file to write")
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename it fails when somebody made the file meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.rename(temporary, path)
