"""GPU benches on the fake driver, run as the worker runs them: right bytes, honest rows, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Profile, Value
from kvbench.errors import Unavailable
from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.nvml import uuid_hash
from kvbench.machine.nvml_devices import Device, Devices
from kvbench.machine.nvml_state import GpuLimits, GpuProbe, GpuReading
from kvbench.memory.cuda.device import Stream
from kvbench.timing import gpu_session
from kvbench.transport import gpu_batch, gpu_ce
from kvbench.transport.gpu_pieces import Pieces
from kvbench.worker import measure_case
from tests.suites.gpu_rig import BYTE_S, OPERATION_S, RECORD_S, Rig, find, good, refused, rig

KiB = 1 << 10
SIZE = 64 * KiB
BENCHES = ("link", "device_bandwidth", "device_latency", "launch", "pin")
PINNED = [(t, d) for t in ("ce", "batch", "sm", "direct") for d in ("fetch", "evict", "both")]
OTHERS = [
    ("hbm:pageable", "ce", "fetch"), ("hbm:pageable", "ce", "evict"), ("hbm:managed", "ce", "fetch"),
    ("hbm:managed", "ce", "evict"), ("hbm:managed", "direct", "fetch"), ("hbm:file", "staged", "fetch"),
    ("hbm:file", "staged", "evict"),
]  # fmt: skip


# -- link --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "direction"), PINNED)
def test_pinned_link(gpu: Rig, transport: str, direction: str) -> None:
    rows = good(gpu, gpu.case("link", transport=transport, direction=direction, bytes=SIZE))
    both = direction == "both"
    total = SIZE * (2 if both else 1)
    assert rows["bandwidth"].bytes.link == rows["bandwidth"].bytes.unique == total
    assert (rows["bandwidth"].rate_of, rows["bandwidth"].transport) == ("link", transport)
    assert rows["device_only"].value is not None
    # In virtual time the device's part is known: the operation, its bytes where a copy engine moves them, the records.
    work = OPERATION_S + (SIZE * BYTE_S if transport in ("ce", "batch") else 0.0)
    assert total / rows["device_only"].value == pytest.approx(work, abs=4 * RECORD_S)
    assert rows.keys() - {"bandwidth", "device_only"} == ({"fetch_bandwidth", "evict_bandwidth"} if both else set())
    for way in ("fetch", "evict"):
        if both:
            value = rows[f"{way}_bandwidth"].value
            assert value is not None
            assert SIZE / value == pytest.approx(work, abs=4 * RECORD_S)
            assert rows[f"{way}_bandwidth"].bytes.link == SIZE
    if both:
        assert rows["bandwidth"].detail["overlap"] == 1.0
        assert "overlap_partial" not in rows["bandwidth"].flags


@pytest.mark.parametrize(("pair", "transport", "direction"), OTHERS)
def test_other_tiers(gpu: Rig, pair: str, transport: str, direction: str) -> None:
    axes = {"pair": pair, "alloc": "plain", "transport": transport, "direction": direction}
    rows = good(gpu, gpu.case("link", **axes, bytes=5 << 20))
    assert (rows["device_only"].status, rows["device_only"].value) == ("skipped", None)
    known = pair == "hbm:pageable"
    assert (rows["bandwidth"].bytes.link is not None) == known
    assert rows["bandwidth"].rate_of == ("link" if known else "unique")


@pytest.mark.parametrize("alloc", ["register", "hostalloc"])
@pytest.mark.parametrize("nbytes", [4096 + 13, 40 * KiB + 8])
def test_any_size_and_either_way_to_pin(gpu: Rig, alloc: str, nbytes: int) -> None:
    for transport in ("ce", "sm", "direct"):
        good(gpu, gpu.case("link", alloc=alloc, transport=transport, direction="both", bytes=nbytes))


@pytest.mark.parametrize("transport", ["ce", "batch"])
def test_scattered_fragments_arrive_where_they_belong(gpu: Rig, transport: str) -> None:
    gpu.fake.forget()
    rows = good(gpu, gpu.case("link", transport=transport, direction="both", bytes=SIZE, pieces=16))
    sizes = [c.args[2] for c in gpu.fake.trace() if c.name == "cuMemcpyAsync" and c.args[2] == SIZE // 16]
    assert (len(sizes) >= 32) == (transport == "ce")
    assert "16" in (rows["bandwidth"].kernel or "")


def test_more_fragments_than_a_blocker_holds_leave_the_first_metric_alone(gpu: Rig) -> None:
    rows = good(gpu, gpu.case("link", direction="both", bytes=1 << 20, pieces=512))
    for metric in ("device_only", "fetch_bandwidth", "evict_bandwidth"):
        assert rows[metric].status == "skipped"
        assert "blocker" in rows[metric].reason


@pytest.mark.parametrize("transport", ["sm", "direct"])
@pytest.mark.parametrize("direction", ["fetch", "evict", "both"])
def test_a_kernel_that_moves_too_little_leaves_no_number(gpu: Rig, transport: str, direction: str) -> None:
    gpu.fake.missing(1)
    rows = gpu.case("link", transport=transport, direction=direction, bytes=SIZE)
    refused(gpu, rows, "failed", "payload check failed")


@pytest.mark.parametrize("fault", ["short", "swapped", "once", "elsewhere"])
@pytest.mark.parametrize("direction", ["fetch", "evict"])
def test_a_wrong_copy_leaves_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch, fault: str, direction: str) -> None:
    true_init, true_submit, done = gpu_ce.CopyEngine.__init__, gpu_ce.CopyEngine.submit, [0]

    def init(self: gpu_ce.CopyEngine, device: object, pieces: Pieces) -> None:
        true_init(self, device, pieces)  # type: ignore[arg-type]
        rows = self.calls._loop.rows
        if fault == "short":
            rows[-1, 2] -= 1
        elif fault == "swapped":
            rows[:, [0, 1]] = rows[:, [1, 0]]
        elif fault == "elsewhere":
            rows[-1, 0] = rows[0, 0]

    def submit(self: gpu_ce.CopyEngine, stream: Stream) -> None:
        done[0] += 1
        if fault == "once" and done[0] > 1:
            self.calls._loop.rows[:, 0] = self.calls._loop.rows[:, 1]  # onto itself: as many operations, nothing moved
        true_submit(self, stream)

    monkeypatch.setattr(gpu_ce.CopyEngine, "__init__", init)
    monkeypatch.setattr(gpu_ce.CopyEngine, "submit", submit)
    refused(gpu, gpu.case("link", direction=direction, bytes=SIZE, pieces=16), "failed", "payload check failed")


def test_a_short_read_of_a_file_leaves_no_number(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: 0 if at >= 4 << 20 else read(fd, views, at))
    axes = {"pair": "hbm:file", "alloc": "plain", "transport": "staged", "direction": "fetch"}
    refused(gpu, gpu.case("link", **axes, bytes=6 << 20), "failed", "a read ended early")


@pytest.mark.parametrize(
    ("settings", "axes", "words"),
    [
        ({"devices": 0}, {}, ["cuInit"]),
        ({}, {"device": 3}, ["no GPU 3", "1 visible"]),
        ({"total_bytes": 8 << 20}, {"bytes": 16 << 20}, ["GPU memory"]),
        ({"pin_limit": 32 * KiB}, {}, ["could not be had"]),
        ({"driver_version": 12060}, {"transport": "batch"}, ["lacks cuMemcpyBatchAsync", "12.8"]),
        ({"l2_bytes": 0}, {"transport": "sm"}, ["no L2 size"]),
        ({"managed": 0}, {"pair": "hbm:managed", "alloc": "plain", "transport": "ce"}, ["no managed memory"]),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_skipped_and_said(
    monkeypatch: pytest.MonkeyPatch, context: Context, settings: dict[str, int], axes: dict[str, Value],
    words: list[str],
) -> None:  # fmt: skip
    with rig(monkeypatch, context, **settings) as gpu:
        refused(gpu, gpu.case("link", **{"direction": "fetch", "bytes": SIZE, **axes}), "skipped", *words)


def test_the_older_interface_of_the_batched_copy(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    """T40."""
    with rig(monkeypatch, context, driver_version=12080) as gpu:
        gpu.fake.forget()
        good(gpu, gpu.case("link", transport="batch", bytes=SIZE, pieces=16))
        assert "cuMemcpyBatchAsync" in gpu.fake.names()
        assert "cuMemcpyBatchAsync_v2" not in gpu.fake.names()


def test_a_batched_copy_that_is_refused_or_moves_something_else(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.fake.fail(call="cuMemcpyBatchAsync_v2", code=801)
    refused(
        gpu, gpu.case("link", transport="batch", bytes=SIZE), "skipped", "does not serve two items", "NOT_SUPPORTED"
    )
    monkeypatch.setattr(gpu_batch.BatchCopy, "submit", lambda self, stream: None)
    refused(gpu, gpu.case("link", transport="batch", bytes=SIZE), "skipped", "moves something else")


# -- memory, launch, pin -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "times"), [("read", 1), ("write", 1), ("copy", 2), ("triad", 3)])
@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_device_bandwidth_counts_as_stream_and_one_way(gpu: Rig, op: str, times: int, cache: str) -> None:
    """T2, T10."""
    rows = good(gpu, gpu.case("device_bandwidth", op=op, cache=cache, bytes=32 * KiB))
    total, one = rows["bandwidth"].value, rows["one_way"].value
    assert total is not None
    assert one is not None
    assert total / one == pytest.approx(times)
    assert rows["bandwidth"].bytes.near == times * 32 * KiB
    working = times * 32 * KiB
    held = working < 4 * 16 * KiB and (cache == "hot" or op != "read")
    assert ("in_l2" in rows["bandwidth"].flags) == held


@pytest.mark.parametrize("op", ["read", "write", "copy", "triad"])
def test_a_kernel_that_skips_bytes_leaves_no_number(gpu: Rig, op: str) -> None:
    gpu.fake.missing(8)
    refused(gpu, gpu.case("device_bandwidth", op=op, bytes=SIZE), "failed", "payload check failed")


def test_windows_too_short_for_the_clock_are_skipped(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    """T16."""
    with rig(monkeypatch, context, event_quantum_ns=1000, op_ns=1000) as gpu:
        refused(gpu, gpu.case("device_bandwidth", bytes=SIZE), "skipped", "too short for the event clock")


@pytest.mark.parametrize("nbytes", [4 * KiB, 256 * KiB])
def test_latency_walks_on_around_the_cycle(gpu: Rig, nbytes: int) -> None:
    rows = good(gpu, gpu.case("device_latency", bytes=nbytes))
    assert rows["cycles"].value == 3.0
    assert ("in_l2" in rows["latency"].flags) == (nbytes < 4 * 16 * KiB)
    gpu.fake.missing(1)
    refused(gpu, gpu.case("device_latency", bytes=nbytes), "failed", "another node")


@pytest.mark.parametrize("op", find("launch").axes["op"].legal)
def test_launch(gpu: Rig, op: str) -> None:
    each = OPERATION_S / 5 if op == "graph_64" else OPERATION_S  # all of it less than the fake really takes
    gpu.fake.set(op_ns=round(each * 1e9))
    rows = good(gpu, gpu.case("launch", op=op))
    assert rows["submit_time"].value is not None
    if op == "event":  # nothing but a record: shorter than events are uncertain
        assert rows["device_time"].status == "skipped"
        return
    value = rows["device_time"].value
    assert value is not None
    operations = 64 if op == "graph_64" else 2 if op.startswith("batch") else 1
    assert value == pytest.approx(operations * each, abs=2 * RECORD_S)


@pytest.mark.parametrize("alloc", ["register", "hostalloc"])
def test_pin_spans(gpu: Rig, alloc: str) -> None:
    """T47."""
    rows = good(gpu, gpu.case("pin", alloc=alloc, bytes=256 * KiB, threads=1))
    register, total = rows["register_time"], rows["pin_time"].value
    assert (register.value is None) == (alloc == "hostalloc")
    assert register.status == ("skipped" if alloc == "hostalloc" else rows["pin_time"].status)
    assert total is not None
    assert rows["seconds_per_gib"].value == pytest.approx(total * 4096)
    steps = [rows[f"{name}_time"].value for name in ("alloc", "touch", "register")]
    assert sum(step or 0.0 for step in steps) == pytest.approx(total, rel=0.9)
    assert rows["unpin_time"].value is not None


def test_pin_needs_memory_that_the_driver_calls_pinned_and_the_device_reads(
    gpu: Rig, monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    """T7."""
    gpu.fake.set(registered_attribute=2)
    refused(gpu, gpu.case("pin", bytes=SIZE, threads=1), "failed", "calls it something else")
    with rig(monkeypatch, context, pin_limit=32 * KiB) as small:
        refused(small, small.case("pin", bytes=SIZE, threads=1), "skipped", "could not be pinned")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BENCHES)
def test_smoke_cases_on_a_gpu(name: str, tmp_path: Path) -> None:
    """The one test here that needs the hardware; sizes are kept, since small ones are too short for its clock."""
    context = Context.create(profile="smoke", scratch=tmp_path, seed=1)
    for case in find(name).cases("smoke"):
        rows = measure_case(find(name), dict(case.axes), context)
        assert rows[0].value is not None, (case.text(), rows[0].reason)
        assert not [row.metric for row in rows if row.status in ("failed", "invalid")], case.text()


# -- faults ------------------------------------------------------------------------------------------------------------

FAULTY: list[tuple[str, dict[str, Value]]] = [
    ("link", {"transport": "ce", "direction": "both", "bytes": 4 * KiB}),
    ("link", {"transport": "sm", "direction": "both", "bytes": 4 * KiB}),
    ("link", {"pair": "hbm:file", "alloc": "plain", "transport": "staged", "direction": "fetch", "bytes": 8 * KiB}),
    ("link", {"pair": "hbm:managed", "alloc": "plain", "transport": "direct", "direction": "fetch", "bytes": 4 * KiB}),
    ("link", {"pair": "hbm:file", "alloc": "plain", "transport": "staged", "direction": "evict", "bytes": 8 * KiB}),
    ("device_bandwidth", {"op": "write", "bytes": 4 * KiB}),
    ("device_latency", {"bytes": 64 * KiB}),
    ("launch", {"op": "batch_fetch"}),
    ("launch", {"op": "graph"}),
    ("pin", {"alloc": "hostalloc", "bytes": 4 * KiB, "threads": 1}),
    ("pin", {"alloc": "register", "bytes": 4 * KiB, "threads": 1}),
]  # fmt: skip
# One call may fail: which node is nearest is asked of sysfs next.
TOLERATED = "cuDeviceGetAttribute"


@pytest.mark.parametrize(("name", "axes"), FAULTY)
def test_every_failing_call_leaves_one_line_and_no_leak(gpu: Rig, name: str, axes: dict[str, Value]) -> None:
    gpu.fake.forget()
    good(gpu, gpu.case(name, **axes))
    names = gpu.fake.names()
    for call in sorted(set(names)):
        later = names.count(call) * 2 // 3 if name == "link" else 1
        for k in {1, later or 1}:
            gpu.fake.fail(k, call=call)
            rows = gpu.case(name, **axes)
            if call == TOLERATED or (k > 1 and not gpu.fake.fired):  # fewer calls than the time before
                assert gpu.fake.live() == {}
                continue
            assert gpu.fake.fired, call
            lacking = call == "cuInit" or "does not serve" in rows[0].reason
            refused(gpu, rows, "skipped" if lacking else "failed")
    gpu.fake.fail(0)


@pytest.mark.parametrize(("name", "axes"), [FAULTY[0], FAULTY[1], *FAULTY[5:9]])
@pytest.mark.parametrize("k", [1, 20, 60])
def test_a_device_error_poisons_the_worker_and_leaves_no_number(
    gpu: Rig, context: Context, name: str, axes: dict[str, Value], k: int
) -> None:
    """T41."""
    own = dataclasses.replace(gpu, context=dataclasses.replace(context, device_errors=[]))
    gpu.fake.fail_op(k, 700)
    (row,) = own.case(name, **axes)
    assert (row.status, row.value) == ("failed", None)
    assert "ILLEGAL_ADDRESS" in row.reason
    assert "\n" not in row.reason
    assert own.context.poisoned
    assert gpu.drivers[-1].poisoned is not None


# -- the board ---------------------------------------------------------------------------------------------------------


class Probe(GpuProbe):
    """A board of PCIe generation ``gen`` that is throttled from the ``after``-th look on."""

    gen, after = 5, 10**9

    def __init__(self, indices: object = None) -> None:
        self.indices, self.limits, self.reason, self.looks = (1,), (GpuLimits(self.gen, 16),), "", 0

    def close(self) -> None: ...

    def links(self) -> tuple[tuple[int | None, int | None], ...]:
        return ((self.gen, 16),)

    def snapshot(self) -> tuple[GpuReading, ...]:
        self.looks += 1
        return (GpuReading(float(self.looks), reasons=0x40 if self.looks > self.after else 0, gen=self.gen, width=16),)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> type[Probe]:
    """NVML lists two boards, of which the second has the UUID of the fake's device."""
    mine, other = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "GPU-ffffffff-0405-0607-0809-0a0b0c0d0e0f"
    found = [Device(i, "Board", uuid, uuid_hash(uuid), board_uuid=uuid) for i, uuid in enumerate((other, mine))]
    boards = [
        Gpu("Board", max_memory_mhz=mhz, memory_bus_bits=64, uuid_hash=uuid_hash(uuid))
        for uuid, mhz in ((other, 9), (mine, 4000))
    ]
    monkeypatch.setattr(gpu_session, "read_devices", lambda: Devices(tuple(found)))
    monkeypatch.setattr(gpu_session, "read_gpus", lambda: Gpus(True, tuple(boards)))
    own = type("Own", (Probe,), {})
    monkeypatch.setattr(gpu_session, "GpuProbe", own)
    return own


