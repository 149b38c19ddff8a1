"""What `kvbench replay` prints for people: a line a policy and rate, and what to know about the numbers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from kvbench.contract.result import RunInfo
from kvbench.errors import printable
from kvbench.report.replay_rows import ATTAINED, STALLS, Replayed, digest_of, sustained
from kvbench.report.summary import MEANING, heading
from kvbench.report.table import PIPE_WIDTH
from kvbench.units import counted, format_value

NAMED = ("policy", "rate")
# headings of tables that fit 80 columns; where there is room two of them stand side by side
WORK = ("req/s", "tok/s", "goodput", "hits", "rejected")
LINK = ("stalled", "link in", "link out")
TIMES = ("mean", "p50", "p90", "p99")


def replay_text(runs: Sequence[RunInfo], found: Sequence[Replayed]) -> str:
    """Return the heading of each run, tables of work and times of all replays, and the lines below them."""
    parts = [heading(run) for run in runs]
    if not found:
        return "\n".join([*parts, "no replay"])
    first = found[0]
    slo = [
        f"{name} {format_value(limit / 1e6, 's')}" for name, limit in
        (("TTFT", first.axis("slo_ttft_us")), ("TPOT", first.axis("slo_tpot_us"))) if limit
    ]  # fmt: skip
    parts.append(printable(
        f"{first.axis('workload')}, {first.axis('model')} on {first.axis('machine')}, seed {first.axis('seed')}, "
        f"basis simulated; goodput under {' and '.join(slo) if slo else 'no objective'}", 400,
    ))  # fmt: skip
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    parts += _tables(found, width)
    parts += [
        printable(f"  {policy}{'' if params == 'default' else ' ' + params}: {_goodput(rate)}", 300)
        for (policy, params), rate in sustained(found).items()
    ]
    for each in found:
        if each.first.value is None:
            parts.append(printable(f"  {each.name} {_rate(each)}: {each.first.status}: {each.first.reason}", 400))
    for each in found:
        if (why := each.first.detail.get("rejection")) is not None:
            count, all_of = (each.first.detail.get(name) for name in ("rejected", "requests"))
            parts.append(printable(f"  {each.name} {_rate(each)}: {count} of {all_of} rejected, the first, {why}", 400))
    parts += [printable(line, 400) for line in _unlike(found)]
    parts += [
        f"  {counted(sum(flag in each.first.flags for each in found), 'replay')} x {printable(flag)}: "
        f"{MEANING.get(flag, 'see the row')}" for flag in sorted({f for each in found for f in each.first.flags})
    ]  # fmt: skip
    notes = sorted({str(note) for each in found if (note := each.first.detail.get("cost_notes"))})
    parts += [printable(f"  costs: {note}", 400) for note in notes]
    if (measured := first.first.detail.get("numbers_measured")) is not None:
        parts.append(printable(f"  measured on this machine: {measured}; the other numbers are a preset's", 600))
    parts.append(f"digest {digest_of(found) or '-'}")
    return "\n".join(parts)


def _unlike(found: Sequence[Replayed]) -> list[str]:
    """Return a line for each rate at which the replays did not finish equally many requests."""
    by_rate: dict[str, list[Replayed]] = {}
    for each in found:
        if each.first.value is not None:
            by_rate.setdefault(_rate(each), []).append(each)
    lines = []
    for rate, group in by_rate.items():
        served = {each.name: each.first.detail.get("finished") for each in group}
        if len(set(served.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in served.items())
            lines.append(f"  {rate}: not the same requests were served ({told}): times and rates do not compare")
    return lines


def _goodput(rate: float | None) -> str:
    if rate is None:
        return f"no rate has {ATTAINED:.0%} of the requests within the objectives"
    return f"up to {format_value(rate, 'req/s')} have {ATTAINED:.0%} of the requests within the objectives"


def _rate(each: Replayed) -> str:
    return "own rate" if each.rate is None else f"{each.rate:g}/s"


def _text(each: Replayed, metric: str, unit: str = "1") -> str:
    value = each.value(metric)
    return "-" if value is None else format_value(value, unit)


def _share(each: Replayed, metric: str) -> str:
    value = each.value(metric)
    return "-" if value is None else f"{value:.1%}"


def _tables(found: Sequence[Replayed], width: int) -> list[str]:
    """Return the tables of all replays, side by side where ``width`` columns have room for it."""
    named = [NAMED, *((each.name, _rate(each)) for each in found)]
    work = [WORK, *map(_work, found)]
    link = [LINK, *map(_link, found)]
    ttft, tpot = (
        [(f"{which} mean", *TIMES[1:]), *(_times(each, which) for each in found)] for which in ("TTFT", "TPOT")
    )
    parts: list[str] = []
    for left, right in ((work, link), (ttft, tpot)):
        both = _aligned([(*n, *a, *b) for n, a, b in zip(named, left, right, strict=True)])
        if max(map(len, both)) <= width:
            parts += ["", *both]
            continue
        for one in (left, right):
            parts += ["", *_aligned([(*n, *a) for n, a in zip(named, one, strict=True)])]
    return [*parts, ""]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return ``lines`` of cells as text: names to the left, numbers to the right."""
    shown = [[printable(cell, 100) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  " + "  ".join(
            f"{cell:<{width}}" if i < len(NAMED) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ) for line in shown
    ]  # fmt: skip


def _work(each: Replayed) -> Sequence[str]:
    return (
        _text(each, "request_rate"), _text(each, "token_rate"), _text(each, "goodput"), _share(each, "hit_rate"),
        _text(each, "rejected"),
    )  # fmt: skip


def _link(each: Replayed) -> Sequence[str]:
    stalled = _share(each, "stall_share")
    causes = {name: each.value(name) or 0.0 for name in STALLS}
    worst = max(causes, key=lambda name: causes[name])
    if causes[worst] > 0.0:
        stalled = f"{worst.removeprefix('stall_')} {stalled}"
    return stalled, _text(each, "link_in_bytes", "B"), _text(each, "link_out_bytes", "B")


def _times(each: Replayed, which: str) -> Sequence[str]:
    return [_text(each, f"{which.lower()}_{name}", "s") for name in TIMES]
