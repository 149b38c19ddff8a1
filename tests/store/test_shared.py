"""One database for many machines: importers at once, writers that wait for each other, servers with odd settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, text

from kvbench.contract.result import Result, RunInfo
from kvbench.errors import StoreError, UsageError
from kvbench.store import admin
from kvbench.store.bundle import BundleWriter, read_bundle
from kvbench.store.engine import Store, open_store
from kvbench.store.target import parse_target
from kvbench.store.transfer import ImportCounts, export_bundle, import_bundle
from tests.store.conftest import fresh_postgres
from tests.store.factories import at, here, make_row, make_run
from tests.store.server import Server, free_port

postgres = pytest.mark.postgres
MACHINES, RUNS, CASES = 5, 2, 6


def bundles(folder: Path) -> list[Path]:
    """Write a bundle of two runs for each of five machines; the cases are the same, their order is not."""
    made = []
    for number in range(MACHINES):
        path = folder / f"machine-{number}.jsonl"
        group = make_run().group
        with BundleWriter(path, sync_lines=False) as writer:
            for turn in range(RUNS):
                run = make_run(
                    group=group, host=f"node-{number}", hw_class=f"cpu-{number % 2}", machine={"sockets": number % 2},
                    env={"kernel": f"6.{number}"}, env_digest=f"env-{number}", started_at=at(turn), label=f"m{number}",
                )  # fmt: skip
                writer.begin_run(run)
                order = sorted(range(CASES), key=lambda case: (case * (number + 2) + turn) % 7)
                for position, case in enumerate(order):
                    rows = [make_row(case, value=float(number * 100 + case + 1)), make_row(case, "latency")]
                    writer.add_results(run.uuid, rows, position, committed_at=at(position))
                writer.finish_run(run.uuid, "ok", at(9))
        made.append(path)
    return made


def import_all(target: str, files: list[Path], start: threading.Barrier) -> list[ImportCounts]:
    with open_store(target, here=here(host="collector")) as store:
        start.wait(10)
        return [import_bundle(store, file) for file in files]


def test_two_importers_of_five_machines_at_once(any_target: str, tmp_path: Path) -> None:
    files = bundles(tmp_path)
    start = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:  # both make the schema, both bring all files, in opposite order
        done = [pool.submit(import_all, any_target, order, start) for order in (files, files[::-1])]
        counts = [count for future in done for count in future.result(60)]
    assert sum(count.runs_new for count in counts) == MACHINES * RUNS
    assert sum(count.rows_new for count in counts) == MACHINES * RUNS * CASES * 2
    assert sum(count.rows_known for count in counts) == MACHINES * RUNS * CASES * 2
    with open_store(any_target, here=here(host="collector")) as store:
        check_all(store, files)
        tables = ("machines", "environments", "cases", "runs", "results", "samples")
        assert rows_in(store, tables) == [2, 5, CASES, 10, 120, 120]
        assert all(import_bundle(store, file).rows_new == 0 for file in files)  # again changes nothing
        assert rows_in(store, tables) == [2, 5, CASES, 10, 120, 120]
        # a case on one kind of hardware: the machines of that class and no others
        points = store.history(make_row(3).digest, "bandwidth", "cpu-1")
        assert sorted(p.figure.value or 0 for p in points) == [104.0, 104.0, 304.0, 304.0]
        assert export_bundle(store, "m4", tmp_path / "back.jsonl") == (2, 24)
    assert read_bundle(tmp_path / "back.jsonl").runs == read_bundle(files[4]).runs


def rows_in(store: Store, tables: tuple[str, ...]) -> list[int]:
    with store.database.read() as connection:
        return [connection.execute(text(f"SELECT count(*) FROM {name}")).scalar_one() for name in tables]


def check_all(store: Store, files: list[Path]) -> None:
    for number, file in enumerate(files):
        loaded = store.load(f"m{number}", with_samples=True)
        assert [(run.info, run.results) for run in loaded] == [(r.info, r.results) for r in read_bundle(file).runs]


def both_orders(store: Store, first: Callable[[Connection, int], None]) -> list[int]:
    """Let two threads write two rows in opposite order at the same time; return how often each was tried."""
    start, tries = threading.Barrier(2), [0, 0]

    def work(number: int) -> None:
        def attempt(connection: Connection) -> None:
            tries[number] += 1
            first(connection, number)
            if tries == [1, 1] or tries[number] == 1:
                start.wait(10)
            first(connection, 1 - number)

        store.database.transact(attempt)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, number) for number in range(2)]:
            future.result(30)
    return tries


@postgres
def test_a_writer_that_had_to_give_way_tries_again() -> None:
    runs = [make_run(), make_run()]
    with fresh_postgres() as url, open_store(f"{url}%20-cdeadlock_timeout%3D20ms") as store:
        for run in runs:
            store.begin_run(run)

        def touch(connection: Connection, number: int) -> None:
            connection.execute(text("UPDATE runs SET label = 'x' WHERE uuid = :u"), {"u": runs[number].uuid})

        assert sorted(both_orders(store, touch)) == [1, 2]
        assert [run.info.label for run in store.runs()] == ["x", "x"]

        def always(connection: Connection) -> None:
            tried.append(1)
            connection.execute(text("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$"))

        tried: list[int] = []
        with pytest.raises(StoreError, match="the database failed"):
            store.database.transact(always)
        assert len(tried) == 5


@postgres
def test_a_reader_sees_one_state_of_the_database() -> None:
    run = make_run()
    with fresh_postgres() as url, open_store(url) as writer, open_store(url, readonly=True) as reader:
        writer.begin_run(run)
        with reader.database.read() as connection:
            count = text("SELECT count(*) FROM results")
            assert connection.execute(count).scalar_one() == 0
            writer.add_results(run.uuid, [make_row(0)], 0)
            assert connection.execute(count).scalar_one() == 0
        assert len(reader.results(run.uuid)) == 1


@postgres
def test_two_ends_of_one_run_are_decided_one_after_the_other() -> None:
    run = make_run()
    with fresh_postgres() as url, open_store(url) as one, open_store(url) as two:
        one.begin_run(run)
        start, ends = threading.Barrier(2), {one: "ok", two: "partial"}

        def finish(store: Store) -> str | None:
            start.wait(10)
            try:
                store.finish_run(run.uuid, ends[store], at(1))  # type: ignore[arg-type]
            except StoreError as error:
                return error.what
            return None

        with ThreadPoolExecutor(2) as pool:
            said = [future.result(20) for future in [pool.submit(finish, store) for store in (one, two)]]
        first = one.run(run.uuid).info.status
        assert sorted(filter(None, said)) == [f"the run has ended {first} before"]


@postgres
def test_settings_of_a_role_do_not_cut_numbers_or_durability(monkeypatch: pytest.MonkeyPatch) -> None:
    run, row = make_run(label="naïve ☃"), make_row(0, value=0.1 + 0.2, high=1 / 3, seconds=5e-324)
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    with fresh_postgres() as url:
        odd = f"{url}%20-cextra_float_digits%3D-15%20-csynchronous_commit%3Doff"
        with open_store(odd) as store:
            store.begin_run(run)
            store.add_results(run.uuid, [row], 0)
            assert store.results(run.uuid, with_samples=True) == [row]
            assert store.run(run.uuid).info.label == "naïve ☃"
            with store.database.read() as connection:
                assert connection.scalar(text("SHOW synchronous_commit")) == "on"
        with open_store(f"{url}%20-csynchronous_commit%3Dlocal") as store, store.database.read() as connection:
            assert connection.scalar(text("SHOW synchronous_commit")) == "local"


@pytest.fixture
def roles(mortal: Server) -> Iterator[Callable[[str], str]]:
    """Make roles by name; the URL of the database ``kv`` as that role. Needs a superuser: the tests' own server."""
    made = []
    with psycopg.connect(mortal.url, autocommit=True) as admin:

        def role(name: str) -> str:
            admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'hunter2'".encode())
            made.append(name)
            return mortal.url.replace("kvbench@", f"{name}:hunter2@").replace("/postgres", "/kv")

        admin.execute("CREATE DATABASE kv ENCODING 'UTF8' TEMPLATE template0")
        yield role
        admin.execute("DROP DATABASE kv WITH (FORCE)")
        for name in made:
            admin.execute(f"DROP ROLE {name}".encode())


