"""The bundle that scripts/gpu leaves, and the reference made of one: whole, small, and of nobody in particular."""

from __future__ import annotations

import getpass
import gzip
import socket
from pathlib import Path

import pytest

from kvbench.contract.result import Ceiling, Result, RunInfo
from kvbench.store.bundle import BundleWriter, read_bundle
from scripts import gpu_bundle, gpu_reference
from scripts.gpu_bundle import collect, thin
from tests.store.factories import at, make_row, make_run

HOST, USER, HOME = "alices-box", "alice", "/home/alice"
HARDWARE = "amd-25-17-1-s1-n2-c64-2xh100-0123abcd"


def write(path: Path, *runs: tuple[RunInfo, list[Result]], end: bool = True) -> Path:
    with BundleWriter(path, sync_lines=False) as writer:
        for run, rows in runs:
            writer.begin_run(run)
            for position, row in enumerate(rows):
                writer.add_results(run.uuid, [row], position, committed_at=at(position))
            if end:
                writer.finish_run(run.uuid, "ok", at(60))
    return path


def never(row: Result) -> bool:
    return False


# -- one bundle --------------------------------------------------------------------------------------------------------


def test_parts_become_one_bundle_with_every_run_ended(tmp_path: Path) -> None:
    whole = write(tmp_path / "smoke.jsonl", (make_run(), [make_row(0), make_row(1, status="failed", value=None)]))
    cut = write(
        tmp_path / "quick.jsonl", (make_run(), [make_row(0), make_row(2), make_row(0, suite="canary")]), end=False
    )
    with cut.open("ab") as file:
        file.write(b'{"kind":"case","run":')  # where kill -9 met it
    empty = tmp_path / "none.jsonl"
    empty.touch()
    found = collect(
        [whole, cut, empty, tmp_path / "absent"], tmp_path / "all.jsonl", lambda row: row.axes["bytes"] == 4096
    )
    bundle = read_bundle(tmp_path / "all.jsonl")
    assert [run.info.status for run in bundle.runs] == ["partial", "interrupted"]
    assert sum(len(run.results) for run in bundle.runs) == 5
    assert not any("cut off" in notice for notice in bundle.notices)
    assert (found.runs, len(found.cases), found.with_value, found.having("failed"), found.gpu_with_value) == (
        2,
        3,
        2,
        1,
        1,
    )


