"""T24: is the code that runs the code that was written, and was it compiled before the clock started?"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvbench.contract.case import Case
from kvbench.timing.traps.bed import Bed
from kvbench.timing.traps.record import Finding, Number, check
from kvbench.units import MiB

if TYPE_CHECKING:
    from kvbench.measure import Measure

_KERNEL = (
    "import {callee}\nimport numba\ncall = {callee}.call\n\n@numba.njit(cache=True)\ndef kernel():\n    return call()\n"
)
_CALLEE = "import numba\n\n@numba.njit\ndef call():\n    return {value}\n"
BEFORE, AFTER = 1, 2


def compiled_late(nbytes: int = MiB) -> Finding:
    """T24: what a kernel returns once its callee in another file was edited; compilations inside a timed loop."""
    bed = Bed()
    counts, row_flags = _during(bed, nbytes)
    threshold = "equal; no compilation inside a timed loop, and one made on purpose is seen"
    before, after = Number("compilations before the samples", counts[0], "1"), Number("after", counts[1], "1")
    if counts[0] != counts[1] or "compiled" in row_flags:
        return check(False, after, before, threshold, f"{counts[1] - counts[0]} compilations inside the timed loop")
    seen = _provoked(bed)
    if not seen:
        return check(False, Number("compilations marked", 0, "1"), Number("made on purpose", 1, "1"), threshold,
                     "a compilation inside a timed loop leaves no flag on the row")  # fmt: skip
    got, alone, where = _stale()
    if where:
        return check(False, Number("kernels in their own cache", 0, "1"), Number("expected", 1, "1"), threshold, where)
    return check(
        got == AFTER, Number("kernel after the edit returns", got, "1"),
        Number("its edited callee returns", AFTER, "1"), threshold,
        "machine code from before an edit was run: the cache key does not cover every source",
        f"numba's own cache alone returns {alone}", f"{counts[1]} compilations before and after a measured read",
    )  # fmt: skip


def _during(bed: Bed, nbytes: int) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Return the compile counter at the first and after the last sampled pass of a real read, and the row's flags."""
    from kvbench.kernels.compile_count import compile_count

    counts: list[int] = []

    def compile_free(case: Case, measure: Measure) -> None:
        from kvbench.kernels.stream import Stream

        buffer = measure.sources(1, nbytes, "4k")[0]
        work = Stream("read", [buffer.address], nbytes, measure.team(1))

        def run(reps: int) -> float:
            seconds = work.run(reps)
            counts.append(compile_count())
            return seconds

        counts.append(compile_count())
        measure(run, link=work.link_bytes, verify=work.verify)

    flags = bed.measured(compile_free).flags
    return (counts[0], counts[-1]), flags


def _provoked(bed: Bed) -> bool:
    """Compile a function inside a sampled call; return whether the row says so."""
    from kvbench.kernels.jit import numba

    calls: list[int] = []

    def compile_on_purpose(case: Case, measure: Measure) -> None:
        def run(reps: int) -> None:
            calls.append(reps)
            if len(calls) == 4:
                numba.njit("int64()")(lambda: 0)
            time.sleep(1e-3)

        measure(run, link=1, gate=None)

    return "compiled" in bed.measured(compile_on_purpose).flags


def _stale() -> tuple[int, int, str]:
    """Return what a cached kernel returns after its callee changed: by kvbench's cache key, by none; and a fault.

    The fault says that this process compiles elsewhere than the key decides, "" when it does not.
    """
    from kvbench.kernels import cache, jit

    config = jit.numba.core.config
    if str(config.CACHE_DIR) != str(jit.CACHE.path) or jit.CACHE.path.name != jit.CACHE.digest:
        return BEFORE, BEFORE, f"numba keeps kernels in {config.CACHE_DIR}, not under the digest of the sources"
    own = config.CACHE_DIR
    with tempfile.TemporaryDirectory(prefix="kvbench-trap-") as folder:
        sources, kept = Path(folder, "src"), Path(folder, "cache")
        sources.mkdir()
        try:
            results = []
            for value in (BEFORE, AFTER):
                _write(sources, value)
                config.CACHE_DIR = str(kept / cache.source_digest([sources]))
                results.append(_load(sources).kernel())
                config.CACHE_DIR = str(kept / "one-for-all")
                results.append(_load(sources).kernel())
        finally:
            config.CACHE_DIR = own
    return int(results[2]), int(results[3]), ""


def _write(folder: Path, value: int) -> None:
    (folder / "kvbench_trap_callee.py").write_text(_CALLEE.format(value=value), encoding="ascii")
    kernel = folder / "kvbench_trap_kernel.py"
    if not kernel.exists():  # its time stamp is all that numba looks at
        kernel.write_text(_KERNEL.format(callee="kvbench_trap_callee"), encoding="ascii")


def _load(folder: Path) -> ModuleType:
    """Import both modules afresh, as a new process would."""
    quiet, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    names = ("kvbench_trap_callee", "kvbench_trap_kernel")
    try:
        for name in names:
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            if spec is None or spec.loader is None:
                raise ImportError(name)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = quiet
        for name in names:
            sys.modules.pop(name, None)
    return module
