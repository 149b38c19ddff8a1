"""Gates: what they read from the kernel, what counts as disturbed, and how they say that they cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.timing.gate import CpuGate, DelayGate, open_gate


def spin(seconds: float) -> int:
    began = time.perf_counter_ns()
    while (wall := time.perf_counter_ns() - began) < seconds * 1e9:
        pass
    return wall


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """This thread and an endless loop of another process on one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); print('ready', flush=True)\nwhile True: pass"
    hog = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"ready\n"
        os.sched_setaffinity(0, {core})
        yield
    finally:
        os.sched_setaffinity(0, before)
        hog.kill()
        hog.communicate()


@pytest.mark.parametrize("kind", ["delay", "cpu"])
def test_crowded_core_is_disturbed(crowded_core: None, kind: str) -> None:
    gate = open_gate(kind)  # type: ignore[arg-type]
    assert gate is not None
    if gate.reason:
        pytest.skip(gate.reason)
    gate.rebase()
    assert gate.disturbed(spin(0.06))
    gate.close()


@pytest.fixture
def fake_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send the gate's opens of /proc/self/task/<tid>/schedstat to files of tmp_path named <tid>."""
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags: real(tmp_path / str(path).split("/")[-2], flags))
    (tmp_path / str(threading.get_native_id())).write_bytes(b"900 0 1\n")
    return tmp_path


def test_worst_thread_decides_by_share_of_the_wall(fake_proc: Path) -> None:
    for tid in ("7", "8"):
        (fake_proc / tid).write_bytes(b"100 5000 3\n")
    gate = DelayGate((7, 8, 7))
    assert gate.reason == ""
    (fake_proc / "8").write_bytes(b"200 9999 4\n")  # 4999 ns of 100 us: 4.999 %
    assert not gate.disturbed(100_000)
    (fake_proc / "7").write_bytes(b"200 10001 4\n")  # 5001 ns since its own last reading
    assert gate.disturbed(100_000)
    assert not gate.disturbed(100_000)
    (fake_proc / "8").write_bytes(b"200 99999 4\n")
    gate.rebase()
    assert not gate.disturbed(100_000)
    gate.close()


def test_accounting_switched_off_is_not_an_undisturbed_machine(fake_proc: Path) -> None:
    (fake_proc / str(threading.get_native_id())).write_bytes(b"0 0 0\n")
    assert "counts nothing" in DelayGate().reason


@pytest.mark.parametrize("content", [b"", b"12\n", b"a b c\n"])
def test_unreadable_schedstat_turns_the_gate_off(fake_proc: Path, content: bytes) -> None:
    (fake_proc / "7").write_bytes(content)
    gate = DelayGate((7,))
    assert "cannot be read" in gate.reason
    assert not gate.disturbed(1)


def test_missing_schedstat_turns_the_gate_off() -> None:
    gate = DelayGate((2**22 + 1,))  # above the largest thread id
    assert "cannot be read" in gate.reason
    assert not gate.disturbed(1)


def test_thread_that_ends_turns_the_gate_off() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    assert thread.native_id is not None
    gate, cpu = DelayGate((thread.native_id,)), CpuGate((thread.native_id,))
    if gate.reason:
        pytest.skip(gate.reason)
    go.set()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0.001)
    assert not gate.disturbed(1)
    assert "cannot be read" in gate.reason
    assert not cpu.disturbed(1)
    assert "cannot be read" in cpu.reason


def test_cpu_gate_sees_a_thread_that_slept() -> None:
    gate = CpuGate()
    time.sleep(0.02)
    assert gate.disturbed(20_000_000)


def test_gate_kinds() -> None:
    assert open_gate(None) is None
    with pytest.raises(ValueError, match="'delay', 'cpu' or None"):
        open_gate("wall")  # type: ignore[arg-type]


def test_close_releases_every_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    gates = [DelayGate() for _ in range(5)]
    for gate in gates:
        gate.close()
    assert len(os.listdir("/proc/self/fd")) == before
