"""Which database a command means, and whether that file can be one: everything decided before SQLAlchemy is loaded."""

from __future__ import annotations

import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote

from kvbench.errors import UsageError
from kvbench.store.opened import SQLITE_MAGIC, part_of_open, refuse_open_database

Kind = Literal["sqlite", "postgresql"]

MIN_FREE_BYTES = 1 << 20  # below this not even the schema and one case fit

# POSIX locks and a shared-memory WAL index do not reach across machines (sqlite.org/wal.html, "all processes on the
# same host"); fuseblk is a local disk and is absent on purpose.
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "fuse", "gfs", "gfs2", "glusterfs"}
    | {"gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "smb3", "smbfs", "vboxsf"}
    | {"virtiofs", "vmhgfs", "wekafs"}
)

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_POSTGRES = ("postgresql", "postgres", "postgresql+psycopg")


@dataclass(frozen=True, slots=True)
class Target:
    """A database to open. ``display`` is safe to print; ``secrets`` are the strings no message may contain."""

    kind: Kind
    display: str
    path: Path | None = None
    url: str | None = None
    secrets: tuple[str, ...] = ()
    is_default: bool = False

    def scrub(self, message: str) -> str:
        """Return ``message`` with every secret of this target replaced by ``***``."""
        for secret in self.secrets:
            message = message.replace(secret, "***")
        return message


def home() -> Path:
    """Return the home directory from $HOME or the password database. Raises UsageError when neither has one."""
    given = os.environ.get("HOME", "")
    if os.path.isabs(given):  # expanduser turns HOME="" into "/", which would put the database in the root folder
        return Path(given)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise UsageError(
            "no place for the database: HOME is unset and this user is not in the password database",
            where=f"uid {os.getuid()}", expected="HOME, XDG_DATA_HOME or KVBENCH_DB", mend="give --db PATH",
        ) from None  # fmt: skip


def default_target() -> str:
    """Return $KVBENCH_DB, or kvbench/kvbench.db under $XDG_DATA_HOME or ~/.local/share. Raises UsageError."""
    if given := os.environ.get("KVBENCH_DB", ""):
        return given
    data = os.environ.get("XDG_DATA_HOME", "")
    # the XDG base directory specification: relative paths are invalid and must be ignored
    folder = Path(data) if os.path.isabs(data) else home() / ".local" / "share"
    return str(folder / "kvbench" / "kvbench.db")


def parse_target(target: str | Path | None) -> Target:
    """Return what ``target`` (a path, an URL, or None for the default) names. Raises UsageError; opens nothing."""
    is_default = target is None and not os.environ.get("KVBENCH_DB")
    text = default_target() if target is None else os.fspath(target)
    where = "--db" if target is not None else "KVBENCH_DB"
    if not text or "\x00" in text or text == ":memory:":
        raise UsageError(
            "not a database", where=where, got=text, expected="a file or a postgresql:// URL",
            mend="use --no-db to store nothing",
        )  # fmt: skip
    match = _URL.fullmatch(text) if isinstance(target, str) or target is None else None
    if match is None:
        path = home() / text[2:] if text.startswith("~/") else Path(text)
        return Target("sqlite", str(path), path=path, is_default=is_default)
    scheme, rest = match["scheme"].lower(), match["rest"]
    display, secrets = _masked(scheme, rest)
    if scheme == "sqlite":
        inside = unquote(rest.partition("?")[0])
        if not inside.startswith("/") or inside in ("/", "/:memory:"):
            raise UsageError("no file in the URL", where=where, got=display, expected="sqlite:///FILE or a plain path")
        return Target("sqlite", inside[1:], path=Path(inside[1:]))
    if scheme not in _POSTGRES:
        raise UsageError(
            "unknown kind of database", where=where, got=display, expected="a file path or postgresql://HOST/DATABASE"
        )
    userinfo, at, host = rest.rpartition("@")
    if at and (any(c in userinfo for c in "@/?#") or userinfo.count(":") > 1):
        # read on, a driver would take the tail of the password for the host and print it
        raise UsageError(
            "the URL cannot be read: @ / ? # : inside a user or password must be percent-encoded", where=where,
            got=display, expected="postgresql://USER:PASSWORD@HOST/DATABASE", mend="write @ as %40, or use PGPASSWORD",
        )  # fmt: skip
    if not host.partition("?")[0].partition("/")[2]:
        raise UsageError(
            "the URL names no database", where=where, got=display, expected="postgresql://HOST/DATABASE"
        )  # fmt: skip
    return Target("postgresql", display, url=f"postgresql+psycopg://{rest}", secrets=secrets)


