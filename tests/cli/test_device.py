"""``--device``: what the workers see, which locks are taken, and one line for what cannot be chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench import canary, locks
from kvbench.cli.main import main
from kvbench.machine import nvml_devices
from tests.machine.fake_nvml import FakeNvml

CUDA = "CUDA_VISIBLE_DEVICES"
SUITE = '''
import os, time
from kvbench import axis, bench

@bench(version=1, metric="time", unit="s", better="lower", n=axis.integer(smoke="1", quick="1", full="1"))
def sees(case, measure):
    """Tells which GPUs CUDA would see."""
    measure.note("visible", os.environ.get("CUDA_VISIBLE_DEVICES"))
    measure.note("order", os.environ.get("CUDA_DEVICE_ORDER"))
    measure(lambda reps: time.sleep(0.0005 * reps))

@bench(version=1, metric="time", unit="s", better="lower", device=axis.integer(smoke="0", quick="0", full="0", low=0))
def there(case, measure):
    """Tells which device it was given."""
    measure.note("order", os.environ.get("CUDA_DEVICE_ORDER"))
    measure(lambda reps: time.sleep(0.0005 * reps))
'''


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process, on a machine with the GPUs of a fixture."""
    suite = tmp_path / "suites" / "toy"
    suite.mkdir(parents=True)
    (suite / "bench_toy.py").write_text(SUITE)
    monkeypatch.setenv("KVBENCH_SUITES", str(suite.parent))
    monkeypatch.delenv(CUDA, raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    read = nvml_devices.read_devices

    def command(machine: str | None, *arguments: str) -> tuple[int, str, str]:
        def devices() -> nvml_devices.Devices:
            return read(loads=lambda: False) if machine is None else read(FakeNvml(machine))

        monkeypatch.setattr(nvml_devices, "read_devices", devices)
        try:
            code = main(["run", "--profile", "smoke", "--no-db", *(arguments or ["toy"])])
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_the_worker_sees_the_chosen_devices_and_their_board_is_locked(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "benches", dict)  # they say nothing about devices and take seconds
    taken: list[str] = []
    acquire = locks.acquire

    def recorded(names: tuple[str, ...], **options: Any) -> Any:
        taken.extend(names)
        return acquire(names, **options)

    monkeypatch.setattr(locks, "acquire", recorded)
    code, out, err = run("mig", "toy", "--device", "0:1", "--json")
    assert code == 0, err
    (row,) = [r for r in json.loads(out)["results"] if r["bench"] == "sees"]
    chosen = nvml_devices.choose("0:1", nvml_devices.read_devices(), {})[0]
    assert (row["detail"]["visible"], row["detail"]["order"]) == (chosen.uuid, "PCI_BUS_ID")
    assert [name for name in taken if name.startswith("gpu-")] == [chosen.lock]
    assert any(name.startswith("node") for name in taken)
    assert CUDA not in os.environ


@pytest.mark.parametrize(
    ("machine", "more", "devices", "order"),
    [
        (None, [], [0], None), ("gh200", [], [0], None), ("dgx", [], list(range(8)), "PCI_BUS_ID"),
        ("dgx", ["--device", "2,5"], [0, 1], "PCI_BUS_ID"), ("dgx", ["-a", "device=3"], [3], "PCI_BUS_ID"),
        ("mig", [], [0], "PCI_BUS_ID"),
    ],
)  # fmt: skip
def test_a_run_visits_every_gpu_unless_told_otherwise(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, machine: str | None, more: list[str],
    devices: list[int], order: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(canary, "benches", dict)
    code, out, err = run(machine, "toy/there", "--json", *more)
    assert code == 0, err
    rows = json.loads(out)["results"]
    assert [row["axes"]["device"] for row in rows] == devices
    assert {row["detail"]["order"] for row in rows} == {order}
    assert ("one MIG instance" in err) == (machine == "mig")
    assert "CUDA_DEVICE_ORDER" not in os.environ


@pytest.mark.parametrize(
    ("machine", "spec", "said"),
    [(None, "0", "there is no GPU here, got '0'"), (None, "all", "there is no GPU here"),
     ("dgx", "8", "unknown device, got '8', expected one of: 0 = NVIDIA H100 80GB HBM3"),
     ("mig", "0", "split into MIG instances"), ("dgx", "1,1", "device given twice")],
)  # fmt: skip
def test_what_cannot_be_chosen_ends_with_one_line_before_anything_is_measured(
    run: Callable[..., tuple[int, str, str]], machine: str | None, spec: str, said: str
) -> None:
    code, out, err = run(machine, "toy", "--device", spec)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("kvbench: error: --device: ")
    assert said in line
