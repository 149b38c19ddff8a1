"""What `run` and `show` print for people: the table, the curves with their fits, and what to know about the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.analysis.curves import BYTE_AXES
from kvbench.contract.result import Bytes, Result, RunInfo, Scalar
from kvbench.errors import printable
from kvbench.report.chart import curves
from kvbench.report.table import SHOWABLE, axes_text, results_table
from kvbench.units import counted, format_duration


def run_summary(
    runs: Sequence[RunInfo], rows: Sequence[tuple[str, Result]], canaries: Sequence[tuple[str, Result]], *,
    charts: bool = True, show_canaries: bool = False, cut: float = 0.0,
) -> str:  # fmt: skip
    """Return the report of ``runs``; with several runs each has its own table, oldest first.

    ``cut``: seconds of a case of the last run that a signal ended.
    """
    parts: list[str] = []
    for run in runs:
        own = [row for uuid, row in rows if uuid == run.uuid]
        mine = [row for uuid, row in canaries if uuid == run.uuid]
        parts.append(heading(run))
        if show_canaries and mine:
            parts.append(results_table(mine, title="canaries"))
        if own:
            parts.append(results_table(own))
        if charts:
            parts.extend(curves([_shown(row) for row in own if _drawable(row)]))
        parts.append(footer(own, mine, cut if run is runs[-1] else 0.0))
    return "\n".join(parts)


def heading(run: RunInfo) -> str:
    """Return the lines that say what, where and when."""
    label = f" label {run.label!r}" if run.label else ""
    resumed = ", resumed" if run.resumed else ""
    # of an imported run every word is somebody else's
    first = (
        f"run {run.uuid[:8]} (group {run.group[:8]}{label}) {run.started_at[:19]}Z, profile {run.profile}, "
        f"{run.status}{resumed}"
    )
    second = f"hardware {run.hw_class}, environment {run.env_digest}, code {short_code(run.git)}"
    return f"{printable(first, 600)}\n{printable(second, 1000)}"


def _drawable(row: Result) -> bool:
    """Return whether a chart can place ``row``: rows that contradict themselves may be in an older database."""
    sizes = [row.resolved.get(name, size) for name, size in row.axes.items() if name in BYTE_AXES]
    sizes += [getattr(row.bytes, name) for name in Bytes.__slots__]
    return (
        row.value is not None and 1 / SHOWABLE < row.value < SHOWABLE
        and (row.seconds is None or 1 / SHOWABLE < row.seconds < SHOWABLE)
        and (row.rate_of is None or row.rate_of in Bytes.__slots__)
        and all(not isinstance(size, int) or size >= 0 for size in sizes)
    )  # fmt: skip


def _shown(row: Result) -> Result:
    """Return ``row`` with the words that head its chart made printable."""
    axes: dict[str, Scalar] = {printable(k): printable(v) if isinstance(v, str) else v for k, v in row.axes.items()}
    resolved = {printable(k): printable(v) if isinstance(v, str) else v for k, v in row.resolved.items()}
    names = {name: printable(getattr(row, name)) for name in ("suite", "bench", "metric", "unit")}
    return row.with_(axes=axes, resolved=resolved, **names)


def short_code(git: str | None) -> str:
    """Return the first 12 digits of the revision, and whether the tree differed from it."""
    if git is None:
        return "unknown"
    revision, dash, state = git.partition("-")
    return revision[:12] + dash + state


def footer(rows: Sequence[Result], canaries: Sequence[Result], cut: float = 0.0) -> str:
    """Return one line of counts, and one per thing that makes rows less trustworthy; ``cut``: see run_summary."""
    counts = Counter(row.status for row in rows)
    line = ", ".join(f"{counts[status]} {status}" for status in sorted(counts)) or "no rows"
    walls = [row.detail.get("case_wall_s") for row in [*rows, *canaries]]
    # detail holds whatever a file says: no case took thirty years
    seconds = sum(wall for wall in walls if isinstance(wall, int | float) and 0 < wall < 1e9) + cut
    lines = [f"{counted(len(rows), 'row')}: {line}; {format_duration(seconds)} in cases"]
    flags = Counter(flag for row in rows for flag in row.flags)
    lines += [
        f"  {count} x {printable(flag)}: {MEANING.get(flag, 'see the row')}" for flag, count in sorted(flags.items())
    ]
    disturbed = [printable(f"{row.bench} {axes_text(row)}") for row in canaries if row.status != "ok"]
    if disturbed:
        lines.append(f"  canaries not ok: {', '.join(disturbed)}: the machine was not quiet; see --canaries")
    return "\n".join(lines)


MEANING = {
    "in_llc": "working set below four last-level caches: partly a cache number",
    "llc_unknown": "the last-level cache size could not be read; 32 MiB assumed",
    "unpinned": "a measuring thread could not be pinned",
    "tainted": "more than a tenth of the samples were disturbed",
    "gate_off": "run-queue delay could not be read, so disturbed samples were not set aside",
    "short_samples": "samples shorter than the clock wants",
    "first_sample_dropped": "the first sample was far above the median and set aside",
    "drifting": "the second half of the samples differs from the first",
    "autocorrelated": "neighbouring samples depend on each other; the interval is that of block medians",
    "bimodal": "two groups of samples: the machine has two states",
    "above_ceiling": "more than 1.05 x a measured ceiling after a retake",
    "unusable_windows": "some timed windows came back as 0 s",
    "thp_partial": "only part of the buffer lies in huge pages",
    "thp_in_4k": "huge pages appeared in a buffer that asked for base pages",
    "unbound": "binding memory to its node was refused",
    "misplaced": "pages lie outside the node asked for",
    "pages_unverified": "the page size obtained could not be read back",
    "nodes_unknown": "the node of the pages could not be read back",
    "steal": "the hypervisor took CPU time in the window",
    "cpu_pressure": "tasks waited for a CPU in the window",
    "memory_pressure": "tasks waited for memory in the window",
    "preempted": "measuring threads were preempted",
    "migrated": "pages moved between nodes in the window",
    "swapped": "pages were swapped in the window",
    "throttled": "the cgroup quota throttled the window",
    "foreign_load": "other processes were busy on the measured CPUs",
    "clock_moved": "the core clock moved in the window",
    "power_capped": "the power limit held the GPU's clock down in the window",
    "pcie_downshift": "the PCIe link ran below its maximum in the window",
    "pcie_replay": "the PCIe link resent packets in the window",
    "gpu_lost": "the GPU stopped answering",
    "compiled": "a kernel was compiled in the window",
    "larger_pass": "one page is larger than the bytes asked for; detail.pass_bytes has what a pass moved",
    "no_law": "no law describes these sizes: its parameters are not quoted",
    "buffered_fallback": "the file system takes no direct reads; they went through the page cache, dropped before",
    "file_in_memory": "the scratch file lies on a file system that is memory: no device takes part",
    "cache_not_dropped": "part of the file stayed in the page cache",
    "cache_unknown": "whether the page cache was dropped could not be read back",
    "direct_unproven": "whether O_DIRECT bypasses the cache here could not be proven",
    "link_below_unique": "storage delivered less than was read: a cache served the rest",
    "below_healthy": "far below what healthy machines of this kind give",
    "left_running": "the case left processes running, which were killed when it ended",
    "small_window": "the timed windows are less than a tenth of the calls; the rest is left out by the bench",
    "crowded": "more threads than CPUs: they wait for each other, so waiting says nothing about the machine",
    "link_unmeasured": "the kernel's read counter could not be used; link bytes are those asked for, or absent",
    "in_l2": "the GPU's L2 serves part of the working set",
    "gpu_unwatched": "NVML did not tell the GPU's state in the window",
    "overlap_partial": "both directions were not under way for the whole window",
    "copy_not_covering": "the copy was not under way for the whole of what it stands beside",
    "not_in_flight": "what should have run beside it was not under way for long enough",
    "copies_behind": "the copying thread did not keep the rate asked for",
    "stand_in": "copies in host memory stand in for those of a link",
    "serialised": "the two sides overlapped less than half of what the schedule allows",
    "no_plateau": "only the largest quota reached the plateau: more blocks might reach more",
    "rejected": "requests were rejected, detail rejection says why; rates and latencies are those of the others",
    "imported": "another tool measured it; detail.origin says which, and the file",
    "no_samples": "the file holds no single samples",
    "no_interval": "the file gives no interval of the value",
    "n_unknown": "the file does not tell how many samples are behind the value",
    "no_size": "the file does not tell how many bytes were moved",
    "mean_of_iterations": "each sample is a mean over many iterations",
}
