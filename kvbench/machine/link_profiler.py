"""Bytes over a GPU's link by its hardware counters: the vendor's profiler around a child that does one pass."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

PROGRAM = "ncu"
# Bytes the GPU read over PCIe; where a board lacks it, what left the L2 for system memory, in sectors of 32 bytes.
METRICS = {"pcie__read_bytes.sum": 1, "lts__t_sectors_aperture_sysmem_op_read_lookup_miss.sum": 32}
UNITS = {"": 1, "byte": 1, "sector": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


def command(child: Sequence[str], kernel: str, program: str = PROGRAM) -> list[str]:
    """Return the command that profiles the first launch of a kernel whose name contains ``kernel`` in ``child``."""
    return [
        program, "--csv", "--page", "raw", "--print-units", "base", "--kernel-name", f"regex:{kernel}",
        "--launch-count", "1", "--metrics", ",".join(METRICS), *child,
    ]  # fmt: skip


def read(text: str) -> tuple[float | None, str]:
    """Return (bytes, "") from the profiler's CSV of raw metrics, or None and why.

    The table begins at the line that names a metric, its second line holds units; a board leaves out, or answers with
    "n/a", what it does not count.
    """
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if any(f'"{name}"' in line for name in METRICS)), None)
    if start is None:
        said = [line.strip() for line in lines if "ERR" in line or "rror" in line]
        return None, said[0][:160] if said else "it named no metric"
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    if len(rows) < 2:
        return None, "it profiled no launch"
    units, values = rows[0], rows[1]
    for name, size in METRICS.items():
        number, unit = (values.get(name) or "").replace(",", ""), (units.get(name) or "").strip()
        if unit not in UNITS:
            continue
        try:
            return float(number) * size * UNITS[unit], ""
        except ValueError:
            continue  # this board does not count it: the next one
    return None, "the board has none of its counters"


def profile(
    child: Sequence[str], kernel: str, *, timeout_s: float = 120.0, program: str | None = None
) -> tuple[float | None, str]:
    """Run ``child`` under the profiler; return the bytes its kernel read over the link, or None and why.

    Counters are closed to ordinary users on many machines (ERR_NVGPUCTRPERM): that is a reason, not an error.
    """
    wanted = PROGRAM if program is None else program
    path = shutil.which(wanted)
    if path is None:
        return None, f"{wanted} is not installed"
    try:
        done = subprocess.run(
            command(child, kernel, path),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout_s:g} s"
    found, why = read(done.stdout)
    if found is None and done.returncode and not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        why = lines[-1][:160] if lines else f"exit code {done.returncode}"
    return found, why
