"""Opening: the default place, and one clear line with exit code 2 for everything that is not a usable database."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from kvbench.errors import EXIT_USAGE, KvbenchError, MissingExtra, StoreError, UsageError
from kvbench.store import engine
from kvbench.store.database import Database, explain, sqlite_engine
from kvbench.store.engine import open_database, open_store
from kvbench.store.schema import SCHEMA_VERSION
from kvbench.store.target import default_target, file_system_of, is_network, parse_target
from tests.store.factories import make_row, make_run


def refused(target: str | Path, *, create: bool = True, readonly: bool = False) -> str:
    """Return the one line that opening ``target`` for a run is refused with."""
    with pytest.raises(UsageError) as caught, open_store(target, create=create, readonly=readonly) as store:
        store.check_writable()
    line = str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in line
    return line


def test_default_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_target() == "/data/kvbench/kvbench.db"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # the specification says: ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_target() == f"{tmp_path}/.local/share/kvbench/kvbench.db"
    monkeypatch.setenv("KVBENCH_DB", "/elsewhere.db")
    assert default_target() == "/elsewhere.db"


@pytest.mark.parametrize("home", [None, "", "relative", "./x", "~"])
def test_without_home_the_password_database_decides(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    known = pwd.getpwuid(os.getuid()).pw_dir
    assert default_target() == f"{known}/.local/share/kvbench/kvbench.db"

    def nobody(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UsageError, match=r"HOME is unset.*--db PATH"):
        default_target()


def test_the_default_folder_is_made_and_an_explicit_one_is_not(tmp_path: Path) -> None:
    with open_store() as store:
        assert store.where == default_target()
        store.check_writable()
    assert "mkdir -p" in refused(tmp_path / "missing" / "kv.db")
    assert not (tmp_path / "missing").exists()


def test_a_home_that_does_not_exist_is_named_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "no" / "home"))
    with pytest.raises(UsageError, match=r"/no/home: the home directory does not exist.*--db PATH") as caught:
        open_store()
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="no database here"):
        open_store(create=False)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # the XDG specification wants this one made
    open_store().close()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_files_that_are_no_database(tmp_path: Path) -> None:
    assert "this is a directory" in refused(tmp_path)
    text = tmp_path / "notes.txt"
    text.write_text("precious notes")
    assert "this is not a database" in refused(text)
    assert text.read_text() == "precious notes"
    bundle = tmp_path / "a.jsonl"
    bundle.write_text('{"schema":"kvbench.bundle/1"}\n')
    assert "kvbench import" in refused(bundle)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe)
    assert "not a database" in refused(":memory:")
    assert "not a database" in refused("")
    (tmp_path / "file").write_text("x")
    assert "cannot be opened" in refused(tmp_path / "file" / "kv.db")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be opened" in refused(loop)


def test_reading_makes_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "kv.db"
    assert "there is no database here" in refused(missing, create=False)
    assert "there is no database here" in refused(missing, readonly=True)
    assert not missing.exists()
    missing.touch()
    assert "empty" in refused(missing, create=False)
    with open_store(missing) as store:  # an empty file is as good as none
        store.check_writable()


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE runs (id INTEGER)")
        other.execute("CREATE TABLE alembic_version (version_num TEXT)")
    other.close()
    before = path.read_bytes()
    assert "database of another program" in refused(path)
    assert "alembic_version, runs" in refused(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("version", "said"),
    [("0000", "kvbench db upgrade"), ("9999", "newer kvbench"), ("head", "no readable schema version")],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_other_schema_versions(tmp_path: Path, version: str, said: str, readonly: bool) -> None:
    path = tmp_path / "kv.db"
    open_store(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE kvbench_schema SET version_num = ?", (version,))
    raw.close()
    line = refused(path, readonly=readonly)
    assert said in line
    assert str(path) in line
    assert version in line
    assert SCHEMA_VERSION in line


def test_a_damaged_database_is_told_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    with open_store(path) as store:
        run = make_run()
        store.begin_run(run)
        for number in range(30):
            store.add_results(run.uuid, [make_row(number, reason="x" * 500)], number)
    whole = path.read_bytes()
    for damage in (whole[:8192], whole[:4096] + b"\xff" * 4096 + whole[8192:], whole[:100] + os.urandom(3996)):
        path.write_bytes(damage)
        line = refused(path)
        assert "damaged" in line or "cannot be used" in line or "this is not" in line
        assert path.read_bytes() == damage


def test_read_only_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "kv.db"
    with open_store(path) as store:
        run = make_run()
        store.begin_run(run)
    real = os.access

    def no_write(denied: Path) -> None:
        # root may write anywhere, so the kernel's answer for another user is put in its place
        monkeypatch.setattr(
            os, "access", lambda p, mode: False if Path(p) == denied and mode & os.W_OK else real(p, mode)
        )

    no_write(path)
    assert "the database is read-only" in refused(path)
    no_write(folder)
    assert "folder of the database is read-only" in refused(path)
    assert "folder of the database is read-only" in refused(folder / "new.db")
    with open_store(path, readonly=True) as store:
        assert [found.info.uuid for found in store.runs()] == [run.uuid]


def test_a_log_left_on_a_read_only_file_system_names_what_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "kv.db", tmp_path / "disk"
    folder.mkdir()
    with open_store(path) as store:
        run = make_run()
        store.begin_run(run)
        for name in ("kv.db", "kv.db-wal"):  # as a snapshot of a machine that lost power: the log holds the run
            shutil.copy(tmp_path / name, folder / name)
    assert (folder / "kv.db-wal").stat().st_size > 0
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: False if mode & os.W_OK else real(p, mode))
    line = refused(folder / "kv.db", readonly=True)
    assert "kv.db-wal with" in line
    assert "copy kv.db and kv.db-wal together" in line
    monkeypatch.undo()
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    with open_store(copied / "kv.db", readonly=True) as store:  # the mend works
        assert [found.info.uuid for found in store.runs()] == [run.uuid]
    (folder / "kv.db-wal").write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda p, mode: False if mode & os.W_OK else real(p, mode))
    assert "empty" in refused(folder / "kv.db", readonly=True)  # without its log: nothing is left of the file's content


def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    with open_store(path) as store:
        run = make_run()
        store.begin_run(run)
    before = sorted(tmp_path.iterdir())
    with open_store(path, readonly=True) as store:
        with pytest.raises(StoreError, match="read-only"):
            store.begin_run(make_run())
        with pytest.raises(UsageError, match="reading only"):
            store.check_writable()
        assert len(store.runs()) == 1
    assert sorted(tmp_path.iterdir()) == before


def test_check_writable_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.db"
    with open_store(path) as store:
        store.check_writable()
        full = os.statvfs_result((4096, 4096, 100, 10, 10, 10, 10, 10, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda p: full)
        with pytest.raises(UsageError, match=r"disk of the database is full, got .40960 B free"):
            store.check_writable()
    with pytest.raises(UsageError, match="disk of the database is full"):
        open_store(tmp_path / "new.db")


FULL_DISK = """
import os, resource, sys
from kvbench.errors import KvbenchError
from kvbench.store.engine import open_store
from tests.store.factories import make_row, make_run
target, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
stored = 0
try:
    with open_store(target) as store:
        store.check_writable()
        run = make_run()
        store.begin_run(run)
        for number in range(2000):
            store.add_results(run.uuid, [make_row(number, reason="x" * 2000)], number)
            stored += 1