def test_ceilings_are_those_of_the_board_with_the_devices_uuid(gpu: Rig, board: type[Probe]) -> None:
    rows = good(gpu, gpu.case("link", direction="both", bytes=SIZE))
    beside, top = rows["bandwidth"].ceilings
    assert (beside.name, beside.kind) == ("ce_128KiB", "measured")
    assert (top.name, top.kind) == ("pcie", "physical")
    assert top.value == pytest.approx(2 * 63.0e9, rel=0.001)
    assert rows["bandwidth"].fraction is not None
    assert "gpu_unwatched" not in rows["bandwidth"].flags
    memory = good(gpu, gpu.case("device_bandwidth", op="read", bytes=SIZE))["bandwidth"]
    assert memory.ceilings[0].value == pytest.approx(2 * 4000e6 * 8)


def test_beyond_a_physical_ceiling_is_invalid(gpu: Rig, board: type[Probe]) -> None:
    """T19, T37: 19.6 GB/s on a generation 1 link is no number."""
    board.gen = 1
    rows = {row.metric: row for row in gpu.case("link", direction="both", bytes=SIZE)}
    for metric in ("device_only", "fetch_bandwidth", "evict_bandwidth"):
        assert rows[metric].status == "invalid", metric
        assert "physical ceiling" in rows[metric].reason


