"""scripts/gpu without a GPU: a stand-in driver and tiny suites, every stage real; what it refuses at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.contract.discover import load_suites
from kvbench.errors import UsageError
from kvbench.store.bundle import CaseLine, EndLine, iter_bundle, read_bundle
from scripts import gpu_preflight, gpu_run, gpu_stage
from scripts.gpu_preflight import NEEDS, Found, Probe
from scripts.gpu_stage import Ended, Log, Stop
from tests.fake_cuda import library

ROOT = Path(__file__).resolve().parents[2]
GOOD = Probe({need.module: Found("1.0", "") for need in NEEDS}, ("Some GPU",), "13.0", "", "/usr/bin/cc", True, None)

HOST = '''
import time
from kvbench import axis, bench

def spin(reps):
    end = time.perf_counter_ns() + 10_000_000 * reps
    while time.perf_counter_ns() < end:
        pass

@bench(version=1, metric="time", unit="s", better="lower", n=axis.integer(smoke="1..32", quick="1..4", full="1..4"))
def fine(case, measure):
    """Goes well."""
    measure(spin, ops=case.n)
'''
GPU = HOST.replace("n=axis.integer(smoke=\"1..32\", quick=\"1..4\", full=\"1..4\")",
                   "bytes=axis.bytes(smoke=[\"8KiB\", \"4KiB\"], quick=[\"4KiB\"], full=[\"4KiB\"])"
                   ).replace("case.n", "1").replace("def fine", "def small")  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite ``tiny`` of one bench of the host and one whose file says that it is of the GPU."""
    folder = tmp_path / "suites" / "tiny"
    folder.mkdir(parents=True)
    (folder / "bench_fine.py").write_text(HOST)
    (folder / "bench_gpu_small.py").write_text(GPU)
    monkeypatch.setenv("KVBENCH_SUITES", str(folder.parent))
    return tmp_path


def script(*words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(ROOT / "scripts" / "gpu"), *words], env={**os.environ, "PYTHON": sys.executable, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it ended without {words!r}")


# -- before anything begins --------------------------------------------------------------------------------------------


def test_without_a_driver_it_says_so_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    process = script("--out", str(tmp_path / "out"), "--driver", "/nonexistent/libcuda.so.1")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "no NVIDIA GPU driver" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "8"], "expected 5s to 24h"),
        (["--budget", "-8m"], "argument --budget"),
        (["--budget", "0s"], "got '0s'"),
        (["--budget", "48h"], "got '48h'"),
        (["--out", "full"], "there is something already"),
        (["--wheels", "none"], "no wheel there"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "results").touch()
    assert gpu_run.main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("8m", 480.0), ("1h", 3600.0), ("1.5m", 90.0)])
def test_budgets(text: str, seconds: float) -> None:
    assert gpu_run.parse_budget(text) == seconds


def test_a_library_without_a_device_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_preflight.ctypes, "CDLL", lambda name: object())
    assert "no device is in" in (gpu_preflight.driver_missing(dev=tmp_path) or "")
    (tmp_path / "nvidia0").touch()
    assert gpu_preflight.driver_missing(dev=tmp_path) is None


def test_what_is_missing_is_named_with_what_it_is_for() -> None:
    lacking = {**GOOD.packages, "numba": Found(None, "not installed"), "triton": Found(None, "not installed")}
    probe = replace(GOOD, packages=lacking, header=False)
    lines = gpu_preflight.report(probe)
    assert any(line.startswith("numba: MISSING, indispensable") and "host kernels" in line for line in lines)
    assert "triton: missing (not installed); it is for Triton kernels" in lines
    assert any(line.startswith("Python.h: missing") for line in lines)
    stopped = gpu_preflight.obstacle(probe)
    assert stopped is not None
    assert "numba" in stopped
    assert "triton" not in stopped  # the GPU is measured without it
    assert gpu_preflight.obstacle(GOOD) is None
    assert "no usable" in (gpu_preflight.obstacle(replace(GOOD, devices=(), driver_problem="cuInit: 999")) or "")


