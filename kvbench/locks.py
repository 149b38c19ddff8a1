"""One lock per machine resource: two measurements at once would each measure the other.

A lock is an flock on a file in the system's temporary folder, so it is held against every user of the machine and the
kernel frees it when its holder dies, however it dies. Containers with a temporary folder of their own are not seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvbench.errors import KvbenchError, printable

# Fixed, not $TMPDIR: that may be a folder of each user's own, and two users must contend.
_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MAX_INFO = 4096
_OPEN_TRIES = 50


class Busy(KvbenchError):
    """Another run holds a resource of this machine and waiting was not wanted (exit 3: nothing was measured)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who says to hold a lock: written by the holder, so it is a hint. ``since`` is UTC ISO 8601."""

    pid: int
    uid: int
    since: str

    def describe(self) -> str:
        return printable(f"pid {self.pid} (uid {self.uid}, since {self.since[:19]})", 120)


def machine_resources(gpus: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the lock names of a measurement: one for each NUMA node, and one for each GPU (``gpu-<hash>``).

    ``gpus`` are the lock names of the devices it measures (``Device.lock``; MIG instances share their board's, because
    they share its link, power and clocks). None, for a measurement of the whole machine, takes every visible GPU, or
    every one where it cannot be told which are visible.
    """
    from kvbench.machine.topology import topology

    nodes = tuple(f"node{node.id}" for node in topology().nodes) or ("node0",)
    return (*nodes, *dict.fromkeys(_visible_gpus() if gpus is None else gpus))


@functools.cache
def _visible_gpus() -> tuple[str, ...]:
    # once per process: pytest asks before each case, and NVML takes tens of milliseconds to start
    from kvbench.machine.nvml_devices import read_devices, visible

    devices = read_devices()
    left = visible(devices).value
    return tuple(device.lock for device in (devices.found if left is None else left))


@contextlib.contextmanager
def acquire(
    names: Iterable[str],
    wait: bool = True,
    notify: Callable[[str], None] | None = None,
    *,
    directory: Path | None = None,
) -> Iterator[None]:
    """Hold the locks ``names`` (lower case, as ``node0`` or ``gpu-1f3a``) for the length of the block.

    They are taken in sorted order, so that two runs never wait for each other. When one is held, ``notify`` gets one
    line that names the holder and the call waits; with ``wait=False`` it raises Busy. Raises KvbenchError when the
    lock file cannot be used, ValueError for a name that is none.
    """
    wanted = sorted(set(names))
    for name in wanted:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a lock name")
    folder = directory if directory is not None else _folder()
    with contextlib.ExitStack() as stack:
        for name in wanted:
            descriptor = _open(folder / f"kvbench-{name}.lock")
            stack.callback(os.close, descriptor)
            _lock(descriptor, name, wait, notify)
            stack.callback(_forget, descriptor)
            _remember(descriptor)
        yield


def holder(name: str, *, directory: Path | None = None) -> Holder | None:
    """Return who holds the lock ``name``; None when it is free, or held by somebody who left no name."""
    path = (directory if directory is not None else _folder()) / f"kvbench-{name}.lock"
    if not os.path.lexists(path):
        return None
    descriptor = _open(path)
    try:
        return _read(descriptor) if not _try(descriptor) else None
    finally:
        os.close(descriptor)


def _folder() -> Path:
    for folder in _FOLDERS:
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise KvbenchError(
        "no folder for the lock files", where=", ".join(map(str, _FOLDERS)), expected="one every user can write to"
    )


def _open(path: Path) -> int:
    """Open the lock file, made with mode 0666 so that any user can lock it. Follows no link, opens no device."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    problem = ""
    for _ in range(_OPEN_TRIES):
        try:
            # without O_CREAT first: fs.protected_regular forbids O_CREAT on another user's file in a sticky folder
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            except OSError as error:
                raise _unusable(path, error.strerror) from None
            os.fchmod(descriptor, 0o666)  # the umask took bits away
            return descriptor
        except PermissionError as error:
            problem = str(error.strerror)  # its maker may not have come to fchmod yet
            time.sleep(0.01)
            continue
        except OSError as error:
            raise _unusable(path, error.strerror) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _unusable(path, "not a regular file")
        return descriptor
    raise _unusable(path, problem or "it comes and goes")


def _unusable(path: Path, reason: str | None) -> KvbenchError:
    return KvbenchError(
        f"the lock file cannot be used ({reason or 'unknown error'})", where=str(path), mend=f"remove {path}"
    )


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, name: str, wait: bool, notify: Callable[[str], None] | None) -> None:
    if _try(descriptor):
        return
    found = _read(descriptor)
    who = found.describe() if found else "another process"
    if found is not None and found.pid == os.getpid() and found.uid == os.getuid():
        raise Busy(f"{name} is held by this process itself", mend="end the first measurement before the second")
    if not wait:
        raise Busy(
            f"{name} is being measured by {who}", mend="wait for it, or run without --no-wait to wait here"
        )  # fmt: skip
    if notify is not None:
        notify(f"waiting for {name}: measured by {who}")
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # a signal handler that raises ends the wait (PEP 475)


def _remember(descriptor: int) -> None:
    info = {"pid": os.getpid(), "uid": os.getuid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    # a full disk must not keep anybody from measuring: the name of the holder is a courtesy
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(info).encode(), 0)


def _forget(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)


def _read(descriptor: int) -> Holder | None:
    """Return what the file says. Any user can have written anything into it."""
    try:
        data = json.loads(os.pread(descriptor, _MAX_INFO, 0))
        return Holder(int(data["pid"]), int(data["uid"]), str(data["since"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
