"""What each tool's file becomes: the numbers in SI, under their own names, with what the file does not say."""

from __future__ import annotations

import json
import shutil
import statistics
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import Result
from kvbench.errors import UsageError
from kvbench.store.importers import TOOLS, Foreign, read_foreign, recognise
from tests.store.factories import make_run

DATA = Path(__file__).parent / "data"
FILES = {
    "nvbandwidth": "nvbandwidth.json", "nvbench": "nvbench.json", "google-benchmark": "google_benchmark.json",
    "pytest-benchmark": "pytest_benchmark.json", "stream": "stream.txt", "mlc": "mlc.txt",
}  # fmt: skip

Change = Callable[[Any], object]


def rows(foreign: Foreign, test: str) -> list[Result]:
    return [row for case in foreign.cases for row in case if row.bench == f"{foreign.tool}.{test}"]


def changed(tmp_path: Path, tool: str, change: Change) -> Path:
    """Return a copy of the tool's JSON file after ``change``, its side files beside it."""
    document = json.loads((DATA / FILES[tool]).read_text())
    change(document)
    path = tmp_path / FILES[tool]
    path.write_text(json.dumps(document))
    shutil.copytree(DATA / "nvbench.json-bin", tmp_path / "nvbench.json-bin", dirs_exist_ok=True)
    return path


def edited(tmp_path: Path, name: str, old: str, new: str) -> Path:
    text = (DATA / name).read_text()
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return path


def test_the_content_says_which_tool_it_was(tmp_path: Path) -> None:
    assert set(FILES) == set(TOOLS)
    for tool, name in FILES.items():
        assert recognise(DATA / name) == tool
        assert read_foreign(DATA / name).tool == tool
    both = tmp_path / "both.txt"
    both.write_text((DATA / "stream.txt").read_text() + (DATA / "mlc.txt").read_text())
    with pytest.raises(UsageError, match=r"several tools.*stream, mlc.*--from"):
        recognise(both)
    bundle = tmp_path / "bundle.jsonl"
    bundle.write_text(json.dumps({"schema": "kvbench.bundle/1", "run": make_run(label='"machine_info":').to_wire()}))
    assert recognise(bundle) is None
    with pytest.raises(UsageError, match="looks like nvbench output"):
        read_foreign(DATA / "nvbench.json", "nvbandwidth")


@pytest.mark.parametrize("tool", TOOLS)
def test_every_row_says_where_it_is_from(tool: str) -> None:
    foreign = read_foreign(DATA / FILES[tool])
    digests = [case[0].digest for case in foreign.cases]
    assert len(set(digests)) == len(digests)
    assert [case.digest for case in foreign.run.plan] == digests
    for row in (row for case in foreign.cases for row in case):
        assert (row.suite, row.basis, row.low, row.high, row.stop) == ("imported", "measured", None, None, None)
        assert row.flags[0] == "imported"
        assert str(row.detail["origin"]).startswith(f"{tool} ")
        assert FILES[tool] in str(row.detail["origin"])
        if row.value is not None:
            assert "no_interval" in row.flags
            assert ("no_samples" in row.flags) == (not row.samples)
        else:
            assert row.reason


def test_nvbandwidth() -> None:
    found = read_foreign(DATA / "nvbandwidth.json")
    first, second = rows(found, "host_to_device_memcpy_ce")
    assert (first.value, first.unit, first.axes) == (55.3145e9, "B/s", {"row": 0, "column": 0})
    assert (second.value, second.n, "n_unknown" in second.flags, "no_size" in second.flags) == (
        55.2817e9,
        1,
        True,
        True,
    )
    latency = rows(found, "host_device_latency_sm")[0]
    assert (latency.value, latency.unit, latency.metric, latency.better) == (771.432e-9, "s", "latency", "lower")
    diagonal = rows(found, "device_to_device_memcpy_write_ce")[0]
    assert (diagonal.status, diagonal.value, diagonal.reason) == ("skipped", None, "the file says N/A")
    waived = rows(found, "multinode_device_to_device_memcpy_read_ce")
    assert [(row.status, row.reason) for row in waived] == [("skipped", "nvbandwidth says Waived")]
    # the entry that the start of a test left behind is not a second result
    assert [(row.status, row.value) for row in rows(found, "all_to_host_memcpy_sm")] == [("failed", None)]
    assert (found.run.status, found.run.env["Driver Version"]) == ("partial", "570.86.15")


