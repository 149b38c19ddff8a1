"""A suite of tiny benches that do what real ones do when things go well and when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SUITE = '''
import os, signal, time
from kvbench import axis, bench
from kvbench.errors import Unavailable, VerifyError

N = axis.integer(smoke="1..4", quick="1..4", full="1..4")

def spin(reps):
    end = time.perf_counter_ns() + 200_000 * reps
    while time.perf_counter_ns() < end:
        pass

@bench(version=1, metric="time", unit="s", better="lower", n=N)
def fine(case, measure):
    """Goes well."""
    measure(spin, ops=case.n)

@bench(version=1, metric="time", unit="s", better="lower", how=axis.choice(
    "exit", "segv", "raise", "verify", "skip", "unavailable", "memory", "nothing", "hang", "print", "children",
    "instant", "zero", "twice", "forks", "escapes"), limit=5.0)
def odd(case, measure):
    """Does not go well."""
    if case.how == "exit":
        os._exit(7)
    if case.how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if case.how == "raise":
        raise RuntimeError("[bold]deliberate[/bold] \\x1b[31m")
    if case.how == "verify":
        def bad():
            raise VerifyError("byte 3 differs")
        measure(spin, verify=bad)
    if case.how == "skip":
        measure.skip("no such tier here")
    if case.how == "unavailable":
        raise Unavailable("asked for 9 TiB", mend="buy memory")
    if case.how == "memory":
        raise MemoryError
    if case.how == "hang":
        time.sleep(60)
    if case.how == "children":
        os.system("sleep 60 & echo $! >> $KVB_PIDS")
        os._exit(1)
    if case.how == "instant":
        measure(lambda reps: None)
    if case.how == "zero":
        measure(lambda reps: 0.0)
    if case.how == "twice":
        measure(spin)
        measure(spin)
    if case.how == "forks":
        measure(spin)
        if os.fork() == 0:
            return
        os.wait()
    if case.how == "escapes":
        import subprocess
        measure(spin)
        left = subprocess.Popen(["sleep", "60"], start_new_session=True)
        with open(os.environ["KVB_PIDS"], "a") as file:
            print(left.pid, file=file)
    if case.how == "print":
        print('{"kind": "rows"}', flush=True)
        measure(spin)

@bench(version=1, metric="time", unit="s", better="lower", n=N)
def slow(case, measure):
    """Takes a second a case."""
    time.sleep(1)
    measure(spin)
'''

Kvbench = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    """A folder with the suite ``toy``, for KVBENCH_SUITES."""
    folder = tmp_path / "suites" / "toy"
    folder.mkdir(parents=True)
    (folder / "bench_toy.py").write_text(SUITE)
    return folder.parent


@pytest.fixture
def environment(toys: Path, tmp_path: Path) -> dict[str, str]:
    """The environment commands run in: own database, the toy suite."""
    return {**os.environ, "KVBENCH_SUITES": str(toys), "KVBENCH_DB": str(tmp_path / "toy.db")}


@pytest.fixture
def kvbench(environment: dict[str, str], tmp_path: Path) -> Kvbench:
    """Run the command line in a process of its own, as a user does."""

    def run(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvbench.cli.main", *arguments], env={**environment, **changes}, cwd=tmp_path,
            text=True, capture_output=True, timeout=120, check=False,
        )  # fmt: skip

    return run