@postgres
def test_who_may_do_what(mortal: Server, roles: Callable[[str], str]) -> None:
    owner = mortal.url.replace("/postgres", "/kv")
    open_store(owner).close()
    writer, reader, nobody = roles("writer"), roles("reader"), roles("nobody")

    def grant(*words: str) -> None:
        with psycopg.connect(owner, autocommit=True) as connection:
            for word in words:
                connection.execute(word.encode())

    def refused(url: str) -> str:
        with pytest.raises(UsageError) as caught, open_store(url) as store:
            store.check_writable()
        line = str(caught.value)
        assert "hunter2" not in line
        assert "\n" not in line
        return line

    assert "permission denied" in refused(nobody)
    grant("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader, writer")
    assert "this user may not INSERT on the table" in refused(reader)
    with open_store(reader, readonly=True) as store:
        assert store.runs() == []
    grant("GRANT INSERT ON ALL TABLES IN SCHEMA public TO writer")
    assert "this user may not UPDATE on the table runs" in refused(writer)
    grant("GRANT UPDATE ON runs TO writer")  # and no rights on sequences: the ids are identities
    run = make_run()
    with open_store(writer) as store:
        store.check_writable()
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        store.finish_run(run.uuid, "ok", at(1))
    with psycopg.connect(owner, autocommit=True) as connection:
        connection.execute("ALTER ROLE writer SET default_transaction_read_only = on")
    assert "the database refuses writes" in refused(writer)
    assert "does not exist" in refused(owner.replace("/kv", "/none"))
    assert "cannot be reached" in refused(f"postgresql://me:hunter2@127.0.0.1:{free_port()}/kv")


