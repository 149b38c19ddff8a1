"""Where numba keeps machine code, keyed so that an edit to any source of kvbench can never leave a stale kernel.

numba's disk cache looks at the file of the kernel alone: after an edit to a callee in another file it goes on serving
the old machine code (observed with 0.68), and a benchmark then measures code that no longer exists.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvbench import data
from kvbench.errors import KvbenchError

_UNUSED_DAYS = 30
SOURCES = frozenset({".py", ".cu"})
_prepared: CacheInfo | None = None


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The kernel cache of this process. ``reason`` says why it is not in the user's cache directory, None if it is."""

    digest: str
    path: Path
    reason: str | None


def source_roots() -> tuple[Path, ...]:
    """Return the folders whose ``*.py`` files decide what a kernel does: the package, and the suites where they are."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    # a wheel carries the suites inside the package; beside an installed package "suites" would be somebody else's
    beside = [checkout / "suites"] if (checkout / "pyproject.toml").is_file() else []
    return (package, *(p for p in beside if p.is_dir()))


def cpu_features() -> str:
    """Return the machine type and the instruction set flags in /proc/cpuinfo (``unknown`` where it cannot be read)."""
    flags = "unknown"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    flags = " ".join(sorted(value.split()))
                    break
    except OSError:
        pass  # no procfs: numba's own index still separates CPUs by name and features
    return f"{platform.machine()} {flags}"


def source_digest(roots: Iterable[Path]) -> str:
    """Return 16 hex digits over all ``*.py`` and ``*.cu`` below ``roots``, numba, llvmlite and the CPU's features.

    Raises KvbenchError when there is no source or one cannot be read: a digest of nothing would never change.
    """
    sha = hashlib.sha256()
    files = [(root, file) for root in roots for file in sorted(root.rglob("*")) if file.suffix in SOURCES]
    if not files:
        raise KvbenchError("no source file to key the kernel cache with", where="kernels.cache")
    for root, file in files:
        sha.update(f"{root.name}/{file.relative_to(root)}\0".encode("utf-8", "surrogateescape"))
        try:
            sha.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError as error:
            raise KvbenchError(
                "cannot read a source file to key the kernel cache", where=str(file), got=error.strerror
            ) from error
    for package in ("numba", "llvmlite"):
        sha.update(f"{package} {metadata.version(package)}\0".encode())
    sha.update(f"python {platform.python_version()} {cpu_features()}".encode())
    return sha.hexdigest()[:16]


def user_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/kvbench`` or ``~/.cache/kvbench``. Raises OSError when there is no home directory."""
    folder = data.user_cache()
    if folder is None:
        raise FileNotFoundError(2, "no home directory")
    return folder


def _probe(folder: Path) -> None:
    """Create ``folder`` and prove that a file can be written there, or raise OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
        file.write(b"x")
        file.flush()


def _fallback(digest: str) -> Path:
    """Return a writable folder in the temporary directory, reused by later workers where it is safely ours."""
    parent = Path(tempfile.gettempdir()) / f"kvbench-numba-{os.getuid()}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        info = parent.lstat()
        # the cache is unpickled: in a shared directory only a folder nobody else can write to will do
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022:
            _probe(parent / digest)
            return parent / digest
    except OSError:
        pass  # taken by somebody else or not writable: a private one costs a compilation per worker
    return Path(tempfile.mkdtemp(prefix="kvbench-numba-"))


def _locate(digest: str) -> CacheInfo:
    try:
        wanted = user_cache_dir() / "numba" / digest
    except OSError as error:
        return CacheInfo(digest, _fallback(digest), f"kernel cache in a temporary directory: {error.strerror}")
    try:
        _probe(wanted)
    except OSError as error:
        reason = f"kernel cache in a temporary directory: {wanted}: {error.strerror}"
        return CacheInfo(digest, _fallback(digest), reason)
    _prune(wanted)
    return CacheInfo(digest, wanted, None)


def _prune(current: Path) -> None:
    """Drop sibling caches no process has opened for a month: every edit of a source begins a new one."""
    os.utime(current)
    limit = time.time() - _UNUSED_DAYS * 86400
    for other in current.parent.iterdir():
        try:
            if other != current and other.is_dir() and not other.is_symlink() and other.stat().st_mtime < limit:
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue  # removed by another process at the same time


def prepare() -> CacheInfo:
    """Point numba at this build's own cache and return it; call before numba is imported. Later calls are free.

    Raises KvbenchError when numba is already loaded with another cache directory: its kernels could be stale.
    """
    global _prepared
    if _prepared is not None:
        return _prepared
    info = _locate(source_digest(source_roots()))
    loaded = sys.modules.get("numba")
    if loaded is not None:
        configured = str(getattr(getattr(loaded, "config", None), "CACHE_DIR", ""))
        if configured != str(info.path):
            raise KvbenchError(
                "numba was imported before kvbench chose its kernel cache, so a stale kernel could be measured",
                where="NUMBA_CACHE_DIR",
                got=configured or "(unset)",
                expected=str(info.path),
                mend="import kvbench.kernels.cache and call prepare() before anything imports numba",
            )
    os.environ["NUMBA_CACHE_DIR"] = str(info.path)
    _prepared = info
    return info
