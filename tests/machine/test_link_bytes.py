"""Counting link bytes: each source against a board whose counters are known, probes that refuse, bounds as the rest."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvbench.errors import UsageError
from kvbench.machine import link_profiler
from kvbench.machine.link_bytes import GPM, MIB, LinkCounters, link_bytes

COPY, PASS = 64 << 20, 10 << 20
SHORT = 0.01


class Board:
    """A pynvml whose board has moved ``sent`` and ``received`` bytes; ``overhead`` is what it counts for each."""

    NVMLError = pynvml.NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(
        self, *, fields: bool = True, gpm: tuple[int, ...] = (20, 21), overhead: float = 1.0, c2c: int = 0,
        refuse: str = "",
    ) -> None:  # fmt: skip
        self.sent = self.received = 0.0
        self.has_fields, self.gpm, self.overhead, self.c2c, self.refuse = fields, gpm, overhead, c2c, refuse
        self.samples = self.opened = 0

    def move(self, received: float = 0.0, sent: float = 0.0) -> None:
        self.received, self.sent = self.received + received * self.overhead, self.sent + sent * self.overhead

    def work(self, received: float, sent: float = 0.0) -> Callable[[], None]:
        def once() -> None:
            self.move(received, sent)
            time.sleep(0.001)

        return once

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 7

    def nvmlDeviceGetFieldValues(self, handle: int, wanted: list[int]) -> list[Any]:
        values = {170: self.c2c} | ({197: int(self.sent), 198: int(self.received)} if self.has_fields else {})
        return [
            SimpleNamespace(
                nvmlReturn=0 if n in values else 3, valueType=3, value=SimpleNamespace(ullVal=values.get(n))
            )
            for n in wanted
        ]

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        return SimpleNamespace(isSupportedDevice=int(bool(self.gpm)))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace()

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        self.samples -= 1
        return 0

    def nvmlGpmSampleGet(self, handle: int, sample: Any) -> Any:
        if self.refuse == "sample":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        sample.at, sample.moved = time.perf_counter(), (self.sent, self.received)
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(4)])

    def nvmlGpmMetricsGet(self, asked: Any) -> Any:
        seconds = asked.sample2.at - asked.sample1.at
        for place in range(asked.numMetrics):
            metric = asked.metrics[place]
            metric.nvmlReturn = 0 if metric.metricId in self.gpm else 3
            moved = asked.sample2.moved[metric.metricId % 2 == self._received] - 0.0
            before = asked.sample1.moved[metric.metricId % 2 == self._received]
            metric.value = (moved - before) / seconds / MIB
        return asked

    _received = 1  # 21, 101 and 103 are what the GPU received


def counted(board: Board, received: float = PASS, **how: Any) -> Any:
    with LinkCounters(0, board) as counters:
        found = link_bytes(
            counters, board.work(received), (PASS // 2, 4 * PASS), board.work(COPY), COPY, least_s=SHORT, **how
        )
    assert (board.opened, board.samples) == (0, 0)
    return found


def test_byte_counts_are_exact_and_come_first() -> None:
    found = counted(Board())
    assert (found.source, found.value, found.probe_ratio, found.reason) == ("pcie byte counts", PASS, 1.0, "")
    assert found.passes >= 2
    assert found.window_s is not None
    assert found.window_s >= SHORT


@pytest.mark.parametrize(("board", "source"), [
    (Board(fields=False), "gpm pcie"), (Board(c2c=1, gpm=(20, 21, 100, 101, 102, 103)), "gpm c2c data"),
    (Board(c2c=1, gpm=(100, 101)), "gpm c2c"),
])  # fmt: skip
def test_averages_over_the_window_times_its_length(board: Board, source: str) -> None:
    found = counted(board)
    assert found.source == source
    assert found.value == pytest.approx(PASS, rel=0.2)  # the window's ends are taken by this process
    if source == "gpm c2c":
        assert "gpm c2c data: the board has no GPM metric 102" in found.reason


def test_what_a_source_counts_beside_the_payload_cancels() -> None:
    found = counted(Board(overhead=1.08))
    assert found.value == pytest.approx(PASS, rel=1e-6)
    assert found.probe_ratio == pytest.approx(1.08)


def test_a_source_that_tells_a_known_copy_wrong_is_not_used() -> None:
    for overhead in (0.5, 1.3, 0.0):
        found = counted(Board(overhead=overhead, gpm=()))
        assert (found.value, found.source, found.low, found.high) == (None, "bounds", PASS // 2, 4 * PASS)
        assert f"{overhead:.3g} x the bytes of a known copy" in found.reason


def test_evicted_bytes_are_those_the_gpu_sent() -> None:
    board = Board()
    with LinkCounters(0, board) as counters:
        found = link_bytes(counters, board.work(5, PASS), (0, 2 * PASS), board.work(3, COPY), COPY, "evict", SHORT)
    assert found.value == PASS


def test_without_a_counter_there_are_bounds_and_a_reason() -> None:
    none = counted(Board(fields=False, gpm=()))
    assert (none.value, none.source) == (None, "bounds")
    assert "counts no bytes" in none.reason
    refused = counted(Board(fields=False, refuse="sample"))
    assert "nvmlGpmSampleGet" in refused.reason
    with LinkCounters(3, Board()) as counters:
        assert counters.sources() == ()
        assert counters.reason
    with LinkCounters(None, Board()) as unknown:
        assert unknown.sources() == ()
        assert "not known" in unknown.reason
    with LinkCounters(0, None, lambda: False) as absent:
        found = link_bytes(absent, lambda: None, (1, 2), lambda: None, 1)
    assert "no NVIDIA driver" in found.reason


def test_counts_that_go_backwards_are_no_number() -> None:
    board = Board(gpm=())
    with LinkCounters(0, board) as counters:
        window = counters.window("pcie byte counts", board.work(-100.0), SHORT)
        assert (window.moved, window.reason) == (None, "the byte counts went backwards")
        with pytest.raises(UsageError, match="unknown source"):
            counters.window("crystal ball", lambda: None)
    with LinkCounters(0, board) as counters, pytest.raises(UsageError, match="unique <= demand"):
        link_bytes(counters, lambda: None, (2, 1), lambda: None, 1)
    assert set(GPM) == {"gpm c2c data", "gpm c2c", "gpm pcie"}


def test_the_profiler_is_asked_last() -> None:
    found = counted(Board(fields=False, gpm=()), profiled=lambda: (123.0, ""))
    assert (found.value, found.source) == (123.0, "profiler")
    found = counted(Board(fields=False, gpm=()), profiled=lambda: (None, "ERR_NVGPUCTRPERM"))
    assert found.reason.endswith("profiler: ERR_NVGPUCTRPERM")


# -- the profiler ------------------------------------------------------------------------------------------------------

PCIE, SECTORS = link_profiler.METRICS
HEAD = f'==PROF== Connected\n"ID","Kernel Name","{PCIE}","{SECTORS}"\n'


@pytest.mark.parametrize(("text", "value", "why"), [
    (HEAD + '"","","byte","sector"\n"0","gemm","1,048,576","9"\n', 1048576.0, ""),
    (HEAD + '"","","Mbyte","sector"\n"0","gemm","2.5","9"\n', 2.5e6, ""),
    (HEAD + '"","","","sector"\n"0","gemm","n/a","100"\n', 3200.0, ""),
    (HEAD + '"","","parsec","sector"\n"0","gemm","7","100"\n', 3200.0, ""),
    (HEAD + '"","","",""\n"0","gemm","n/a",""\n', None, "none of its counters"),
    (HEAD, None, "no launch"),
    ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", None, "ERR_NVGPUCTRPERM"),
    ("", None, "named no metric"),
])  # fmt: skip
def test_its_table_is_read(text: str, value: float | None, why: str) -> None:
    found, said = link_profiler.read(text)
    assert found == value
    assert why in said


def test_it_runs_around_the_child(tmp_path: Path) -> None:
    fake = tmp_path / "ncu"
    fake.write_text(f'#!/bin/sh\ncat <<"END"\n{HEAD}"","","byte","sector"\n"0","gemm","4096","0"\nEND\n')
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    assert link_profiler.profile(["true"], "gemm", program=str(fake)) == (4096.0, "")
    assert link_profiler.profile(["true"], "gemm", program="no-such-profiler")[1] == "no-such-profiler is not installed"
    fake.write_text("#!/bin/sh\necho 'cannot attach' >&2\nexit 9\n")
    assert link_profiler.profile(["true"], "gemm", program=str(fake)) == (None, "cannot attach")
    fake.write_text("#!/bin/sh\nexec sleep 5\n")
    assert "no answer within 0.1 s" in link_profiler.profile(["true"], "gemm", program=str(fake), timeout_s=0.1)[1]
    words = link_profiler.command(["python", "-m", "child"], "gemm")
    assert words[-3:] == ["python", "-m", "child"]
    assert "regex:gemm" in words
