"""The text that Intel Memory Latency Checker prints: matrices, peak bandwidths, loaded latencies, without samples.

Follows outputs of MLC 3.5 to 3.11b. What bites: MB/sec is 1e6 (the text says so); a matrix has fewer rows than columns
where a node has no CPU, so only what follows it says that it is whole; options change what is measured and are part of
the case; idle latencies are sequential or random, which older versions do not tell. Cache-to-cache latencies stay out:
they are no tier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.contract.result import Scalar
from kvbench.store.importers.fields import written_number
from kvbench.store.importers.found import Figure, Found, FoundCase, axis_value, left_out, measured, no_value
from kvbench.store.importers.source import Malformed, Source, lines_of

TOOL = "mlc"
MARK = re.compile(r"Intel\(R\) Memory Latency Checker")
_BANNER = re.compile(r"Intel\(R\) Memory Latency Checker.* - v([0-9][0-9A-Za-z.\-]{0,30})\s*$")
_ARGUMENTS = re.compile(r"Command line parameters:(.*)")
_IDLE_ONE = re.compile(r"Each iteration took\s+(\S+)\s+(?:core|base frequency) clocks\s*\(\s*(\S+)\s*ns\s*\)")
_PEAK_ROW = re.compile(r"(ALL Reads|3:1 Reads-Writes|2:1 Reads-Writes|1:1 Reads-Writes|Stream-triad like)\s*:\s*(\S+)")
_PEAK_LAST = "Stream-triad like"
_NODES = re.compile(r"Numa node((?:\s+[0-9]{1,4})+)")
_LOADED_ROW = re.compile(r"([0-9]{1,9})\s+(\S+)\s+(\S+)")
_LAST_DELAY = 20000  # of the delays MLC takes without -g
_LEFT_OUT = "Measuring cache-to-cache transfer latency"


@dataclass(frozen=True, slots=True)
class Section:
    """The lines of one measurement, its heading first. ``ended``: something follows it in the file."""

    lines: Sequence[str]
    where: str
    ended: bool
    axes: Mapping[str, str | int]
    detail: Mapping[str, Scalar]


def parse(source: Source) -> Found:
    """Return the figures of one or several MLC outputs in the file. Raises Malformed."""
    lines = lines_of(source)
    starts = [index for index, line in enumerate(lines) if _BANNER.match(line.strip())]
    if not starts:
        raise Malformed("no line 'Intel(R) Memory Latency Checker - vN'; give the whole output")
    versions: set[str] = set()
    cases: list[FoundCase] = []
    unread: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        banner = _BANNER.match(lines[start].strip())
        assert banner is not None
        versions.add(banner[1])
        _block(lines[start:end], start, end < len(lines), cases, unread)
    return Found(TOOL, "+".join(sorted(versions)), tuple(cases), notices=left_out(unread))


def _block(lines: Sequence[str], first: int, more: bool, cases: list[FoundCase], unread: list[str]) -> None:
    """Read the output of one call of mlc into ``cases``; headings that are not read go to ``unread``."""
    arguments = next((match[1].strip() for line in lines if (match := _ARGUMENTS.match(line.strip()))), None)
    axes: dict[str, str | int] = {} if arguments is None else {"args": axis_value(arguments)}
    heads = [index for index, line in enumerate(lines) if line.startswith(("Measuring ", "Each iteration took"))]
    detail: dict[str, Scalar] = {}
    for line in lines[: heads[0] if heads else len(lines)]:
        if line.startswith("Using buffer size of"):
            detail["buffer"] = line.removeprefix("Using buffer size of ")
        if "nable to modify prefetchers" in line:
            detail["prefetchers"] = "could not be switched off"
    seen: list[str] = []
    for start, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        name = next((name for name in _READERS if lines[start].startswith(name)), None)
        seen.append(name or lines[start])
        if name is None:
            unread.append(lines[start])
            continue
        where = f"line {first + start + 1}, {lines[start][:50]!r}"
        section = Section(lines[start:end], where, more or end < len(lines), axes, detail)
        cases += _READERS[name](section)
    if arguments is None:  # a call without options measures all of these, in this order
        missing = [
            name for name in (*_FULL, _LEFT_OUT) if name not in [s if s in _READERS else s[: len(name)] for s in seen]
        ]
        if missing:
            raise Malformed(f"the output ends before {missing[0]!r}; give all of it, or that of single options")


def _matrix(section: Section) -> tuple[list[int], list[tuple[int, list[str]]]]:
    """Return the nodes of the columns and (node, cells) of each row. Raises Malformed for one that is not whole."""
    header = next((i for i, line in enumerate(section.lines) if _NODES.fullmatch(line.strip())), None)
    if header is None:
        raise Malformed(f"{section.where}: the matrix is missing; give the whole output")
    found = _NODES.fullmatch(section.lines[header].strip())
    assert found is not None
    columns = [int(word) for word in found[1].split()]
    rows: list[tuple[int, list[str]]] = []
    ended = section.ended
    for line in section.lines[header + 1 :]:
        words = line.split()
        if not words or not words[0].isdecimal() or len(words[0]) > 4:
            ended = True
            break
        if len(words) != len(columns) + 1:
            raise Malformed(f"{section.where}: a row has {len(words) - 1} values, expected {len(columns)}")
        rows.append((int(words[0]), words[1:]))
    if not rows or (len(rows) < len(columns) and not ended):
        raise Malformed(
            f"{section.where}: {len(rows)} rows of {len(columns)} columns and the file ends; if that is all, "
            "end it with an empty line"
        )
    return columns, rows


def _matrix_cases(section: Section, test: str, metric: str, axes: Mapping[str, str | int]) -> list[FoundCase]:
    columns, rows = _matrix(section)
    out = []
    for row, cells in rows:
        for column, cell in zip(columns, cells, strict=True):
            where = f"{section.where}, node {row} to {column}"
            place = {**axes, "from_node": row, "to_node": column, **section.axes}
            if cell in ("-", "N/A"):
                skipped = _none(metric, f"the file says {cell}")
                out.append(FoundCase(test, place, (skipped,)))
                continue
            out.append(FoundCase(test, place, (_figure(metric, cell, section, where),)))
    return out


def _none(metric: str, reason: str) -> Figure:
    if metric == "latency":
        return no_value("latency", "s", "lower", "skipped", reason)
    return no_value("bandwidth", "B/s", "higher", "skipped", reason)


def _figure(metric: str, text: str, section: Section, where: str) -> Figure:
    """Return a latency printed in ns or a bandwidth printed in MB/s of 1e6 B."""
    if metric == "latency":
        seconds = written_number(text, where, -9)
        return measured(Figure("latency", "s", "lower", seconds, detail=section.detail), where)
    rate = written_number(text, where, 6)
    return measured(Figure("bandwidth", "B/s", "higher", rate, detail=section.detail), where)


def _traffic(section: Section) -> dict[str, str | int]:
    told = next((line for line in section.lines if re.fullmatch(r"Using .* traffic type", line)), None)
    return {"traffic": axis_value(told.removeprefix("Using ").removesuffix(" traffic type"))} if told else {}


def _idle(section: Section) -> list[FoundCase]:
    found = re.search(r"for (sequential|random) access", section.lines[0])
    return _matrix_cases(section, "latency_matrix", "latency", {"access": found[1] if found else "not told"})


def _nodes(section: Section) -> list[FoundCase]:
    return _matrix_cases(section, "bandwidth_matrix", "bandwidth", _traffic(section))


def _peak(section: Section) -> list[FoundCase]:
    test = "max_bandwidth" if "Maximum" in section.lines[0] else "peak_bandwidth"
    rows = {match[1]: match[2] for line in section.lines if (match := _PEAK_ROW.fullmatch(line.strip()))}
    if _PEAK_LAST not in rows:
        raise Malformed(f"{section.where}: the table ends before {_PEAK_LAST!r}; give the whole output")
    out = []
    for mix, cell in rows.items():
        where = f"{section.where}, {mix}"
        figure = _figure("bandwidth", cell, section, where)
        out.append(FoundCase(test, {"mix": mix, **section.axes}, (figure,)))
    return out


def _loaded(section: Section) -> list[FoundCase]:
    rule = next((i for i, line in enumerate(section.lines) if re.fullmatch(r"={8,}", line.strip())), None)
    if rule is None:
        raise Malformed(f"{section.where}: the table is missing; give the whole output")
    rows: list[tuple[str, ...]] = []
    ended = section.ended
    for line in section.lines[rule + 1 :]:
        match = _LOADED_ROW.fullmatch(line.strip())
        if match is None:
            if line and line.split()[0].isdecimal():
                raise Malformed(f"{section.where}: a row is {line.strip()[:60]!r}, expected delay, latency, bandwidth")
            ended = True
            break
        rows.append(match.groups())
    if not rows or not (ended or int(rows[-1][0]) == _LAST_DELAY):
        raise Malformed(f"{section.where}: the file ends in the table; if that is all, end it with an empty line")
    out = []
    for delay, latency, bandwidth in rows:
        where = f"{section.where}, delay {delay}"
        axes = {"delay": int(delay), **_traffic(section), **section.axes}
        figures = (
            _figure("latency", latency, section, where),
            _figure("bandwidth", bandwidth, section, where),
        )
        out.append(FoundCase("loaded_latency", axes, figures))
    return out


def _idle_one(section: Section) -> list[FoundCase]:
    found = _IDLE_ONE.fullmatch(section.lines[0])
    if found is None:
        raise Malformed(f"{section.where}: expected 'Each iteration took N core clocks ( N ns)'")
    figure = _figure("latency", found[2], section, section.where)
    return [FoundCase("idle_latency", section.axes, (figure,))]


_FULL: Mapping[str, Callable[[Section], list[FoundCase]]] = {
    "Measuring idle latencies": _idle,
    "Measuring Peak Injection Memory Bandwidths": _peak,
    "Measuring Memory Bandwidths between nodes": _nodes,
    "Measuring Loaded Latencies": _loaded,
}
_READERS: Mapping[str, Callable[[Section], list[FoundCase]]] = {
    **_FULL, "Measuring Maximum Memory Bandwidths": _peak, "Each iteration took": _idle_one,
}  # fmt: skip