def test_a_package_that_does_not_import_stops_it_before_anything_long(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tiny / "broken"
    broken.mkdir()
    (broken / "rich.py").write_text("raise ImportError('built for another Python')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.setattr(gpu_run, "run", lambda *a, **k: pytest.fail("it began"))
    assert gpu_run.main(["tiny", "--out", str(tiny / "out"), "--driver", str(library())]) == 2
    assert "lacks rich for the tables (ImportError: built for another Python)" in capfd.readouterr().err
    assert not (tiny / "out").exists()


def test_wheels_are_unpacked_without_network(tmp_path: Path, log: Log) -> None:
    wheel = tmp_path / "kvthing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("kvthing.py", "ANSWER = 42\n")
        archive.writestr("kvthing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: kvthing\nVersion: 1.0\n")
        archive.writestr(
            "kvthing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("kvthing-1.0.dist-info/RECORD", "")
    site = tmp_path / "site"
    gpu_run.install(tmp_path, site, log, 60.0)
    assert (site / "kvthing.py").is_file()
    assert gpu_run.environment(site)["PYTHONPATH"].split(os.pathsep)[:2] == [str(site), str(ROOT)]
    wheel.write_bytes(b"no archive")
    with pytest.raises(UsageError, match="could not be installed"):
        gpu_run.install(tmp_path, tmp_path / "other", log, 60.0)


# -- the whole of it ---------------------------------------------------------------------------------------------------


def test_the_whole_flow_needs_no_database_and_no_entry_point(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = tiny / "absent"
    for name in ("sqlalchemy", "alembic", "psycopg"):
        (absent / name).mkdir(parents=True)
        (absent / name / "__init__.py").write_text("raise ImportError('not on this box')")
    monkeypatch.setenv("PYTHONPATH", str(absent))
    monkeypatch.setenv("KVBENCH_DB", str(tiny / "not here" / "no.db"))
    tool = tiny / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho \"$@\"\necho '========= ERROR SUMMARY: 0 errors'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tiny}{os.pathsep}{os.environ['PATH']}")
    commands: list[list[str]] = []
    real = gpu_stage.run

    def run(words: list[str], **options: object) -> Ended:
        commands.append([word for word in words if word != sys.executable])
        if "quick" in words:  # ten seconds of canaries alone
            return Ended("budget", 143, 1.0, ())
        return real(words, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_run, "run", run)
    out = tiny / "out"
    assert gpu_run.main(["tiny", "--budget", "10m", "--out", str(out), "--driver", str(library())]) == 0
    captured = capfd.readouterr()
    assert sorted(p.name for p in out.iterdir()) == ["kvbench.jsonl", "log.txt"]
    run_found = read_bundle(out / "kvbench.jsonl").runs
    assert len(run_found) == 1
    assert run_found[0].info.status == "ok"
    assert sum(not row.is_canary for row in run_found[0].results) == 8
    assert "cases   8 of 8 with a value" in captured.out
    assert "on the GPU 2 of 2" in captured.out
    assert f"log     {out / 'log.txt'}" in captured.out
    profiles = [next((w for w in ("smoke", "quick") if w in words), "") for words in commands]
    assert profiles == ["smoke", "smoke", "quick", "quick"]
    assert commands[1][-2:] == ["-a", "bytes=4KiB"]
    assert not any("--bundle" in words for words in commands[1:2])  # times under a sanitizer are no measurements
    assert all("--no-db" in words for words in commands)
    assert commands[2][3:5] == ["run", "tiny/small"] or "tiny/small" in commands[2]
    log = (out / "log.txt").read_text()
    assert "1 of 1 GPU benches without an error" in log
    assert "quick-gpu: cut by the budget" in log


def stored(path: Path) -> int:
    return sum(isinstance(line, CaseLine) and not line.results[0].is_canary for line in iter_bundle(path))


def test_a_signal_keeps_what_there_is_and_is_the_exit_code(tiny: Path) -> None:
    out = tiny / "out"
    process = script("tiny", "--budget", "5m", "--out", str(out), "--driver", str(library()))
    until(process, "stored 2/")
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert str(out / "kvbench.jsonl") in told
    assert stored(out / "kvbench.jsonl") >= 2
    assert read_bundle(out / "kvbench.jsonl").runs[0].info.status == "interrupted"


def test_kill_9_leaves_the_cases_before_it_and_no_run_behind(tiny: Path) -> None:
    out = tiny / "out"
    process = script("tiny", "--budget", "5m", "--out", str(out), "--driver", str(library()))
    until(process, "stored 2/")
    process.kill()
    process.communicate(timeout=60)
    part = out / "parts" / "smoke.jsonl"
    assert stored(part) >= 2
    limit = time.monotonic() + 30
    while not any(isinstance(line, EndLine) for line in iter_bundle(part)):  # its kvbench was told and ended by itself
        assert time.monotonic() < limit
        time.sleep(0.1)


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log.txt")
    yield made
    made.close()


def in_stage(code: str, log: Log, seconds: float = 30.0, stop: Stop | None = None, grace: float = 0.3) -> Ended:
    return gpu_stage.run(
        [sys.executable, "-c", code], env=os.environ, cwd=ROOT, seconds=seconds, log=log, stop=stop or Stop(),
        grace=grace,
    )  # fmt: skip


def test_a_command_ends_by_itself_and_its_words_are_kept(log: Log) -> None:
    ended = in_stage("import sys; print('to out'); print('to err', file=sys.stderr); sys.exit(3)", log)
    assert (ended.how, ended.code) == ("ended", 3)
    assert {"to out", "to err"} <= set(log.path.read_text().splitlines())


def test_one_that_ignores_its_end_is_killed_with_its_children(log: Log, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(pid)!r}, 'w').write(str(child.pid))\ntime.sleep(60)"
    )
    ended = in_stage(code, log, seconds=0.7)
    assert (ended.how, ended.code) == ("budget", -signal.SIGKILL)
    limit = time.monotonic() + 10
    while Path("/proc", pid.read_text()).exists() and "Z" not in Path("/proc", pid.read_text(), "stat").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_one_that_never_stops_printing_is_ended_all_the_same(log: Log) -> None:
    ended = in_stage("while True: print('x' * 100, flush=True)", log, seconds=0.5)
    assert ended.how == "budget"
    assert ended.seconds < 20


def test_a_signal_is_passed_on(log: Log) -> None:
    stop = Stop()
    code = (
        f"import os, signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(9))\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(60)"
    )
    with stop.installed():
        ended = in_stage(code, log, stop=stop, grace=20.0)
    assert (ended.how, ended.code, stop.signal) == ("signal", 9, signal.SIGINT)


def test_the_log_of_a_command_is_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stage, "LOG_BYTES", 1000)
    ended = in_stage("import sys\nfor _ in range(400): print('x' * 1000)\nprint('the end')", log)
    assert ended.tail[-1] == "the end"
    assert log.path.stat().st_size < 200_000
    assert "the rest is left out" in log.path.read_text()


