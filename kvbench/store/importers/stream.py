"""The text that STREAM (stream.c) prints: the best rate of each kernel and three times, without samples.

Follows stream.c 5.9 and 5.10 (www.cs.virginia.edu/stream). What bites: the rate is of the *best* of NTIMES - 1 rounds,
so it is no median and has a metric of its own; MB is 1e6; a copy counts 2 arrays, a triad 3, no write-allocate; a run
whose results did not validate prints its rates all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvbench.contract.result import Bytes, Scalar
from kvbench.store.importers.fields import written_number
from kvbench.store.importers.found import Figure, Found, FoundCase, measured, no_value
from kvbench.store.importers.source import Malformed, Source, lines_of

TOOL = "stream"
MARK = re.compile(r"STREAM version|Function\s+(?:Best )?Rate \(?MB/s\)?")
_ARRAYS = {"Copy": 2, "Scale": 2, "Add": 3, "Triad": 3}
_HEADER = re.compile(r"Function\s+(?:Best )?Rate \(?MB/s\)?\s+Avg time\s+Min time\s+Max time")
_ROW = re.compile(r"(Copy|Scale|Add|Triad):\s+(\S+)\s+(\S+)\s+(\S+)\s+(\S+)")
_FACTS = {
    "version": re.compile(r"STREAM version \$?Revision: ([0-9.]{1,10}) ?\$?"),
    "elements": re.compile(r"Array size = ([0-9]{1,15})\b"),
    "element_bytes": re.compile(r"This system uses ([0-9]{1,3}) bytes per"),
    "rounds": re.compile(r"Each (?:kernel will be executed|test is run) ([0-9]{1,9}) times"),
    "threads": re.compile(r"Number of Threads (?:counted|requested) = ([0-9]{1,6})\b"),
}


def parse(source: Source) -> Found:
    """Return the figures of one or several STREAM outputs in the file. Raises Malformed."""
    blocks: list[list[str]] = []
    for line in lines_of(source):
        if line.strip().startswith("STREAM version"):
            blocks.append([])
        if blocks:
            blocks[-1].append(line.strip())
    if not blocks:
        raise Malformed("no line 'STREAM version': the size of the arrays would be unknown; give the whole output")
    versions: set[str] = set()
    cases: list[FoundCase] = []
    for number, lines in enumerate(blocks, 1):
        facts = {name: found[1] for name, form in _FACTS.items() if (found := _last(form, lines)) is not None}
        versions |= {facts["version"]} if "version" in facts else set()
        cases += _block(lines, facts, f"output {number}" if len(blocks) > 1 else "the output")
    return Found(TOOL, "+".join(sorted(versions)) or None, tuple(cases))


def _last(form: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    found = None
    for line in lines:
        found = form.match(line) or found
    return found


def _block(lines: list[str], facts: Mapping[str, str], where: str) -> list[FoundCase]:
    for name in ("elements", "element_bytes"):
        if int(facts.get(name, "0")) < 1:
            raise Malformed(f"{where} does not tell its {name.replace('_', ' ')}, so its rates have no size")
    header = next((index for index, line in enumerate(lines) if _HEADER.match(line)), None)
    if header is None:
        raise Malformed(f"{where} ends before its table of rates; give the whole output")
    rows: dict[str, tuple[str, ...]] = {}
    for line in lines[header + 1 : header + 5]:
        match = _ROW.fullmatch(line)
        if match is None or match[1] in rows:
            raise Malformed(f"{where}: a row of the table is {line[:60]!r}, expected one each of {', '.join(_ARRAYS)}")
        rows[match[1]] = match.groups()[1:]
    if len(rows) != len(_ARRAYS):
        raise Malformed(f"{where} ends in its table of rates; give the whole output")
    below = lines[header + 5 :]
    failed = any(line.startswith("Failed Validation") for line in below)
    if not failed and not any(line.startswith("Solution Validates") for line in below):
        raise Malformed(f"{where} ends before 'Solution Validates'; give the whole output")
    return [_case(name, rows[name], facts, failed, where) for name in _ARRAYS]


def _case(name: str, cells: tuple[str, ...], facts: Mapping[str, str], failed: bool, where: str) -> FoundCase:
    axes: dict[str, str | int] = {
        "op": name.lower(), "elements": int(facts["elements"]), "element_bytes": int(facts["element_bytes"])
    }  # fmt: skip
    if "threads" in facts:
        axes["threads"] = int(facts["threads"])
    if failed:
        reason = "STREAM's results did not validate"
        return FoundCase(name.lower(), axes, (no_value("best_bandwidth", "B/s", "higher", "failed", reason),))
    rate, mean, least, most = (written_number(cell, f"{where}, {name}") for cell in cells)
    rounds = int(facts["rounds"]) - 1 if "rounds" in facts else None
    if rounds is not None and rounds < 1:
        raise Malformed(f"{where} tells {rounds + 1} rounds, the first of which does not count")
    moved = _ARRAYS[name] * int(facts["elements"]) * int(facts["element_bytes"])
    if moved >= 1 << 63:
        raise Malformed(f"{where} tells arrays of {facts['elements']} elements")
    if least > 1e-5 and not moved / (least + 1e-6) * 0.999 <= rate * 1e6 <= moved / (least - 1e-6) * 1.001:
        raise Malformed(f"{where}, {name}: {rate:g} MB/s is not {moved} B in {least:g} s")
    if not least <= mean <= most:
        raise Malformed(f"{where}, {name}: the mean time {mean:g} s is outside {least:g} to {most:g} s")
    told: dict[str, Scalar] = {"statistic": "best", "min_s": least, "max_s": most}
    best = Figure(
        "best_bandwidth", "B/s", "higher", rate * 1e6, rounds, detail=told, bytes=Bytes(link=moved), rate_of="link"
    )
    average = Figure("mean_time", "s", "lower", mean, rounds, detail={"statistic": "mean"})
    return FoundCase(name.lower(), axes, (measured(best, f"{where}, {name}"), measured(average, f"{where}, {name}")))
