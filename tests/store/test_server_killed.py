"""The server is killed in the middle of a run: what was acknowledged is there, one line says so, the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import StoreError
from kvbench.store.engine import open_store
from tests.store.conftest import fresh_schema
from tests.store.factories import at, make_row, make_run
from tests.store.server import Server

pytestmark = pytest.mark.postgres
ROOT = Path(__file__).parents[2]

WRITER = (
    "import sys\nfrom kvbench.errors import KvbenchError\nfrom tests.store.stress import write_runs\n"
    "try:\n    write_runs(sys.argv[1], 1, 100_000, 1)\nexcept KvbenchError as error:\n"
    "    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
)
# The canaries compile and measure for seconds; what is tested here is what comes after them.
RUN = "from kvbench import canary\ncanary.benches = dict\nfrom kvbench.cli.main import main\nraise SystemExit(main())\n"
SUITE = '''
import time
from kvbench import axis, bench

N = axis.integer(smoke=list("12345678"), quick="1", full="1")

@bench(version=1, metric="time", unit="s", better="lower", n=N)
def nap(case, measure):
    """Sleeps."""
    def run(reps):
        time.sleep(0.01 * reps)
    measure(run, ops=case.n)
'''


@pytest.fixture
def url(mortal: Server) -> Iterator[str]:
    with fresh_schema(mortal.url) as made:
        yield made


def test_acknowledged_cases_survive_and_the_writer_says_one_line(mortal: Server, url: str) -> None:
    open_store(url).close()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(20)]
        mortal.kill()
        rest, said = writer.communicate(timeout=30)
    mortal.start()
    lines += [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    acknowledged = [line.split()[1] for line in lines]
    uuid = lines[0].split()[0]
    assert writer.returncode == 3
    assert said.count("\n") == 1
    assert said.startswith("postgresql://kvbench@127.0.0.1:")
    assert "the server cannot be reached (" in said
    assert "kvbench run --resume RUN" in said
    with open_store(url) as store:
        rows = store.results(uuid, with_samples=True)
        whole = [row.digest for row in rows if row.metric == "bandwidth"]
        assert sorted(row.digest for row in rows if row.metric == "latency") == sorted(whole)
        assert all(row.samples == make_row().samples for row in rows)
        assert len(whole) - len(acknowledged) in (0, 1)  # one may have been committed and not acknowledged
        assert set(acknowledged) <= set(whole)
        store.reopen_run(replace(store.run(uuid).info, resumed=True, status="running"))
        store.add_results(uuid, [make_row(200_000)], len(whole))
        store.finish_run(uuid, "ok", at(5))
        assert (store.run(uuid).done, store.run(uuid).info.status) == (len(whole) + 1, "ok")


def test_a_server_back_before_the_next_commit_is_not_noticed(mortal: Server, url: str) -> None:
    run = make_run()
    with open_store(url) as store:
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
        mortal.kill()
        with pytest.raises(StoreError, match="the server cannot be reached"):
            store.add_results(run.uuid, [make_row(1)], 1)
        with pytest.raises(StoreError, match="the server cannot be reached"):
            store.runs()
        mortal.start()
        store.add_results(run.uuid, [make_row(1)], 1)
        assert [row.axes["bytes"] for row in store.results(run.uuid)] == [4096, 8192]


def test_a_real_run_ends_with_one_line_and_is_resumed(mortal: Server, url: str, tmp_path: Path) -> None:
    suite = tmp_path / "suites" / "naps"
    suite.mkdir(parents=True)
    (suite / "bench_naps.py").write_text(SUITE)
    environment = os.environ | {"KVBENCH_SUITES": str(suite.parent)}

    def kvbench(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, *words, "--db", url], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    with kvbench("run", "naps", "--profile", "smoke") as run:
        assert run.stderr is not None
        said: list[str] = []
        while sum(line.startswith("stored ") for line in said) < 2:
            said.append(run.stderr.readline())
            assert said[-1], said
        mortal.kill()
        printed, rest = run.communicate(timeout=60)
    mortal.start()
    said += rest.splitlines(keepends=True)
    stored = [line.split()[2] + " " + line.split()[3] for line in said if line.startswith("stored ")]
    assert (run.returncode, printed) == (3, "")
    assert said[-1].startswith("kvbench: error: postgresql://"), said
    assert sum("cannot be reached" in line for line in said) == 1
    assert "Traceback" not in "".join(said)
    with open_store(url) as store:
        (found,) = store.runs()
        there = {f"naps/nap n={row.axes['n']}" for row in store.results(found.info.uuid)}
    assert set(stored) <= there
    assert 2 <= len(stored) <= len(there) < 8
    assert found.info.status == "interrupted"  # its process is gone; the server could not be told
    with kvbench("run", "--resume", found.info.uuid, "--json") as resumed:
        printed, rest = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, rest
    with open_store(url) as store:
        (found,) = store.runs()
        assert (found.info.status, found.info.resumed, found.done) == ("ok", True, 8)
