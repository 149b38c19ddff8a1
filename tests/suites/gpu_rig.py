"""The fake driver with the catalogue's kernels, and benches run on it as the worker runs them."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.kernels.gpu import catalogue
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver
from kvbench.memory.cuda.service import Service
from kvbench.timing import events, gpu_session
from kvbench.transport import gpu_link
from kvbench.worker import measure_case
from tests import fake_cuda
from tests.fake_cuda import Fake

HERE = Path(__file__).resolve().parent
MORE = HERE / "ladder_movers.c"
GEMM = HERE / "gemm_movers.c"
ON_HOST = HERE.parent / "kernels" / "gpu"  # device_on_host.h: what makes the .cu files C
IMAGE = b"FAKE " + b" ".join(k.entry.encode() for k in catalogue.KERNELS.values() if k.form == "cuda")
# Time of the fake: 1 us an operation and 50 GB/s for copies, less than the host really takes, so that no window of the
# device is longer than the call around it.
OPERATION_S, BYTE_S, RECORD_S = 1e-6, 20e-12, 40e-9
VIRTUAL = {"virtual_time": 1, "op_ns": 1000, "byte_ps": 20, "record_ns": 40}
PEAK = 128 << 10
SMALL = {"l2_bytes": 1 << 14, "sms": 2}
TABLE_ENDS = "    return NULL;\n}\n\n/* -- modules"
TABLE_GOES_ON = """    const Kernel *ladder_kernel(const char *);
    return ladder_kernel(name);
}

/* -- modules"""


@cache
def library() -> Path:
    """Return a fake libcuda whose table of kernels goes on in ladder_movers.c; skips without compiler or header."""
    gcc, include = fake_cuda.compiler(), fake_cuda.include()
    text = (fake_cuda.HERE / "kernels.c").read_text()
    assert TABLE_ENDS in text, "fake_cuda/kernels.c ends its table in another way than this knows"
    text = text.replace(TABLE_ENDS, TABLE_GOES_ON)
    others = [p for p in sorted(fake_cuda.HERE.glob("*.c")) if p.name != "kernels.c"]
    read = (
        *others, fake_cuda.HERE / "fake.h", fake_cuda.KERNELS / "service.cu", MORE, GEMM, ON_HOST / "device_on_host.h",
        ON_HOST / "gemm_on_host.h", ON_HOST / "gemm_variants.h",
    )  # fmt: skip
    digest = hashlib.sha256(f"{text} {gcc} {include}".encode())
    for path in (*read, *(catalogue.FOLDER / name for name in ("movers.cu", "arithmetic.cu", "gemm.cu"))):
        digest.update(path.read_bytes())
    target = Path(os.environ["XDG_CACHE_HOME"]) / "fake_cuda" / f"ladder-{digest.hexdigest()[:16]}" / "libcuda.so.1"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        source, fresh = (target.with_name(f"{os.getpid()}{end}") for end in (".c", ".so"))
        source.write_text(text)
        folders = [f"-I{f}" for f in (include, fake_cuda.KERNELS, fake_cuda.HERE, catalogue.FOLDER, ON_HOST)]
        flags = [*fake_cuda.FLAGS, "-Wno-unused", "-Wno-unknown-pragmas", "-shared"]
        command = [gcc, *flags, *folders, "-o", str(fresh), str(source), str(MORE), str(GEMM), *map(str, others)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        source.unlink()
        assert done.returncode == 0, done.stderr
        fresh.replace(target)
    return target


class LadderFake(Fake):
    """The fake with one more control: how many bytes too few its movers handle."""

    def missing(self, nbytes: int) -> None:
        self._c.ladder_missing(ctypes.c_uint64(nbytes))


@contextmanager
def fake(**settings: int) -> Iterator[LadderFake]:
    """A fresh fake driver with ``settings``."""
    made = LadderFake(library())
    made.reset()
    made.missing(0)
    made.set(**{**SMALL, **VIRTUAL, **settings})
    try:
        yield made
    finally:
        made.missing(0)
        made.reset()


@dataclasses.dataclass(frozen=True, slots=True)
class Rig:
    """Runs cases on ``fake``; ``drivers`` are those opened, the latest last."""

    fake: LadderFake
    context: Context
    drivers: list[Driver]

    def case(self, name: str, **axes: Value) -> list[Result]:
        """Run one case of ladder/``name``; see :meth:`of`."""
        return self.of("ladder", name, **axes)

    def of(self, suite: str, name: str, /, **axes: Value) -> list[Result]:
        """Run one case of ``suite``/``name`` at its first smoke values but for ``axes``, as the worker does."""
        bench = find(name, suite)
        values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
        assert bench.where is None or bench.where(values), f"no such case: {values}"
        return measure_case(bench, values, self.context)


@cache
def find(name: str, suite: str = "ladder") -> Bench:
    return load_suites().find(suite, name)


@contextmanager
def rig(patch: pytest.MonkeyPatch, context: Context, **settings: int) -> Iterator[Rig]:
    """The benches' session on a fake driver."""
    drivers: list[Driver] = []
    with fake(**settings) as made:

        def opened() -> Driver:
            drivers.append(Driver(made.path))
            return drivers[-1]

        patch.setattr(gpu_session, "open_driver", opened)
        patch.setattr(gpu_session, "keep_context", lambda driver, ordinal: None)
        patch.setattr(
            gpu_session, "image_of", lambda source, arch: fake_cuda.IMAGE if source.name == "service.cu" else IMAGE
        )
        # A busy test machine wakes the fake's threads late, and in virtual time that looks like work elsewhere.
        patch.setattr(events, "ESCAPE_S", 5.0)
        patch.setattr(gpu_link, "PEAK_BYTES", PEAK)  # copied by this machine's CPU, and more than once
        yield Rig(made, context, drivers)


@contextmanager
def device(**settings: int) -> Iterator[tuple[LadderFake, Service]]:
    """An opened device of the fake with its service kernels, for what needs no session."""
    with fake(**settings) as made:
        with Device(Driver(made.path)) as opened, Service(opened, fake_cuda.IMAGE) as service:
            yield made, service
        assert made.live() == {}


def short_context(scratch: Path) -> Context:
    """A context whose cases take three samples of any length."""
    made = Context.create(profile="smoke", scratch=scratch, seed=1)
    budget = dataclasses.replace(
        made.budget, block_seconds=0.0, quanta=0.0, fixed_samples=3, min_samples=3, cap_seconds=0.2
    )
    return dataclasses.replace(made, budget=budget)


def good(gpu: Rig, rows: list[Result]) -> dict[str, Result]:
    """Return the rows by metric; each has a value, the machine's noise apart, and nothing is left alive."""
    assert rows[0].status in HAS_VALUE - {"invalid"}, rows[0].reason
    assert rows[0].n >= 3
    assert gpu.fake.live() == {}
    return {row.metric: row for row in rows}


def refused(gpu: Rig, rows: list[Result], status: str, *words: str) -> None:
    """One row without a number, one line that says ``words``, nothing left alive."""
    (row,) = rows
    assert (row.status, row.value, row.samples) == (status, None, ()), row.reason
    assert "\n" not in row.reason
    assert all(word in row.reason for word in words), row.reason
    assert gpu.fake.live() == {}