@postgres
def test_a_database_that_is_not_utf8_is_refused(mortal: Server) -> None:
    with psycopg.connect(mortal.url, autocommit=True) as admin:
        admin.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
        try:
            with pytest.raises(UsageError, match=r"got .LATIN1., expected encoding UTF8"):
                open_store(mortal.url.replace("/postgres", "/latin"))
        finally:
            admin.execute("DROP DATABASE latin WITH (FORCE)")


@postgres
def test_a_database_of_another_program_stays_as_it_is() -> None:
    with fresh_postgres() as url:
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("CREATE TABLE precious (id int)")
        with pytest.raises(UsageError, match="database of another program, got 'tables precious'"):
            open_store(url)
        with psycopg.connect(url, autocommit=True) as other:
            listed = other.execute("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()").fetchall()
        assert listed == [("precious",)]


@postgres
def test_the_check_reads_everything_and_counts_what_points_at_nothing(tmp_path: Path) -> None:
    with fresh_postgres() as url:
        with open_store(url) as store:
            import_bundle(store, bundles(tmp_path)[0])
        facts = admin.check(url)
        assert (facts["integrity"], facts["foreign_keys"], facts["results"]) == ("ok", 0, 24)
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("SET session_replication_role = replica")  # what a restore without constraints may leave
            other.execute("DELETE FROM samples")
            other.execute("DELETE FROM cases WHERE id = (SELECT min(id) FROM cases)")
        facts = admin.check(url)
        assert (facts["integrity"], facts["foreign_keys"]) == ("4 rows point at nothing", 4)
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("DROP TABLE samples")
        facts = admin.check(url)
        assert facts["foreign_keys"] is None
        assert "samples" in str(facts["integrity"])


@postgres
def test_keepalives_are_set_unless_the_url_says_otherwise() -> None:
    with fresh_postgres() as url:
        for query, wanted in (("", "30"), ("&keepalives_idle=7", "7")):
            with open_store(f"{url}{query}") as store, store.database.engine.connect() as connection:
                raw: Any = connection.connection.driver_connection
                assert raw.info.get_parameters()["keepalives_idle"] == wanted
                assert raw.info.get_parameters()["application_name"] == "kvbench"
    assert parse_target("postgresql://h/kv?keepalives_idle=7").display == "postgresql://h/kv"


def test_an_import_beside_a_running_measurement(any_target: str, tmp_path: Path) -> None:
    """A collector imports while another process measures the same cases: neither loses a row."""
    files = bundles(tmp_path)
    run: RunInfo = replace(make_run(), label="live")
    rows: list[Result] = [make_row(case) for case in range(CASES)][::-1]
    start = threading.Barrier(2)

    def measure() -> None:
        with open_store(any_target, here=here()) as store:
            start.wait(10)
            store.begin_run(run)
            for position, row in enumerate(rows):
                store.add_results(run.uuid, [row], position)
            store.finish_run(run.uuid, "ok", at(2))

    with ThreadPoolExecutor(2) as pool:
        measured, imported = pool.submit(measure), pool.submit(import_all, any_target, files, start)
        measured.result(60)
        imported.result(60)
    with open_store(any_target, here=here()) as store:
        check_all(store, files)
        (live,) = store.load("live", with_samples=True)
        assert (live.info.status, list(live.results)) == ("ok", rows)
