""".ci/run with fakes for everything it calls: its last line and exit code, the server it starts and always stops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .fake import ROOT, TOOLS, Checkout, make_checkout

MORE_TOOLS = ("timeout", "tee", "mktemp", "ls", "sort", "wc")
PG_CTL = """#!/bin/sh
echo "pg_ctl $*" >>"$FAKE_CALLS"
case "$*" in
    *" stop"*) rm "$2/postmaster.pid" ;;
    *" start"*) [ -z "$FAKE_PG_FAILS" ] || exit 1; touch "$2/postmaster.pid" ;;
esac
"""
APT = """#!/bin/sh
echo "apt-get $*" >>"$FAKE_CALLS"
case "$*" in
    update) touch "$FAKE_CALLS.updated" ;;
    *install*) [ -e "$FAKE_CALLS.updated" ] && cp "$FAKE_GCC" "$(dirname "$0")/gcc" ;;
esac
"""
SCRIPT = """#!/bin/sh
echo "NAME $* $KVBENCH_REQUIRE $KVBENCH_TEST_POSTGRES" >>"$FAKE_CALLS"
printf '%b\\n' "$FAKE_NAME_OUTPUT"
[ -z "$FAKE_NAME_SLEEP" ] || sleep "$FAKE_NAME_SLEEP"
exit "${FAKE_NAME_CODE:-0}"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = make_checkout(tmp_path)
    (checkout.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", checkout.root / ".ci/run")
    checkout.add_python()
    for tool in MORE_TOOLS:
        found = shutil.which(tool)
        assert found, tool
        os.symlink(found, checkout.bin / tool)
    write(checkout.bin / "gcc", "#!/bin/sh\n")
    write(checkout.bin / "id", '#!/bin/sh\necho "${FAKE_ID:-1000}"\n')
    write(checkout.bin / "chown", "#!/bin/sh\n")
    write(checkout.bin / "runuser", '#!/bin/sh\necho "as $2" >>"$FAKE_CALLS"\nshift 3\nexec "$@"\n')
    pg = tmp_path / "pg"
    pg.mkdir()
    write(pg / "pg_ctl", PG_CTL)
    write(pg / "initdb", "#!/bin/sh\n")
    write(pg / "postgres", "#!/bin/sh\necho 'postgres (PostgreSQL) 15.1'\n")
    for name in ("test", "bench"):
        write(checkout.root / "scripts" / name, SCRIPT.replace("NAME", name.upper()))
    checkout.env |= {"PG_BIN": str(pg), "FAKE_TEST_OUTPUT": "7 passed in 0.01s", "TMPDIR": str(tmp_path)}
    return checkout


def ci(checkout: Checkout, **env: str) -> subprocess.CompletedProcess[str]:
    process = start(checkout, **env)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(checkout: Checkout, **env: str) -> subprocess.Popen[str]:
    assert "timeout" not in TOOLS
    return subprocess.Popen(
        ["bash", str(checkout.root / ".ci/run")],
        cwd="/",
        env={"PATH": str(checkout.bin), **checkout.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_all_green(checkout: Checkout, tmp_path: Path) -> None:
    done = ci(checkout)
    assert (done.returncode, last(done)) == (0, "7 passed, 0 failed"), done.stdout + done.stderr
    tests, bench = (next(c for c in checkout.calls if c.startswith(name)) for name in ("TEST", "BENCH"))
    assert "gcc,postgres" in tests
    assert "postgresql+psycopg://kvbench@127.0.0.1:" in tests
    assert "run ladder --profile smoke --db" in bench
    assert checkout.calls[-1].endswith(" stop")
    assert not list(tmp_path.glob("tmp.*"))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"FAKE_TEST_OUTPUT": "2 failed, 5 passed, 1 skipped in 3.10s", "FAKE_TEST_CODE": "1"}, "5 passed, 2 failed"),
        ({"FAKE_TEST_OUTPUT": "5 passed, 1 error in 63.1s (0:01:03)", "FAKE_TEST_CODE": "1"}, "5 passed, 1 failed"),
        ({"FAKE_TEST_OUTPUT": "== mypy: FAILED (exit 1)", "FAKE_TEST_CODE": "1"}, "0 passed, 1 failed"),
        ({"FAKE_TEST_OUTPUT": "no summary at all"}, "0 passed, 1 failed"),
        ({"FAKE_TEST_CODE": "3"}, "7 passed, 1 failed"),
        ({"FAKE_BENCH_CODE": "3"}, "7 passed, 1 failed"),
        (
            {"FAKE_TEST_OUTPUT": "1 failed, 5 passed in 3.10s", "FAKE_TEST_CODE": "1", "FAKE_BENCH_CODE": "3"},
            "5 passed, 2 failed",
        ),
        ({"FAKE_PG_FAILS": "1"}, "0 passed, 1 failed"),
    ],
)
def test_any_failure_is_in_the_last_line_and_the_exit_code(
    checkout: Checkout, env: dict[str, str], expected: str
) -> None:
    done = ci(checkout, **env)
    assert (done.returncode, last(done)) == (1, expected), done.stdout + done.stderr


def test_root_runs_the_server_as_its_own_user(checkout: Checkout) -> None:
    assert ci(checkout, FAKE_ID="0").returncode == 0
    assert checkout.calls.count("as postgres") == 3


def test_root_installs_what_is_missing_and_updates_only_when_needed(checkout: Checkout, tmp_path: Path) -> None:
    gcc = (checkout.bin / "gcc").rename(tmp_path / "gcc")
    write(checkout.bin / "apt-get", APT)
    done = ci(checkout, FAKE_ID="0", FAKE_GCC=str(gcc))
    assert done.returncode == 0, done.stdout + done.stderr
    apt = [c for c in checkout.calls if c.startswith("apt-get") and not c.endswith(" chromium")]
    assert [c.split()[1] for c in apt] == ["install", "update", "install"]
    assert apt[0].endswith(" gcc libc6-dev")


def test_a_browser_that_cannot_be_installed_is_a_note_and_no_failure(checkout: Checkout) -> None:
    write(checkout.bin / "apt-get", "#!/bin/sh\nexit 1\n")
    done = ci(checkout, FAKE_ID="0")
    assert (done.returncode, last(done)) == (0, "7 passed, 0 failed")
    assert "the browser tests will be skipped" in done.stdout


def test_without_root_missing_tools_are_named(checkout: Checkout) -> None:
    (checkout.bin / "gcc").unlink()
    done = ci(checkout)
    assert (done.returncode, last(done)) == (1, "0 passed, 1 failed")
    assert "missing: gcc libc6-dev; run as root on Debian" in done.stdout


def test_terminated_it_stops_the_server_and_its_children(checkout: Checkout, tmp_path: Path) -> None:
    process = start(checkout, FAKE_TEST_SLEEP="50")
    deadline = time.monotonic() + 20
    while not any(c.startswith("TEST") for c in checkout.calls) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)  # ends only when no child holds the pipes any more
    assert process.returncode == 143
    assert checkout.calls[-1].endswith(" stop")
    assert not list(tmp_path.glob("tmp.*"))