def test_throttling_taints(gpu: Rig, board: type[Probe]) -> None:
    board.after = 1
    rows = {row.metric: row for row in gpu.case("device_bandwidth", op="read", bytes=SIZE)}
    assert {"throttled", "tainted"} <= set(rows["bandwidth"].flags)
    assert rows["bandwidth"].status == "tainted"


def test_without_nvml_the_row_says_that_nobody_looked(gpu: Rig) -> None:
    row = good(gpu, gpu.case("link", bytes=SIZE))["bandwidth"]
    assert "gpu_unwatched" in row.flags
    assert row.ceilings[-1].value is None
    assert row.ceilings[-1].source


# -- grids and machines without a GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "most"), [("smoke", 12), ("quick", 34)])
def test_grids_stay_small(profile: Profile, most: int) -> None:
    counts = {name: sum(1 for _ in find(name).cases(profile)) for name in BENCHES}
    assert min(counts.values()) >= 1
    assert sum(counts.values()) <= most


def test_the_full_grid_holds_every_path_of_the_issue() -> None:
    seen = {(c.axes["pair"], c.axes["transport"], c.axes["direction"]) for c in find("link").cases("full")}
    assert {("hbm:pinned", t, d) for t, d in PINNED} | set(OTHERS) == seen
    pinned = [c.axes for c in find("link").cases("full") if c.axes["pair"] == "hbm:pinned"]
    assert {a["alloc"] for a in pinned} == {"register", "hostalloc"}
    sizes = {int(a["bytes"]) for a in pinned}
    assert (min(sizes), max(sizes)) == (4 * KiB, 16 << 30)


