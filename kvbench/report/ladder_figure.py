"""The ladder picture: the tiers of this machine, the paths to them, and how much of its ceiling each path gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.contract.result import Scalar
from kvbench.errors import printable
from kvbench.report.figures import DOT, LIGHT, SERIES, Figure, Spec, described, framed
from kvbench.report.pooled import Pooled, showable
from kvbench.report.table import SAMPLE_WORDS, axes_text
from kvbench.units import format_bytes, format_value

# bench of the ladder -> the axes whose every value is a path of its own; of the rest the best case stands
PATHS: Mapping[str, tuple[str, ...]] = {
    "device_bandwidth": ("op", "device"), "link": ("pair", "direction", "device"), "host_bandwidth": ("op",),
    "host_gather": ("op",), "numa": ("cpu_node", "memory_node"), "file_read": ("method",),
}  # fmt: skip
ORDER = ("hbm", "pinned", "managed", "pageable", "dram", "file")
# such a row was served by something else than the path it names
ASTRAY = frozenset({"in_llc", "in_l2", "file_in_memory", "cache_not_dropped", "link_below_unique", "misplaced"})
STEP, WHOLE, BOX, GAUGE = 28, 880, 220, 150  # pixels: a line, the picture, a tier, a whole gauge


@dataclass(frozen=True, slots=True)
class Rung:
    """One path: the tier it leads to, the pair or tier as named, and the measured row."""

    tier: str
    path: str
    pooled: Pooled


def rungs(rows: Sequence[Pooled]) -> list[Rung]:
    """Return the paths among the ladder's primary rows, the best case of each, nearest tier first."""
    best: dict[tuple[object, ...], Rung] = {}
    for pooled in rows:
        row = pooled.row
        if row.suite != "ladder" or row.bench not in PATHS or not pooled.primary or not pooled.drawable:
            continue
        if row.basis != "measured" or row.unit != "B/s" or row.value is None or not ASTRAY.isdisjoint(row.flags):
            continue
        key = (row.bench, *(row.axes.get(name) for name in PATHS[row.bench]))
        rung = Rung(*_names(row.bench, row.axes), pooled)
        known = best.get(key)
        # a clean case beats a disturbed one, whatever they gave
        if known is None or (not pooled.marked, row.value) > (not known.pooled.marked, known.pooled.row.value or 0.0):
            best[key] = rung
    benches = list(PATHS)
    return sorted(
        best.values(),
        key=lambda rung: (ORDER.index(rung.tier.partition("@")[0]), rung.tier, benches.index(rung.pooled.row.bench)),
    )


def _names(bench: str, axes: Mapping[str, Scalar]) -> tuple[str, str]:
    if bench == "device_bandwidth":
        return "hbm", "hbm"
    if bench == "file_read":
        return "file", "dram:file"
    if bench == "numa":
        return f"dram@{axes.get('memory_node')}", f"dram@{axes.get('cpu_node')}:dram@{axes.get('memory_node')}"
    if bench == "link":
        far = str(axes.get("pair")).partition(":")[2]
        return (far if far in ORDER else "dram"), str(axes.get("pair"))
    return "dram", "dram"


def latencies(rows: Sequence[Pooled]) -> dict[str, str]:
    """Return tier -> ``97.1 ns at 256 MiB``: one dependent load in the largest buffer measured."""
    found: dict[str, tuple[int, str]] = {}
    for pooled in rows:
        row, size = pooled.row, pooled.row.axes.get("bytes")
        tier = {"host_latency": "dram", "device_latency": "hbm"}.get(row.bench) if row.suite == "ladder" else None
        if tier is None or not pooled.drawable or pooled.marked or not ASTRAY.isdisjoint(row.flags):
            continue
        if row.unit == "s" and pooled.primary and isinstance(size, int) and row.value and row.basis == "measured":
            text = f"{format_value(row.value, 's')} a load at {format_bytes(size)}"
            found[tier] = max(found.get(tier, (0, "")), (size, text))
    return {tier: text for tier, (_, text) in found.items()}


