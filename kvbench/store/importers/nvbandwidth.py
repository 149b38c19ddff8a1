"""``nvbandwidth -j``: one matrix of bandwidths or latencies a test case, as text, without samples.

Follows json_output.cpp of NVIDIA/nvbandwidth. What bites: cells are strings or "N/A"; the unit stands in the
description only; a waived test has no matrix; a bidirectional GPU to GPU test appends three matrices (first, second,
total) to one field and leaves the description and sum of the last; an error adds a second entry of the same name; the
buffer size and the number of samples are not in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from kvbench.contract.result import Better
from kvbench.store.importers.fields import Fields, short, written_number
from kvbench.store.importers.found import Figure, Found, FoundCase, left_out, measured, no_value
from kvbench.store.importers.source import Malformed, Source, json_of

Matrix = list[list[str | None]]  # cells as they stand, None for N/A

TOOL = "nvbandwidth"
MARK = re.compile(r'"nvbandwidth"\s*:\s*\{')
_UNITS: Mapping[str, tuple[str, str, Better, int]] = {
    "GB/s": ("bandwidth", "B/s", "higher", 9), "ns": ("latency", "s", "lower", -9),
}  # fmt: skip
_UNIT = re.compile(r"\((GB/s|ns)\)\s*$")
_WITHOUT = {"waived": "skipped", "not found": "skipped", "running": "failed", "error": "failed"}
_ROOT = {
    "version", "git_version", "Driver Version", "CUDA Runtime Version", "GPU Device list", "GPU Device info",
    "Hostname", "error", "warning", "testcases",
}  # fmt: skip
_TEST = {"name", "status", "bandwidth_description", "bandwidth_matrix", "sum", "min", "max", "average", "error"}
_PARTS = ("first", "second", "total")
_PRINTED = 1e-4  # cells carry six digits


def parse(source: Source) -> Found:
    """Return the figures of the file. Raises Malformed."""
    document = Fields(json_of(source))
    root = document.child("nvbandwidth")
    tests = root.children("testcases")
    error = root.word("error") if root.has("error") else ""
    if not tests:
        raise Malformed(f"the file holds no test case{f'; nvbandwidth said: {error}' if error else ''}")
    ended = {test.word("name") for test in tests if test.word("status").lower() != "running"}
    cases: list[FoundCase] = []
    for test in tests:
        # an error adds an entry and leaves the one of the start behind
        if test.word("status").lower() != "running" or test.word("name") not in ended:
            cases += _cases(test)
    notices = [f"nvbandwidth said: {text}" for text in (error, root.raw("warning")) if isinstance(text, str) and text]
    devices = [device for device in root.items("GPU Device list") if isinstance(device, str)]
    env = {name: root.raw(name) for name in ("Driver Version", "CUDA Runtime Version", "git_version") if root.has(name)}
    unknown = [*document.others({"nvbandwidth"}), *root.others(_ROOT), *(n for t in tests for n in t.others(_TEST))]
    return Found(
        TOOL, root.word("version") if root.has("version") else None, tuple(cases),
        machine={"gpus": devices} if devices else None, env=env, notices=(*notices, *left_out(unknown)),
    )  # fmt: skip


def _cases(test: Fields) -> list[FoundCase]:
    name, status = test.word("name"), test.word("status")
    if not name.strip():
        raise Malformed(f"{test.at('name')} is blank")
    if status.lower() in _WITHOUT:
        reason = f"nvbandwidth says {status}"
        reason += f": {test.word('error')}" if test.has("error") else ""
        metric, unit, better, _ = _UNITS["ns" if "latency" in name else "GB/s"]
        failed = _WITHOUT[status.lower()] == "failed"
        return [FoundCase(name, {}, (no_value(metric, unit, better, "failed" if failed else "skipped", reason),))]
    if status != "Passed":
        raise Malformed(f"{test.at('status')} is {short(status)}, expected Passed, Waived, Running, Not Found or Error")
    description = test.word("bandwidth_description")
    unit_found = _UNIT.search(description)
    matrix = _matrix(test)
    if unit_found is None:
        reason = f"the file names no unit: {description}"
        return [FoundCase(name, {}, (no_value("bandwidth", "B/s", "higher", "skipped", reason),))]
    metric, unit, better, power = _UNITS[unit_found[1]]
    blocks = _blocks(test, description, matrix)
    out = []
    for part, block in zip(_PARTS if len(blocks) == 3 else ("",), blocks, strict=True):
        for row, cells in enumerate(block):
            for column, cell in enumerate(cells):
                axes: dict[str, str | int] = {"row": row, "column": column} | ({"part": part} if part else {})
                where = f"{test.at('bandwidth_matrix')}[{row}][{column}]"
                if cell is None:
                    figure = no_value(metric, unit, better, "skipped", "the file says N/A")
                else:
                    said = {"description": description}
                    value = written_number(cell, where, power)
                    figure = measured(Figure(metric, unit, better, value, flags=("no_size",), detail=said), where)
                out.append(FoundCase(name, axes, (figure,)))
    return out


def _matrix(test: Fields) -> Matrix:
    path = test.at("bandwidth_matrix")
    rows: Matrix = []
    for index, row in enumerate(test.items("bandwidth_matrix")):
        if not isinstance(row, list) or not row:
            raise Malformed(f"{path}[{index}] is {short(row)}, expected a row of the matrix")
        for column, cell in enumerate(row):
            if cell != "N/A":
                written_number(cell, f"{path}[{index}][{column}]")
        if rows and len(row) != len(rows[0]):
            raise Malformed(f"{path}[{index}] has {len(row)} cells, the rows before {len(rows[0])}")
        rows.append([None if cell == "N/A" else cell for cell in row])
    if not rows:
        raise Malformed(f"{path} is missing in a test that passed")
    return rows


def _blocks(test: Fields, description: str, matrix: Matrix) -> list[Matrix]:
    """Return the matrices that were appended to each other: one, or first, second and their total.

    The sum the file gives is of the last one and says whether that reading is right. Raises Malformed where it is not.
    """
    count = 3 if "Total bandwidth" in description and len(matrix) == 3 * len(matrix[0]) else 1
    size = len(matrix) // count
    blocks = [matrix[start : start + size] for start in range(0, len(matrix), size)]
    if test.has("sum"):
        total = math.fsum(float(cell) for row in blocks[-1] for cell in row if cell is not None)
        if not math.isclose(total, test.number("sum"), rel_tol=_PRINTED, abs_tol=1e-6):
            raise Malformed(f"{test.at('sum')} is {test.number('sum'):g}, but its matrix adds up to {total:g}")
    if count == 3:
        for first, second, whole in zip(*blocks, strict=True):
            for one, two, both in zip(first, second, whole, strict=True):
                if (one is None, two is None) != (both is None, both is None) or not math.isclose(
                    float(one or 0) + float(two or 0), float(both or 0), rel_tol=_PRINTED, abs_tol=1e-6
                ):
                    raise Malformed(f"{test.at('bandwidth_matrix')}: a total is not the sum of its two directions")
    return blocks