def test_nvbandwidth_three_matrices_in_one_are_two_directions_and_their_sum(tmp_path: Path) -> None:
    name = "device_to_device_bidirectional_memcpy_read_ce"
    both = rows(read_foreign(DATA / "nvbandwidth.json"), name)
    values = {(row.axes["part"], row.axes["row"]): row.value for row in both if row.value is not None}
    assert values == {
        ("first", 0): 380.5e9, ("first", 1): 381.25e9, ("second", 0): 382e9, ("second", 1): 380.75e9,
        ("total", 0): 762.5e9, ("total", 1): 762e9,
    }  # fmt: skip

    def wrong(document: Any) -> None:
        document["nvbandwidth"]["testcases"][2]["bandwidth_matrix"][0][1] = "381.5"

    with pytest.raises(UsageError, match="a total is not the sum of its two directions"):
        read_foreign(changed(tmp_path, "nvbandwidth", wrong))

    def other(document: Any) -> None:
        document["nvbandwidth"]["testcases"][0]["sum"] = 111.7

    with pytest.raises(UsageError, match=r"sum is 111.7, but its matrix adds up to 110.59"):
        read_foreign(changed(tmp_path, "nvbandwidth", other))


def test_nvbench_medians_and_means_are_two_metrics(tmp_path: Path) -> None:
    found = read_foreign(DATA / "nvbench.json")
    samples = struct.unpack("<5f", (DATA / "nvbench.json-bin" / "0.bin").read_bytes())
    median, mean, batch, bandwidth = rows(found, "copy")[:4]
    assert [row.metric for row in (median, mean, batch, bandwidth)] == [
        "cold_gpu_time", "cold_gpu_time_mean", "batch_gpu_time_mean", "cold_bandwidth"
    ]  # fmt: skip
    assert (median.value, median.samples, median.n) == (statistics.median(samples), samples, 5)
    assert mean.value == pytest.approx(statistics.fmean(samples))
    assert (batch.n, batch.samples, batch.seconds) == (512, (), None)
    assert bandwidth.unit == "B/s"
    # a stranger's "block" is no size in bytes; floats are words, whole numbers numbers
    assert median.axes == {"device": 0, "Elements": 1 << 24, "axis_block": 256, "Type": "I32", "Ratio": "0.5"}
    skipped = rows(found, "copy")[4]
    assert (skipped.status, skipped.reason) == ("skipped", "nvbench skipped it: not enough memory")
    worked = rows(found, "null_kernel")[0]  # a version without the median tag: out of the side file
    assert (worked.metric, worked.detail["statistic"]) == ("cold_gpu_time", "median of the side file")
    assert found.run.hw_class == read_foreign(DATA / "nvbench.json").run.hw_class
    older = changed(tmp_path, "nvbench", lambda d: [s["summaries"].pop(3) for s in d["benchmarks"][0]["states"][:1]])
    shutil.rmtree(tmp_path / "nvbench.json-bin")
    with pytest.raises(UsageError, match=r"nvbench\.json: its side file .* got 'nvbench.json-bin/0.bin'"):
        read_foreign(older)