def ladder_figure(rows: Sequence[Pooled], facts: Mapping[str, Any], side: str, number: int) -> Figure | None:
    """Return the picture of one side's machine; None when no path of the ladder was measured. ``facts``: of the run."""
    found = rungs(rows)
    if not found:
        return None
    late = latencies(rows)
    boxes: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    for index, rung in enumerate(found):
        if not boxes or boxes[-1]["tier"] != rung.tier:
            boxes.append({"tier": rung.tier, "top": index, "bottom": index + 1})
        boxes[-1]["bottom"] = index + 1
        lines.append(_line(index, rung))
    for box in boxes:
        size = capacity(box["tier"], facts)
        box |= {"name": printable(box["tier"], 30), "left": 0, "right": BOX - 30}
        box["text"] = [part for part in (size, late.get(box["tier"].partition("@")[0], "")) if part]
        box["middle"] = (box["top"] + box["bottom"]) / 2
    height = STEP * len(found)
    y: Spec = {
        "type": "quantitative",
        "scale": {"domain": [0, len(found)], "reverse": True, "nice": False},
        "axis": None,
    }
    x: Spec = {"type": "quantitative", "scale": {"domain": [0, WHOLE], "nice": False}, "axis": None}

    def at(channel: Spec, name: str) -> Spec:
        return {**channel, "field": name}

    def text(value: str, where: str, up: str, **mark: Any) -> Spec:
        return {
            "mark": {"type": "text", "align": "left", "baseline": "middle", "aria": False, **mark},
            "encoding": {"x": at(x, where), "y": at(y, up), "text": {"field": value}},
        }

    of_boxes: Spec = {"data": {"values": boxes}}
    body: Spec = {
        "width": WHOLE, "height": height, "data": {"values": lines},
        "layer": [
            {
                **of_boxes, "mark": {"type": "rect", "fill": LIGHT["gauge"], "stroke": LIGHT["soft"], "cornerRadius": 5,
                                     "y2Offset": -4, "yOffset": 4, "aria": False},
                "encoding": {"x": at(x, "left"), "x2": {"field": "right"}, "y": at(y, "top"),
                             "y2": {"field": "bottom"}},
            },
            {**of_boxes, **text("name", "left", "middle", dx=10, dy=-7, fontWeight="bold", fontSize=12)},
            {**of_boxes, "transform": [{"calculate": "join(datum.text, ', ')", "as": "said"}],
             **text("said", "left", "middle", dx=10, dy=8, fontSize=9.5, limit=BOX - 46, color=LIGHT["soft"])},
            {
                "mark": {"type": "rule", "stroke": LIGHT["soft"], "aria": False},
                "encoding": {"x": at(x, "from"), "x2": {"field": "start"}, "y": at(y, "y")},
            },
            {
                "mark": {"type": "bar", "fill": LIGHT["gauge"], "height": 12},
                "encoding": {"x": at(x, "start"), "x2": {"field": "full"}, "y": at(y, "y"),
                             "description": {"field": "tip"}},
            },
            {
                "mark": {"type": "bar", "height": 12, "fill": SERIES[0], "aria": False},
                "transform": [{"filter": "datum.known"}],
                "encoding": {"x": at(x, "start"), "x2": {"field": "end"}, "y": at(y, "y")},
            },
            {
                "mark": {"type": "rule", "stroke": LIGHT["ink"], "strokeWidth": 1.5, "yOffset": -8, "y2Offset": 8,
                         "aria": False},
                "transform": [{"filter": "datum.known"}],
                "encoding": {"x": at(x, "full"), "y": at(y, "y"), "y2": {"field": "y"}},
            },
            text("head", "words", "y", dy=-6, fontWeight="bold", fontSize=11, limit=WHOLE - BOX - GAUGE - 30),
            text("under", "words", "y", dy=7, fontSize=10, limit=WHOLE - BOX - GAUGE - 30, color=LIGHT["soft"]),
        ],
    }  # fmt: skip
    title = f"the ladder of {side}"
    notes = (
        "bar: measured, against its first ceiling (the line at the end); empty: no ceiling is known. "
        "Of each path the best case measured.",
    )
    words = " ".join(f"{line['head']} {line['under']}" for line in lines)
    return Figure(f"ladder-{number}", "machine", printable(title, 160), notes, framed(title, "", body),
                  printable(words, 8_000))  # fmt: skip


def _line(index: int, rung: Rung) -> dict[str, Any]:
    row = rung.pooled.row
    share = row.fraction if row.fraction is not None and row.ceilings and showable(row.fraction) else None
    start = BOX
    ceiling = row.ceilings[0] if row.ceilings else None
    against = "no ceiling"
    if ceiling is not None and share is not None:
        bound = "" if ceiling.value is None else f"{format_value(ceiling.value, row.unit)} "
        against = f"{share:.0%} of {bound}{ceiling.name} ({ceiling.kind})"
    state = "" if not rung.pooled.marked else f" {row.status}"
    name = " ".join(str(row.axes[axis]) for axis in PATHS[row.bench] if axis in ("op", "direction", "method"))
    flags = [f"[{flag}]" for flag in row.flags if flag not in SAMPLE_WORDS]
    value = format_value(row.value, row.unit) if row.value is not None else "-"
    return {
        "y": index + 0.5, "from": BOX - 30, "start": start, "full": start + GAUGE,
        "end": start + GAUGE * (0.0 if share is None else min(share, 1.15)), "known": share is not None,
        "words": start + GAUGE * 1.15 + 14, "tip": DOT.join((printable(rung.path, 60), described(rung.pooled, ("",)))),
        "head": printable(f"{rung.path} {row.bench} {name}: {value}{state}", 120),
        "under": printable(f"{against}; {' '.join((axes_text(row, PATHS[row.bench]), *flags))}", 160),
    }  # fmt: skip


def capacity(tier: str, facts: Mapping[str, Any]) -> str:
    """Return how large a tier is by what the run recorded; empty where it did not."""
    name, _, node = tier.partition("@")
    size: object = None
    if name == "hbm":
        boards = facts.get("gpus")
        first = boards[0] if isinstance(boards, list) and boards else None
        size = first.get("memory_bytes") if isinstance(first, dict) else None
    elif node:
        nodes = facts.get("nodes")
        known = [n for n in nodes if isinstance(n, dict)] if isinstance(nodes, list) else []
        size = next((n.get("memory_bytes") for n in known if str(n.get("id")) == node), None)
    elif name in ("dram", "pageable"):
        size = facts.get("memory_bytes")
    return format_bytes(size) if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else ""
