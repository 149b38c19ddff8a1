"""The file tier: scratch files without a name, full of random bytes, whose page cache can be dropped and counted."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvbench import data
from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.machine.probe import ROOT, Fact
from kvbench.memory import libc, payload
from kvbench.memory.host import preflight
from kvbench.memory.limits import read_text
from kvbench.units import format_bytes

FILE_UNIT = 4096  # file sizes are multiples of this: the largest O_DIRECT alignment common devices ask for
WRITE_CHUNK = 8 << 20
# Their pages are the file: nothing leaves memory, and since Linux 6.6 tmpfs even accepts O_DIRECT.
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs", "rootfs"})
_MAGIC = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs",
          0x794C7630: "overlay", 0x6969: "nfs", 0x2FC12FC1: "zfs", 0x65735546: "fuse", 0x01021997: "9p"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What holds a file: type, mount source and device number as the kernel names them; None is unknown."""

    kind: str | None
    source: str | None
    device: str


@dataclass(frozen=True, slots=True)
class Direct:
    """Whether O_DIRECT reads bypass the page cache here, and the alignment in bytes memory and offsets need."""

    works: bool | None
    memory_align: int
    offset_align: int
    reason: str = ""


def _candidates() -> Iterator[Path]:
    cache = data.user_cache()
    if cache is not None:
        yield cache
    home = data.user_home()
    if home is not None:
        yield home / ".cache" / "kvbench"
    yield Path(tempfile.gettempdir()) / f"kvbench-{os.getuid()}"


def _prepare(path: Path) -> str | None:
    """Create ``path`` with mode 0700 if it is missing; return why it cannot hold scratch files, None when it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        probe = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        os.close(probe)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(path, os.W_OK | os.X_OK) else "not writable"


def scratch_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory for scratch files, created with mode 0700 if missing.

    ``None``: $XDG_CACHE_HOME/kvbench, else ~/.cache/kvbench (home from $HOME or the user database), else a directory
    of this user in the temporary directory; the first that is writable. Raises UsageError when ``path``, or every
    default, cannot be used.
    """
    if path is not None:
        chosen = Path(path)
        reason = _prepare(chosen)
        if reason:
            raise UsageError(
                "cannot use this scratch directory",
                where=str(chosen),
                got=reason,
                mend="give --scratch a writable directory",
            )
        return chosen
    reasons = []
    for candidate in _candidates():
        reason = _prepare(candidate)
        # Anybody may make this name in a shared temporary directory, also as a link into somebody's files.
        if reason is None and candidate.parent == Path(tempfile.gettempdir()):
            found = candidate.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                reason = "belongs to another user"
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise UsageError(
        "no writable scratch directory",
        where="scratch",
        got="; ".join(reasons),
        mend="give --scratch a writable directory",
    )