def test_nvbench_many_samples_are_thinned_the_same_way_each_time(tmp_path: Path) -> None:
    many = [1e-5 * (1 + n % 7) for n in range(3000)]
    data = struct.pack("<3000f", *many)
    exact = struct.unpack("<3000f", data)

    def grow(document: Any) -> None:
        summaries = document["benchmarks"][0]["states"][0]["summaries"]
        for summary in summaries:
            values = {"nv/cold/sample_size": "3000", "nv/cold/time/gpu/mean": repr(statistics.fmean(exact)),
                      "nv/cold/time/gpu/median": repr(statistics.median(exact))}  # fmt: skip
            if summary["tag"] in values:
                summary["data"][0]["value"] = values[summary["tag"]]
            if summary["tag"].startswith("nv/json/bin"):
                summary["data"][1]["value"] = "3000"

    path = changed(tmp_path, "nvbench", grow)
    (tmp_path / "nvbench.json-bin" / "0.bin").write_bytes(data)
    first, second = (rows(read_foreign(path), "copy")[0] for _ in range(2))
    assert (first.n, first.kept, len(first.samples)) == (3000, 1000, 1000)
    assert first == second
    assert set(first.samples) <= set(exact)
    (tmp_path / "nvbench.json-bin" / "0.bin").write_bytes(struct.pack("<3000f", *[2e-5] * 3000))
    with pytest.raises(UsageError, match="of another measurement"):
        read_foreign(path)


def test_google_benchmark() -> None:
    found = read_foreign(DATA / "google_benchmark.json")
    real, cpu, rate = rows(found, "BM_Copy")
    assert (real.metric, real.value, real.n) == ("real_time", 1e-7, 3)
    assert real.samples == (98e-9, 102e-9, 100e-9)
    assert real.axes == {"arg0": 4096, "clock": "real_time"}
    assert (cpu.metric, cpu.value) == ("cpu_time", 99.5e-9)
    assert (rate.metric, rate.value, rate.unit, rate.better) == ("bandwidth", 40.96e9, "B/s", "higher")
    manual = rows(found, "BM_Gather")[0]
    assert (manual.metric, manual.value) == ("manual_time", 1.25e-3)
    assert manual.axes == {"rows": 8, "threads": 2, "clock": "manual_time"}
    (failed,), (skipped,) = rows(found, "BM_Open"), rows(found, "BM_Huge")
    assert (failed.status, skipped.status) == ("failed", "skipped")
    assert "file not found" in failed.reason
    assert found.run.started_at == "2025-04-01T08:11:12.000000+00:00"
    assert any("misses" in notice for notice in found.notices)


def test_google_benchmark_aggregates_alone_a_debug_library_and_a_zero(tmp_path: Path) -> None:
    def only_aggregates(document: Any) -> None:
        document["benchmarks"] = document["benchmarks"][3:4]
        document["context"]["library_build_type"] = "debug"
        document["context"]["date"] = "2016-08-02 17:44:46"

    found = read_foreign(changed(tmp_path, "google-benchmark", only_aggregates))
    (median, _) = rows(found, "BM_Copy")
    assert (median.metric, median.value, median.n, median.samples) == ("real_time", 1e-7, 3, ())
    assert (median.status, median.reason) == ("suspect", "the benchmark library was a debug build")
    assert "time_unknown" in found.run.flags  # a date without a zone is nobody's time

    def mean(document: Any) -> None:
        only_aggregates(document)
        document["benchmarks"][0]["aggregate_name"] = "mean"

    assert rows(read_foreign(changed(tmp_path, "google-benchmark", mean)), "BM_Copy")[0].metric == "real_time_mean"

    def zero(document: Any) -> None:
        for entry in document["benchmarks"][:3]:
            entry["real_time"] = 0.0

    row = rows(read_foreign(changed(tmp_path, "google-benchmark", zero)), "BM_Copy")[0]
    assert (row.status, row.value) == ("failed", None)