WITHOUT_GPU = """
import sys
from pathlib import Path
from kvbench.context import Context
from kvbench.contract.discover import load_suites
from kvbench.errors import Unavailable
from kvbench.timing import gpu_session
from kvbench.worker import measure_case
gpu_session.LIBRARY = "libnothing.so.1"
def gone():
    raise Unavailable("no NVIDIA driver") from OSError("not there")
gpu_session._process_driver = gone
context = Context.create(profile="smoke", scratch=None, seed=1)
for name in sys.argv[1:]:
    bench = load_suites().find("ladder", name)
    (row,) = measure_case(bench, dict(next(iter(bench.cases("smoke"))).axes), context)
    print(row.status, row.reason)
print(*sorted({m.split(".")[0] for m in sys.modules} & {"numba", "cuda", "torch", "triton", "scipy", "pynvml"}))
"""


def test_without_a_gpu_nothing_is_loaded_or_compiled() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU, *BENCHES], capture_output=True, text=True, timeout=60, check=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    *rows, loaded = done.stdout.splitlines()
    assert rows == ["skipped no GPU here: libnothing.so.1 does not load"] * len(BENCHES)
    assert loaded == ""


def test_another_refusal_of_the_driver_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise Unavailable("the NVIDIA driver does not start", got="cuInit: 803")

    monkeypatch.setattr(gpu_session, "_process_driver", refuses)
    with pytest.raises(Unavailable, match=r"does not start.*803"):
        gpu_session.open_driver()