except KvbenchError as error:
    print(stored, error.exit_code, error)
"""


def _child(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, *arguments],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_no_room_to_make_a_database_is_a_usage_error(tmp_path: Path) -> None:
    stored, code, line = _child(str(tmp_path / "kv.db"), "20000").split(" ", 2)
    assert (stored, code) == ("0", "2")
    assert line.count("\n") == 1


def test_no_room_in_the_middle_of_a_run_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    stored, code, line = _child(str(path), "2000000").split(" ", 2)
    assert int(stored) > 10
    assert code == "3"
    assert "full" in line
    with open_store(path) as store:
        assert store.runs()[0].done == int(stored)
        store.begin_run(make_run())
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    raw.close()


def test_a_really_full_file_system(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        stored, code, line = _child(str(disk / "kv.db"), str(1 << 30)).split(" ", 2)
        assert int(stored) > 10
        assert code == "3"
        assert "the disk is full" in line
        with open_store(disk / "kv.db", readonly=True) as store:
            assert store.runs()[0].done == int(stored)
        assert "full" in refused(disk / "kv.db")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # lazy: a failure above may hold it open


def test_network_file_system_gets_a_rollback_journal_and_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.db"
    with open_store(path) as store:
        assert store.notices == ()
    monkeypatch.setattr(engine, "file_system_of", lambda p: "nfs4")
    with open_store(path) as store:  # was in WAL mode before it was copied there
        assert len(store.notices) == 1
        assert "network file system" in store.notices[0]
        run = make_run()
        store.begin_run(run)
        store.add_results(run.uuid, [make_row()], 0)
        assert not path.with_name("kv.db-wal").exists()
        with store.database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "delete"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2


def test_local_connections_are_durable(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv.db") as store, store.database.read() as connection:
        pragma = {n: connection.exec_driver_sql(f"PRAGMA {n}").scalar_one() for n in (
            "journal_mode", "synchronous", "foreign_keys", "busy_timeout")}  # fmt: skip
    assert pragma == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}


def test_file_systems_by_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 27 0:0 / /proc rw - proc proc rw\n"
        f"27 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - fuse.sshfs x rw\n"
    )
    assert file_system_of(tmp_path, table) == "fuse.sshfs"
    assert file_system_of(tmp_path, tmp_path / "missing") is None
    assert [is_network(name) for name in ("nfs4", "9p", "fuse.sshfs", "ext4", "tmpfs", "fuseblk", None)] == [
        True, True, True, False, False, False, False
    ]  # fmt: skip


SECRETS = [
    "postgresql://me:hunter2@db.example/kv?oops", "postgresql://me:hunter2@db.example:notaport/kv",
    "postgresql://me:hunter2@db.example", "mysql://me:hunter2@db.example/kv", "postgres://me:hun@hunter2@db.example/kv",
    "postgresql://me:x/hunter2@db.example/kv", "postgresql://me:x?hunter2@db.example/kv",
    "postgresql://db.example/?password=hunter2", "postgresql://db.example/kv?password=a@hunter2",
    "postgresql+asyncpg://me:hunter2@h/kv", "sqlite://me:hunter2@h", "postgresql://me:a:hunter2@h/kv",
    "postgresql://me:x%23hunter2@127.0.0.1:1/kv", "postgresql://me:hunter2@[::1/kv",
]  # fmt: skip


@pytest.mark.parametrize("url", SECRETS)
def test_no_error_prints_a_password(url: str) -> None:
    with pytest.raises(KvbenchError) as caught:
        open_store(url)
    assert caught.value.exit_code == EXIT_USAGE
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "hunter2" not in parse_safe(url)


def parse_safe(url: str) -> str:
    try:
        return parse_target(url).display
    except UsageError as error:
        return str(error)


class Refused(Exception):
    """What a driver raises: it may well repeat what it was given."""

    sqlstate = "28P01"


def test_driver_messages_are_scrubbed() -> None:
    target = parse_target("postgresql://me:hunter%402@db/kv?sslpassword=s3same")
    assert target.display == "postgresql://me:***@db/kv"
    origin = Refused('connecting with "hunter@2" or hunter%402 or s3same\nfailed')
    line = str(explain(OperationalError("SELECT 1", {"p": "hunter@2"}, origin), target))
    assert "hunter" not in line
    assert "s3same" not in line
    assert "SELECT" not in line
    assert line.startswith("postgresql://me:***@db/kv: the database cannot be used")


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"kvbench\[postgres\]"):
        open_store("postgresql://me:pw@127.0.0.1:1/kv")


def test_a_held_database_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv.db"
    open_store(path).close()
    monkeypatch.setattr("kvbench.store.database.BUSY_TIMEOUT_S", 0.05)
    with open_store(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process held the database"):
            store.begin_run(make_run())
        other.execute("ROLLBACK")
        other.close()
        store.begin_run(make_run())


def test_a_path_with_url_characters_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "odd ?#% name&mode=ro.db"
    with open_store(path) as store:
        store.begin_run(make_run())
    assert path.is_file()
    with open_store(f"sqlite:///{tmp_path}/plain.db") as store:
        store.check_writable()
    assert (tmp_path / "plain.db").is_file()


def test_importing_the_package_loads_no_sqlalchemy() -> None:
    code = (
        "import sys, kvbench.store, kvbench.locks; from kvbench.store import BundleWriter, Sink, read_bundle;"
        "print([m for m in ('sqlalchemy', 'alembic', 'numpy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr
    code = "import sys; from kvbench.store import open_store; print('alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "False", done.stderr


def test_a_failing_transaction_leaves_the_connection_usable(tmp_path: Path) -> None:
    path = tmp_path / "kv.db"
    open_store(path).close()
    target = parse_target(path)
    database = Database(target, sqlite_engine(target, f"file:{path}?mode=rw", query_only=False))
    with pytest.raises(StoreError, match="no such table"), database.write() as connection:
        connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")
    with database.write() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM runs").scalar_one() == 0
    database.close()
    with open_database(target, create=False, readonly=False).read() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar_one() == 1