def test_a_missing_program_is_an_end_too(log: Log) -> None:
    ended = gpu_stage.run(["/nonexistent/tool"], env={}, cwd=ROOT, seconds=1, log=log, stop=Stop())
    assert (ended.how, ended.code) == ("ended", 127)


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tiny: Path, log: Log) -> Callable[..., gpu_run.Session]:
    (tiny / "out").mkdir()

    def make(probe: Probe = GOOD) -> gpu_run.Session:
        options = gpu_run.Options(600.0, tiny / "out", None, ("tiny",), gpu_preflight.DRIVER)
        return gpu_run.Session(options, load_suites(), log, Stop(), {}, probe, time.monotonic() + 600.0)

    return make


def test_errors_under_the_sanitizer_and_failed_tests_are_problems(
    session: Callable[..., gpu_run.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = replace(GOOD, sanitizer="/usr/bin/compute-sanitizer")
    answers = {
        "compute-sanitizer": Ended("ended", 86, 1.0, ("========= ERROR SUMMARY: 3 errors",)),
        "pytest": Ended("ended", 1, 1.0, ("1 failed, 2 passed in 0.1s",)),
    }
    monkeypatch.setattr(
        gpu_run, "run", lambda words, **_: next(a for name, a in answers.items() if any(name in w for w in words))
    )
    found = session(probe)
    found.sanitize([bench for bench in found.suites.select(["tiny"]) if gpu_run.drives_gpu(bench)])
    assert found.problems == ["compute-sanitizer found errors in tiny/small; the log has them"]
    monkeypatch.setattr(gpu_run, "_MARKED_GPU", gpu_run.re.compile("def test_errors_under_the_sanitizer"))
    found.tests()
    assert found.problems[1] == "tests marked gpu: 1 failed, 2 passed in 0.1s"


def test_a_sanitizer_that_says_nothing_is_not_clean(
    session: Callable[..., gpu_run.Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "run", lambda *_, **__: Ended("ended", 0, 1.0, ("no device",)))
    found = session(replace(GOOD, sanitizer="/usr/bin/compute-sanitizer"))
    found.sanitize([bench for bench in found.suites.select(["tiny"]) if gpu_run.drives_gpu(bench)])
    assert found.notes[-1] == "compute-sanitizer: 0 of 1 GPU benches without an error"


def test_nothing_measured_is_exit_3(
    session: Callable[..., gpu_run.Session], capsys: pytest.CaptureFixture[str]
) -> None:
    found = session()
    assert found.finish() == 3
    assert "no run was written" in capsys.readouterr().err


def test_gpu_cases_are_told_by_their_tiers_or_their_bench(tiny: Path) -> None:
    from tests.store.factories import make_row

    row = make_row()
    benches = frozenset({(row.suite, row.bench)})
    assert gpu_run.needs_gpu(row.with_(axes={"n": 1}), benches)
    assert not gpu_run.needs_gpu(row.with_(axes={"n": 1}), frozenset())
    assert gpu_run.needs_gpu(row.with_(axes={"pair": "hbm:pinned"}), frozenset())
    assert not gpu_run.needs_gpu(row.with_(axes={"pair": "dram:file"}), benches)
    assert {b.name for b in load_suites().select(["tiny"]) if gpu_run.drives_gpu(b)} == {"small"}
