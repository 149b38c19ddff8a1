"""Locks of machine resources, held against other processes and freed by the kernel."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbench import locks
from kvbench.errors import EXIT_NO_DATA, KvbenchError
from kvbench.locks import Busy, acquire, holder, machine_resources
from kvbench.machine import nvml_devices
from tests.machine.fake_nvml import FakeNvml

CUDA = "CUDA_VISIBLE_DEVICES"

ROOT = Path(__file__).parents[2]
HOLD = """
import signal, sys
from pathlib import Path
from kvbench.locks import acquire
with acquire(sys.argv[2:], directory=Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


@contextmanager
def held_elsewhere(folder: Path, *names: str) -> Iterator[subprocess.Popen[str]]:
    """Hold locks in another process, which is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(folder), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_fails_at_once_when_it_may_not_wait(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, "node0") as other:
        said = rf"node0 is being measured by pid {other.pid} .*--no-wait"
        with pytest.raises(Busy, match=said) as caught, acquire(["node0"], wait=False, directory=tmp_path):
            pass
        assert caught.value.exit_code == EXIT_NO_DATA
        found = holder("node0", directory=tmp_path)
        assert found is not None
        assert (found.pid, found.uid) == (other.pid, os.getuid())
        with acquire(["node1"], wait=False, directory=tmp_path):  # another resource is free
            pass


def test_a_second_run_waits_with_one_line_and_a_killed_holder_frees_it(tmp_path: Path) -> None:
    lines: list[str] = []
    with held_elsewhere(tmp_path, "node0", "node1") as other:

        def told(line: str) -> None:
            lines.append(line)
            other.kill()

        with acquire(["node1", "node0"], notify=told, directory=tmp_path):
            mine = holder("node0", directory=tmp_path)
            assert mine is not None
            assert mine.pid == os.getpid()
    assert len(lines) == 1
    assert lines[0].startswith(f"waiting for node0: measured by pid {other.pid} (uid {os.getuid()}, since 20")
    assert holder("node0", directory=tmp_path) is None


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with held_elsewhere(tmp_path, "node0"):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted), acquire(["node0"], directory=tmp_path):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_same_process_cannot_wait_for_itself(tmp_path: Path) -> None:
    itself = pytest.raises(Busy, match="this process itself")
    with acquire(["node0"], directory=tmp_path), itself, acquire(["node0"], directory=tmp_path):
        pass
    with acquire(["node0"], wait=False, directory=tmp_path):
        pass


def test_opposite_orders_do_not_block_each_other(tmp_path: Path) -> None:
    done = []

    def take(names: tuple[str, ...]) -> None:
        for _ in range(50):
            try:
                with acquire(names, wait=False, directory=tmp_path):
                    done.append(names)
            except Busy:
                continue

    threads = [threading.Thread(target=take, args=(names,)) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert done


def test_every_user_can_lock_and_the_umask_does_not_matter(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with acquire(["gpu-1f3a"], directory=tmp_path):
            pass
    finally:
        os.umask(before)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    if os.geteuid() == 0:  # a file of another user in a sticky folder
        tmp_path.chmod(0o1777)
        os.chown(path, 12345, 12345)
        with acquire(["gpu-1f3a"], wait=False, directory=tmp_path):
            pass


def test_links_and_devices_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "kvbench-node0.lock").symlink_to(victim)
    os.mkfifo(tmp_path / "kvbench-node1.lock")
    (tmp_path / "kvbench-node2.lock").mkdir()
    for name in ("node0", "node1", "node2"):
        refused = pytest.raises(KvbenchError, match="the lock file cannot be used")
        with refused as caught, acquire([name], directory=tmp_path):
            pass
        assert caught.value.exit_code == EXIT_NO_DATA
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"pid": 1}', "[" * 3000, '{"pid": "x", "uid": 0, "since": ""}', "\x00"]
)
def test_what_others_wrote_into_the_file_is_no_danger(tmp_path: Path, content: str) -> None:
    with held_elsewhere(tmp_path, "node0"):
        (tmp_path / "kvbench-node0.lock").write_text(content)
        assert holder("node0", directory=tmp_path) is None
        with pytest.raises(Busy, match="by another process"), acquire(["node0"], wait=False, directory=tmp_path):
            pass
        (tmp_path / "kvbench-node0.lock").write_text('{"pid": 1, "uid": 0, "since": "\\u001b[31m\\n"}')
        with pytest.raises(Busy) as caught, acquire(["node0"], wait=False, directory=tmp_path):
            pass
        assert "\x1b" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_names(tmp_path: Path) -> None:
    for name in ("", "../x", "a/b", "A", "x" * 65):
        with pytest.raises(ValueError, match="not a lock name"), acquire([name], directory=tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_takes_every_node() -> None:
    assert all(re.fullmatch(r"node\d+|gpu-\w+", name) for name in machine_resources())
    nodes = machine_resources([])
    assert nodes
    assert all(name.startswith("node") for name in nodes)
    # two MIG instances of a board share its link to the host, so they share its lock
    assert machine_resources(["gpu-1f3a", "gpu-1f3a", "gpu-2b"]) == (*nodes, "gpu-1f3a", "gpu-2b")


@pytest.mark.parametrize(("machine", "visible", "boards"), [("dgx", None, 8), ("mig", None, 7), ("dgx", "3,1", 2)])
def test_the_whole_machine_is_every_visible_board_once(
    monkeypatch: pytest.MonkeyPatch, machine: str, visible: str | None, boards: int
) -> None:
    devices = nvml_devices.read_devices(FakeNvml(machine))
    monkeypatch.setattr(nvml_devices, "read_devices", lambda: devices)
    monkeypatch.setattr(locks, "_visible_gpus", locks._visible_gpus.__wrapped__)  # not what another test remembered
    monkeypatch.delenv(CUDA, raising=False)
    if visible is not None:
        monkeypatch.setenv(CUDA, visible)
    taken = [name for name in machine_resources() if name.startswith("gpu-")]
    assert len(taken) == len(set(taken)) == boards