def file_system(path: Path, root: Path = ROOT) -> FileSystem:
    """Return what holds the existing ``path``: the longest mount point above it in mountinfo, else statfs."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    where, best, found = os.path.realpath(path), -1, None
    for line in (read_text(root / "proc/self/mountinfo").value or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two mounts on one point the later one is on top
            best, found = len(point), FileSystem(tail[0], tail[1], number)
    if found:
        return found
    try:
        magic = libc.statfs_magic(where)
    except OSError:
        return FileSystem(None, None, number)
    return FileSystem(_MAGIC.get(magic, hex(magic)), None, number)


def free_bytes(directory: Path) -> int:
    """Return bytes an unprivileged user may still write to the file system of ``directory``."""
    state = os.statvfs(directory)
    return state.f_bavail * state.f_frsize


def _refused(error: OSError, doing: str, directory: Path) -> Unavailable:
    reasons = {errno.ENOSPC: "free space there", errno.EDQUOT: "raise the quota", errno.EFBIG: "see ulimit -f"}
    return Unavailable(
        f"scratch file: {doing} failed", where=str(directory), got=error.strerror or str(error),
        mend=f"{reasons.get(error.errno or 0, 'check the device')}, or give --scratch another directory",
    )  # fmt: skip


class ScratchFile:
    """``nbytes`` of random payload in a file that has no name any more, so that it cannot outlive the process.

    ``fd`` reads and writes through the page cache; ``direct_fd`` bypasses it and is None where ``direct.works`` is
    False (unknown keeps it: a reader flags that). ``system`` names the file system. Raises UsageError for a size that
    is no multiple of 4 KiB, Unavailable when less than twice the size is free or the disk fails.
    """

    def __init__(self, nbytes: int, directory: Path | None = None, seed: int = 1) -> None:
        if nbytes < FILE_UNIT or nbytes % FILE_UNIT:
            raise UsageError(
                "not a size of a scratch file", where="bytes", got=nbytes, expected=f"a multiple of {FILE_UNIT}"
            )
        self.nbytes, self.seed = nbytes, seed
        self.directory = scratch_dir(directory)
        free = free_bytes(self.directory)
        if free < 2 * nbytes:
            raise Unavailable(
                "not enough free space for a scratch file", where=str(self.directory),
                got=f"{free / 2**20:.0f} MiB free", expected=f"{format_bytes(2 * nbytes)}, twice the file",
                mend="give --scratch a larger file system",
            )  # fmt: skip
        self.system = file_system(self.directory)
        if self.system.kind in MEMORY_FILE_SYSTEMS:
            preflight(nbytes)  # there the file itself takes memory the OOM killer cannot give back
        self.fd = -1
        self.direct_fd: int | None = None
        try:
            self._create()
            self._write()
            self.direct = self._probe_direct()
        except OSError as error:
            self.close()
            raise _refused(error, "creating it", self.directory) from error
        except BaseException:
            self.close()
            raise
        if self.direct.works is False and self.direct_fd is not None:
            os.close(self.direct_fd)
            self.direct_fd = None

    def _create(self) -> None:
        path = self.directory / f"scratch-{os.getpid()}-{secrets.token_hex(8)}"
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            self._open_error = error.strerror or str(error)
        finally:
            os.unlink(path)

    def _write(self) -> None:
        chunk = np.empty(min(WRITE_CHUNK, self.nbytes), np.uint8)
        for start in range(0, self.nbytes, chunk.size):
            piece = chunk[: min(chunk.size, self.nbytes - start)]
            payload.fill(piece, self.seed, "bits", start)
            view, done = piece.data, 0
            while done < piece.size:
                done += os.pwrite(self.fd, view[done:], start + done)
        os.fsync(self.fd)

    def _probe_direct(self) -> Direct:
        if self.system.kind in MEMORY_FILE_SYSTEMS:
            return Direct(
                False, 0, 0, f"{self.system.kind} keeps its files in memory: a direct read would be a memory copy"
            )
        if self.direct_fd is None:
            return Direct(False, 0, 0, f"{self.system.kind or 'the file system'} refuses O_DIRECT: {self._open_error}")
        stated = libc.dio_alignment(self.direct_fd)
        if stated == (0, 0):
            return Direct(False, 0, 0, f"{self.system.kind or 'the file system'} says this file takes no direct reads")
        memory, offset = stated or (0, 0)
        self.drop_cache()
        before = self.cached_bytes()
        page = mmap.mmap(-1, FILE_UNIT)
        got: OSError | None = None
        for unit in (offset,) if offset else (512, FILE_UNIT):
            try:
                os.preadv(self.direct_fd, [memoryview(page)[:unit]], 0)
            except OSError as error:
                got = error
                continue
            # Encrypted, compressed or journalled files are read through the cache in spite of O_DIRECT.
            after = self.cached_bytes()
            if before.value is None or after.value is None:
                why = f"what is cached is unknown: {before.reason or after.reason}"
                return Direct(None, memory or unit, unit, why)
            if after.value > before.value:
                return Direct(False, 0, 0, "direct reads fill the page cache here, so they are buffered reads")
            if before.value:
                return Direct(
                    None, memory or unit, unit, f"{before.value} bytes of the file cannot be dropped from the cache"
                )
            return Direct(True, memory or unit, unit)
        return Direct(False, 0, 0, f"O_DIRECT reads fail: {got.strerror if got else 'unknown'}")

    def map(self) -> mmap.mmap:
        """Return a fresh shared read-only mapping of the whole file."""
        return mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)

    def drop_cache(self) -> None:
        """Ask the kernel to drop this file's pages. Mapped, dirty and tmpfs pages stay: see :meth:`cached_bytes`."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cached_bytes(self) -> Fact[int]:
        """Return how many bytes of the file are in the page cache; None with the reason when it cannot be told."""
        try:
            address = libc.mmap(0, self.nbytes, libc.PROT_READ, libc.MAP_SHARED, self.fd, 0)
        except OSError as error:
            return Fact(None, error.strerror or str(error))
        try:
            pages = libc.resident_pages(address, self.nbytes)
            return Fact(min(self.nbytes, pages * libc.base_page_bytes()))
        except OSError as error:
            return Fact(None, error.strerror or str(error))
        finally:
            libc.munmap(address, self.nbytes)

    def expected(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes the file was written with at ``offset``."""
        return payload.expected(nbytes, self.seed, "bits", offset)

    def failed(self, error: OSError, doing: str = "reading it") -> KvbenchError:
        """Return the one-line error for a read, or what ``doing`` says, that failed."""
        return _refused(error, doing, self.directory)

    def close(self) -> None:
        """Close the file; its space is free once mappings of it are gone. Closing twice is fine."""
        for fd in (self.fd, self.direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.fd, self.direct_fd = -1, None

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