def test_pytest_benchmark(tmp_path: Path) -> None:
    found = read_foreign(DATA / "pytest_benchmark.json")
    (copy,), (fsync,) = rows(found, "tests/test_copy.py::test_copy"), rows(found, "tests/test_file.py::test_fsync")
    assert copy.axes == {"size": 4096, "axis_pages": "thp", "ratio": "0.5"}
    assert (copy.value, copy.n, copy.samples) == (1.1e-6, 5, (1.0e-6, 1.1e-6, 1.4e-6, 1.2e-6, 1.1e-6))
    assert (fsync.value, fsync.n, fsync.kept, fsync.axes) == (0.0019, 12, 0, {})
    # a clock reading is no hardware: the class is the same
    moved = changed(
        tmp_path, "pytest-benchmark", lambda d: d["machine_info"]["cpu"].update(hz_actual_friendly="3.2 GHz")
    )
    assert read_foreign(moved).run.hw_class == found.run.hw_class
    for change, text in (
        (lambda d: d["benchmarks"][0]["stats"].update(median=1.2e-6), "the median of its data 1.1e-06"),
        (lambda d: d["benchmarks"][0]["stats"].update(rounds=6), "holds 5 samples"),
        (lambda d: d["benchmarks"][0]["stats"].update(min=1.3e-6), "outside"),
    ):
        with pytest.raises(UsageError, match=text):
            read_foreign(changed(tmp_path, "pytest-benchmark", change))


def test_stream(tmp_path: Path) -> None:
    found = read_foreign(DATA / "stream.txt")
    best, mean = rows(found, "copy")
    assert (best.metric, best.value, best.n, best.bytes.link) == ("best_bandwidth", 200e9, 9, 1_600_000_000)
    assert best.axes == {"op": "copy", "elements": 100_000_000, "element_bytes": 8, "threads": 32}
    assert (mean.metric, mean.value, mean.unit) == ("mean_time", 0.0081, "s")
    assert rows(found, "triad")[0].bytes.link == 2_400_000_000
    wrong = edited(tmp_path, "stream.txt", "192000.0", "129000.0")
    with pytest.raises(UsageError, match=r"Triad: 129000 MB/s is not 2400000000 B in 0.0125 s"):
        read_foreign(wrong)
    unproven = edited(
        tmp_path, "stream.txt", "Solution Validates: avg error less", "Failed Validation on array a[], AvgRelAbsErr >"
    )
    failed = [row for case in read_foreign(unproven).cases for row in case]
    assert {(row.status, row.value) for row in failed} == {("failed", None)}
    assert read_foreign(unproven).run.status == "failed"


def test_mlc(tmp_path: Path) -> None:
    found = read_foreign(DATA / "mlc.txt")
    idle = {(row.axes["from_node"], row.axes["to_node"]): row.value for row in rows(found, "latency_matrix")}
    assert idle == {(0, 0): 82.1e-9, (0, 1): 141e-9, (1, 0): 141.5e-9, (1, 1): 81.5e-9}
    assert {row.axes["access"] for row in rows(found, "latency_matrix")} == {"sequential"}
    assert rows(found, "peak_bandwidth")[0].value == 158844.5e6
    assert rows(found, "bandwidth_matrix")[1].value == 34393.4e6
    assert rows(found, "bandwidth_matrix")[1].axes["traffic"] == "Read-only"
    loaded = [(row.axes["delay"], row.metric, row.value) for row in rows(found, "loaded_latency")]
    assert loaded[:2] == [(0, "latency", 329.26e-9), (0, "bandwidth", 159154e6)]
    assert len(loaded) == 6
    assert any("cache-to-cache" in notice for notice in found.notices)
    options = read_foreign(DATA / "mlc_options.txt")
    first = rows(options, "latency_matrix")
    assert [row.axes["args"] for row in first] == ["--latency_matrix"] * 2  # a node without a CPU has no row
    assert first[0].detail["prefetchers"] == "could not be switched off"
    assert rows(options, "idle_latency")[0].value == 89e-9
    cut = edited(tmp_path, "mlc.txt", "Measuring cache-to-cache", "Measuring something else")
    with pytest.raises(UsageError, match="ends before 'Measuring cache-to-cache"):
        read_foreign(cut)
    short = edited(tmp_path, "mlc.txt", "79670.3 34393.4", "79670.3")
    with pytest.raises(UsageError, match="a row has 1 values, expected 2"):
        read_foreign(short)