def test_a_failure_in_one_run_is_not_covered_by_another(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", (make_run(), [make_row(0, status="failed", value=None)]))
    second = write(tmp_path / "b.jsonl", (make_run(), [make_row(0)]))
    found = collect([first, second], tmp_path / "all.jsonl", never)
    assert (found.with_value, found.having("failed")) == (1, 1)


def test_an_invalid_number_is_no_value(tmp_path: Path) -> None:
    part = write(tmp_path / "a.jsonl", (make_run(), [make_row(0, status="invalid", reason="too fast")]))
    found = collect([part], tmp_path / "all.jsonl", lambda row: True)
    assert (found.with_value, found.gpu_with_value, found.having("invalid")) == (0, 0, 1)


def test_samples_go_before_the_bundle_is_too_large(tmp_path: Path) -> None:
    rows = [make_row(n, samples=tuple(1e-3 + i * 1e-9 for i in range(1000)), n=2000, kept=1000) for n in range(6)]
    part = write(tmp_path / "a.jsonl", (make_run(), rows))
    target = tmp_path / "all.jsonl"
    assert collect([part], target, never).samples_a_row is None
    assert part.stat().st_size > 60_000
    found = collect([part], target, never, limit=60_000)
    assert found.samples_a_row == 200
    assert target.stat().st_size <= 60_000
    kept = read_bundle(target).runs[0].results
    assert {len(row.samples) for row in kept} == {200}
    assert [row.value for row in kept] == [row.value for row in rows]
    with pytest.raises(Exception, match="too large without any sample"):
        collect([part], target, never, limit=100)
    assert len(read_bundle(target).runs) == 1  # what was there stays


def test_thinning_takes_the_same_samples_every_time() -> None:
    row = make_row(samples=tuple(float(i + 1) for i in range(500)), n=500, kept=500)
    assert thin(row, 50).samples == thin(row, 50).samples
    assert set(thin(row, 50).samples) < set(row.samples)
    assert max(thin(row, 50).samples) > 400 > 100 > min(thin(row, 50).samples)
    assert thin(row, None) is row
    assert thin(row, 0).samples == ()
    assert gpu_bundle.THINNED[-1] == 0


# -- a reference -------------------------------------------------------------------------------------------------------


def planted() -> tuple[RunInfo, list[Result]]:
    """A run in which host, user and home stand wherever a machine may put them."""
    run = make_run(
        hw_class=HARDWARE, host=f"{HOST}-1a2b3c", label=f"{USER}'s run", boot_id="5c0ffee0-boot", pid=4242,
        pid_start="99", git="a" * 40,
        machine={"key": {"sockets": 1}, "facts": {"gpus": [{"name": "NVIDIA H100", "uuid_hash": "1f3a5b7c9d0e"}],
                 "hostname": HOST, "dmi": {"product_name": f"{HOST} rack"}}},
        env={"kernel": f"6.1-{USER}", "cuda_visible_devices": "hash:0123456789ab", "libraries": {"numpy": "2.4"}},
    )  # fmt: skip
    rows = [
        make_row(
            0, kernel=f"compiled in {HOME}/.cache/kvbench", flags=("in_llc",), resolved={"directory": f"{HOME}/x"},
            detail={"file_system": "ext4", "directory": f"{HOME}/.cache/kvbench", "owner": USER, "free": 12.5},
            ceilings=(Ceiling("read", 2e10, "measured", f"{HOME}/run"),), reason=f"3 x slower on {HOST}.lan",
        ),
        make_row(1, status="skipped", value=None, reason=f"'{HOME}/my data/k': no space; see /sys/block and GB/s"),
        make_row(2, status="failed", value=None, reason=f"file://{HOME}/a.py:7 and ~{USER}/b, {USER.upper()} said"),
        make_row(3, status="skipped", value=None, reason="/root/secret/of/root, /mnt/alice/disk and /proc/4242/maps"),
    ]  # fmt: skip
    return run, rows


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    write(tmp_path / "box.jsonl", planted())
    return gpu_reference.make(tmp_path / "box.jsonl", tmp_path / "reference")


def test_no_host_no_home_and_no_user_survives(reference: Path) -> None:
    text = gzip.decompress(reference.read_bytes()).decode().lower()
    for word in (HOST, USER, HOME, "/home", "/root", "/mnt", "1a2b3c", "c0ffee", "4242", "my data", "my run", "secret"):
        assert word.lower() not in text, word
    assert socket.gethostname().lower() not in text
    assert getpass.getuser().lower() in gpu_reference.COMMON or getpass.getuser().lower() not in text


def test_what_makes_the_number_is_kept(reference: Path, tmp_path: Path) -> None:
    assert reference.name == f"{HARDWARE}.jsonl.gz"
    assert reference.stat().st_size <= gpu_reference.LIMIT_BYTES
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(reference.read_bytes()))
    (run,) = read_bundle(plain).runs
    told, rows = planted()
    assert (run.info.hw_class, run.info.host, run.info.status) == (HARDWARE, HARDWARE, "partial")
    assert run.info.machine["facts"]["gpus"] == [{"name": "NVIDIA H100", "uuid_hash": "1f3a5b7c9d0e"}]
    assert run.info.env["libraries"] == {"numpy": "2.4"}
    assert [row.axes for row in run.results] == [row.axes for row in rows]
    assert run.results[0].value == rows[0].value
    assert run.results[0].detail["file_system"] == "ext4"
    assert run.results[0].detail["free"] == 12.5
    assert "see /sys/block and GB/s" in run.results[1].reason
    assert not any(row.samples for row in run.results)
    assert told.label is not None
    assert run.info.label is None


def test_the_same_bundle_gives_the_same_bytes(tmp_path: Path) -> None:
    bundle = write(tmp_path / "box.jsonl", planted())
    one, two = (gpu_reference.make(bundle, tmp_path / name).read_bytes() for name in "ab")
    assert one == two


def test_it_refuses_what_would_be_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, rows = planted()
    valueless = write(tmp_path / "none.jsonl", (run, rows[1:]))
    assert gpu_reference.main([str(valueless), "--into", str(tmp_path / "r")]) == 3
    mixed = write(tmp_path / "two.jsonl", (run, rows), (make_run(hw_class="arm-1"), [make_row(0)]))
    assert gpu_reference.main([str(mixed), "--into", str(tmp_path / "r")]) == 2
    named = write(tmp_path / "named.jsonl", (run, [*rows, make_row(4, suite=USER)]))
    assert gpu_reference.main([str(named), "--into", str(tmp_path / "r")]) == 3
    assert not (tmp_path / "r").exists()
    assert "would still hold a name" in capsys.readouterr().err
    good = write(tmp_path / "box.jsonl", (run, rows))
    assert gpu_reference.main([str(good), "--into", str(tmp_path / "r")]) == 0
    assert gpu_reference.main([str(good), "--into", str(tmp_path / "r")]) == 2
    assert gpu_reference.main([str(good), "--into", str(tmp_path / "r"), "--replace"]) == 0


def test_a_reference_beyond_its_size_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reference, "LIMIT_BYTES", 200)
    bundle = write(tmp_path / "box.jsonl", planted())
    with pytest.raises(Exception, match="too large"):
        gpu_reference.make(bundle, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "text", ["98 GB/s and n/beta", "read /proc/self/smaps, /sys/kernel/mm and /dev/nvidia0", "1/2, 3 / 4", "a/b"]
)
def test_what_is_no_path_stays(text: str) -> None:
    assert gpu_reference.clean(text, ("alice",)) == text