def _masked(scheme: str, rest: str) -> tuple[str, tuple[str, ...]]:
    """Return a printable form of the URL and the strings that must never be printed."""
    userinfo, at, host = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    secrets = {password, unquote(password)}
    for key, value in parse_qsl(rest.partition("?")[2], keep_blank_values=True):
        if "pass" in key.lower():
            secrets.add(value)
    # a "?" before the last "@" is either part of a password or the start of a query: show nothing of either
    shown = "***" if "?" in userinfo else f"{user}{':***' if password else ''}{at}{host.partition('?')[0]}"
    if any(c in userinfo for c in "@/#"):
        shown = "***"
    return f"{scheme}://{shown}", tuple(sorted((s for s in secrets if s), key=len, reverse=True))


def file_system_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the file system type ``path`` lies on (``ext4``, ``nfs4``, ``fuse.sshfs``); None: unknown."""
    try:
        device = os.stat(path).st_dev
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) > 2 and fields[2] == wanted and right:
            return right.split()[0]
    return None


def is_network(file_system: str | None) -> bool:
    """Return whether another machine may hold the same file open. An unknown file system counts as local."""
    return file_system is not None and (file_system in NETWORK_FILE_SYSTEMS or file_system.startswith("fuse."))


def check_file(target: Target, *, create: bool, write: bool) -> bool:
    """Check that ``target``'s path can be a database and return whether one is there already.

    Reads at most 16 bytes, and none of a file that is open here. Raises UsageError for a directory, a device, a file of
    another kind, a missing file (unless ``create``), a missing or unwritable folder, a read-only file. Creates the
    folder of the default path only, in a home directory that is there.
    """
    path = target.path
    assert path is not None
    where = str(path)
    try:
        info = path.stat()
    except FileNotFoundError:
        if not create:
            raise UsageError(
                "there is no database here", where=where, mend="`kvbench run` makes one, --db PATH names another"
            ) from None
        _check_folder(target)
        return False
    except OSError as error:
        raise UsageError(f"cannot be opened ({error.strerror})", where=where, mend="give --db PATH") from None
    if stat.S_ISDIR(info.st_mode):
        raise UsageError(
            "this is a directory", where=where, expected="a database file", mend=f"--db {path / 'kvbench.db'}"
        )
    if not stat.S_ISREG(info.st_mode):
        raise UsageError("this is not a regular file", where=where, expected="a database file")
    try:
        if part_of_open(path) == "":
            head = SQLITE_MAGIC
        else:
            refuse_open_database(path, "a database file")
            with path.open("rb") as file:
                head = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})", where=where, mend="mend its permissions or give another --db"
        ) from None
    if head and head != SQLITE_MAGIC:
        if head.startswith(b'{"schema"'):
            raise UsageError(
                "this is a result bundle", where=where, expected="a database", mend=f"kvbench import {path}"
            )
        raise UsageError(
            "this is not a database", where=where, got=head.decode("latin-1"), expected="an SQLite 3 file",
            mend="give another --db; nothing was changed",
        )  # fmt: skip
    if not head and not create:
        raise UsageError("the file is empty, not a database", where=where, mend="`kvbench run --db` fills it")
    if write:
        if not os.access(path, os.W_OK):
            raise UsageError("the database is read-only", where=where, mend="chmod u+w, or give another --db")
        _check_folder(target)
    return bool(head)


def _check_folder(target: Target) -> None:
    assert target.path is not None
    folder = target.path.parent
    where = str(folder)
    if target.is_default:
        if not os.path.isabs(os.environ.get("XDG_DATA_HOME", "")) and not (owner := home()).is_dir():
            # made by root it would be a tree in / that nobody looks for results in
            raise UsageError(
                "the home directory does not exist", where=str(owner), expected="a HOME that is there",
                mend="set HOME or XDG_DATA_HOME, or give --db PATH",
            )  # fmt: skip
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the folder of the default database cannot be made ({error.strerror})", where=where,
                mend="give --db PATH or set KVBENCH_DB",
            ) from None  # fmt: skip
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        raise UsageError(
            f"the folder of the database cannot be used ({error.strerror})", where=where, mend=f"mkdir -p {folder}"
        ) from None
    if not is_folder:
        raise UsageError("the folder of the database is a file", where=where, mend="give another --db")
    if not os.access(folder, os.W_OK | os.X_OK):
        # SQLite puts its log beside the file: a writable file in a read-only folder cannot be written
        raise UsageError("the folder of the database is read-only", where=where, mend="give another --db")


def check_free_space(path: Path) -> None:
    """Raise UsageError when the file system of ``path`` has under 1 MiB left for this user."""
    try:
        info = os.statvfs(path if path.exists() else path.parent)
    except OSError:
        return  # unknown is not full: the write that follows decides
    free = info.f_bavail * info.f_frsize
    if free < MIN_FREE_BYTES:
        raise UsageError(
            "the disk of the database is full", where=str(path), got=f"{free} B free",
            expected=f"at least {MIN_FREE_BYTES} B", mend="free space or give another --db",
        )  # fmt: skip
