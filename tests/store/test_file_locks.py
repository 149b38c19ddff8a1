"""An open database keeps its locks, whatever this process does with the file; others that close it damage nothing."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.store import BundleWriter, Store, admin, check_bundle, export, import_bundle, open_store, read_bundle
from kvbench.store.importers import read_foreign, recognise
from kvbench.store.newfile import new_file
from kvbench.store.opened import part_of_open
from kvbench.store.target import check_file, check_free_space, file_system_of, parse_target
from tests.store.factories import make_row, make_run

ROOT = Path(__file__).parents[2]
VISIT = """
import sys
from kvbench.store import open_store
for _ in range(int(sys.argv[2])):
    with open_store(sys.argv[1], create=False, readonly=True) as store:
        store.runs()
    with open_store(sys.argv[1], create=False) as store:
        store.annotate("a visitor")
"""


def locks(path: Path) -> list[str]:
    """Return the locks this process holds on the database and on the index of its log, as /proc/locks lists them."""
    files = [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]
    ours = {f":{file.stat().st_ino}" for file in files if file.exists()}
    words = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
    mine = [found for found in words if str(os.getpid()) in found]
    return sorted(" ".join(found) for found in mine if any(word.endswith(tuple(ours)) for word in found))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    path = tmp_path / "k.db"
    with open_store(path) as store:
        run = make_run(label="kept")
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        yield store, path


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def write_over(path: Path) -> None:
    with new_file(path, force=True) as temporary:
        temporary.write_text("not a database\n")


LOOKS: dict[str, Callable[[Store, Path], object]] = {
    "check_writable": lambda store, path: store.check_writable(),
    "open again": lambda store, path: open_store(path).close(),
    "open to read": lambda store, path: open_store(path, create=False, readonly=True).close(),
    "db info": lambda store, path: admin.info(path),
    "db check": lambda store, path: admin.check(path),
    "db upgrade": lambda store, path: admin.upgrade(path),
    "check_file": lambda store, path: check_file(parse_target(path), create=False, write=True),
    "free space": lambda store, path: check_free_space(path),
    "file system": lambda store, path: file_system_of(path),
    "export": lambda store, path: export(store, "kept", path.with_name("out.jsonl")),
}
REFUSED: dict[str, Callable[[Store, Path], object]] = {
    "the log as a database": lambda store, path: open_store(beside(path, "-wal")),
    "the index as a database": lambda store, path: open_store(beside(path, "-shm"), readonly=True),
    "the database as a bundle": lambda store, path: read_bundle(path),
    "the index as a bundle": lambda store, path: check_bundle(beside(path, "-shm")),
    "import of itself": lambda store, path: import_bundle(store, path),
    "recognised": lambda store, path: recognise(path),
    "as another tool's": lambda store, path: read_foreign(path, "stream"),
    "written as a bundle": lambda store, path: BundleWriter(path),
    "exported over": lambda store, path: export(store, "kept", path, "json", force=True),
    "exported over its index": lambda store, path: export(store, "kept", beside(path, "-shm"), "csv", force=True),
    "replaced": lambda store, path: write_over(path),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_an_open_database_keeps_its_locks(opened: tuple[Store, Path], name: str) -> None:
    store, path = opened
    before = locks(path)
    assert any("READ" in lock for lock in before)
    LOOKS[name](store, path)
    assert locks(path) == before
    assert len(store.runs()) == 1


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("link", [False, True], ids=["path", "hard link"])
def test_an_open_database_is_no_other_file(opened: tuple[Store, Path], name: str, link: bool) -> None:
    store, path = opened
    before, inode = locks(path), path.stat().st_ino
    named = path
    if link:  # another name of the same three files
        named = path.with_name("other.db")
        for suffix in ("", "-wal", "-shm"):
            os.link(beside(path, suffix), beside(named, suffix))
    with pytest.raises(UsageError, match="belongs to the open database"):
        REFUSED[name](store, named)
    assert locks(path) == before
    assert path.stat().st_ino == inode
    assert len(store.runs()) == 1


def test_what_is_open_is_known_by_its_inode_until_the_last_connection_ends(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    first, second = open_store(path), open_store(path)
    (tmp_path / "symbolic.db").symlink_to(path)
    assert [part_of_open(p) for p in (path, tmp_path / "symbolic.db", beside(path, "-shm"))] == ["", "", "-shm"]
    assert part_of_open(tmp_path / "k.db-wal.bak") is None
    first.close()
    first.close()  # twice is once
    assert part_of_open(path) == ""
    second.close()
    assert part_of_open(path) is None


def test_a_database_that_could_not_be_opened_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (a)")
    with pytest.raises(UsageError, match="another program"):
        open_store(path)
    assert part_of_open(path) is None


def test_a_closed_database_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    open_store(path).close()
    path.write_bytes(b"this is no database at all")
    with pytest.raises(UsageError, match="not a database"):
        open_store(path)


def test_a_closed_database_is_not_written_over_either(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    open_store(path).close()
    with pytest.raises(UsageError, match="this is a database"):
        write_over(path)
    assert path.read_bytes().startswith(b"SQLite format 3")


def check_whole(path: Path, **rows: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table, count in rows.items():
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)


def test_visitors_beside_a_checked_writer_damage_nothing(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with open_store(path) as store:
        store.check_writable()
        run = make_run()
        store.begin_run(run)
        with subprocess.Popen([sys.executable, "-c", VISIT, path, "6"], cwd=ROOT) as visitor:
            number = 0
            while visitor.poll() is None:
                store.add_results(run.uuid, [make_row(number)], number)
                number += 1
            assert visitor.returncode == 0
        log = beside(path, "-wal")
        assert log.exists()
        assert log.stat().st_size > 0
    check_whole(path, results=number, annotations=6)


def test_commands_in_the_middle_of_a_run_lose_nothing_of_it(tmp_path: Path) -> None:
    """As ``kvbench run`` writes: checked, a case a commit; between them ``kvbench import`` and ``kvbench runs``."""
    path, bundle = tmp_path / "k.db", tmp_path / "b.jsonl"
    other = make_run(label="carried")
    with BundleWriter(bundle) as writer:
        writer.begin_run(other)
        writer.add_results(other.uuid, [make_row(0)], 0)
    kvbench = [sys.executable, "-c", "from kvbench.cli.main import main; main()"]
    run = make_run(label="mine")
    with open_store(path) as store:
        store.check_writable()
        store.begin_run(run)
        for number, words in enumerate((["import", str(bundle)], ["runs"], ["import", str(bundle)])):
            store.add_results(run.uuid, [make_row(number)], number)
            before, log = locks(path), beside(path, "-wal").stat().st_ino
            done = subprocess.run(
                [*kvbench, *words, "--db", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert (locks(path), beside(path, "-wal").stat().st_ino) == (before, log)
        store.add_results(run.uuid, [make_row(9)], 9)
        assert len(store.results(run.uuid)) == 4
    check_whole(path, results=5, runs=2)


def test_a_file_that_vanishes_is_part_of_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "k.db"):
        (tmp_path / "k.db").rename(tmp_path / "moved.db")
        assert part_of_open(tmp_path / "moved.db") == ""
        assert part_of_open(tmp_path / "k.db") is None
        with suppress(UsageError):
            check_file(parse_target(tmp_path / "k.db"), create=False, write=True)
    for name in ("", "gone", "a\x00b"):
        assert part_of_open(name) is None
