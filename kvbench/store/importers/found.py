"""What an importer hands on: figures under a test's name, in SI units, with what the file says and what it does not."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.contract.axis import MAX_VALUE_CHARS
from kvbench.contract.case import case_digest
from kvbench.contract.result import Better, Bytes, Result, Scalar, Status
from kvbench.errors import printable
from kvbench.store.importers.source import Malformed

SUITE = "imported"
MAX_SAMPLES = 1000
MAX_NAME_CHARS = 200
MAX_FIGURES = 200_000
# Axes that mean something in kvbench (bytes are drawn as sizes, curves run over them); a stranger's need not
OUR_AXES = frozenset({
    "bytes", "fragment", "block", "device", "threads", "node", "pages", "op", "order", "pair", "direction", "transport",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a case: ``value`` in SI ``unit``, None with a ``status`` that has none and a ``reason``.

    ``n``: how many samples are behind it, None where the file does not say. ``samples``: seconds of one operation each,
    all of them. ``seconds``: the median of one operation where the file has a median.
    """

    metric: str
    unit: str
    better: Better
    value: float | None
    n: int | None = None
    status: Status = "ok"
    reason: str = ""
    seconds: float | None = None
    samples: Sequence[float] = ()
    flags: tuple[str, ...] = ()
    detail: Mapping[str, Scalar] = field(default_factory=dict)
    bytes: Bytes = field(default_factory=Bytes)
    rate_of: str | None = None


@dataclass(frozen=True, slots=True)
class FoundCase:
    """A test at its settings (words and whole numbers) with its figures, the primary one first."""

    test: str
    axes: Mapping[str, str | int]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What a file holds. ``started_at``: UTC ISO 8601, None where the file has no time or no time zone.

    ``machine``: the fields that name the machine and its hardware, None where the file does not name it. ``env``:
    settings and versions it tells. ``notices``: lines for the user.
    """

    tool: str
    version: str | None
    cases: tuple[FoundCase, ...]
    started_at: str | None = None
    machine: Mapping[str, Any] | None = None
    env: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def no_value(metric: str, unit: str, better: Better, status: Status, reason: str) -> Figure:
    """Return the figure of a test that has no number, and why."""
    return Figure(metric, unit, better, None, status=status, reason=reason)


def measured(figure: Figure, where: str) -> Figure:
    """Return ``figure`` as it may be stored: 0 s and 0 B/s are no measurement, less than 0 is no file of the tool.

    Raises Malformed naming ``where`` for a negative or unbounded number.
    """
    if figure.value is None:
        return figure
    if not math.isfinite(figure.value) or figure.value < 0:
        raise Malformed(f"{where} is {figure.value:g} {figure.unit}, expected more than 0")
    if figure.value == 0:
        said = f"the file says 0 {figure.unit}: that is no measurement"
        return no_value(figure.metric, figure.unit, figure.better, "failed", said)
    return figure


def axis_name(name: str) -> str:
    """Return the name a stranger gave an axis, apart from names that mean something here."""
    return shortened(f"axis_{name}" if name in OUR_AXES or not name.strip() else name, MAX_VALUE_CHARS)


def axis_value(value: object) -> str | int:
    """Return a setting as an axis value: a whole number, or a word of at most 64 characters for all else."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return value
    if isinstance(value, str):
        return shortened(value, MAX_VALUE_CHARS)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return shortened(repr(value), MAX_VALUE_CHARS)


def shortened(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` characters; what is cut off is told apart by a digest of the whole."""
    if len(text) <= most:
        return text
    tail = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]
    return f"{text[: most - 13]}~{tail}"


def rows_of(found: Found, sha256: str, file: str) -> list[tuple[Result, ...]]:
    """Return the rows of every case in file order. Raises Malformed for two cases that are one, or none at all."""
    origin = f"{found.tool} {found.version or '(version not told)'}, {file}, sha256 {sha256}"
    if sum(len(case.figures) for case in found.cases) > MAX_FIGURES:
        raise Malformed(f"the file holds more than {MAX_FIGURES} figures; split it")
    out: list[tuple[Result, ...]] = []
    seen: set[str] = set()
    for case in found.cases:
        bench = shortened(f"{found.tool}.{case.test}", MAX_NAME_CHARS)
        digest = case_digest(SUITE, bench, 1, case.axes, {})
        if digest in seen:
            settings = " ".join(f"{name}={value}" for name, value in case.axes.items())
            raise Malformed(f"two results of {case.test!r} {settings}: which one holds is not told; split the file")
        seen.add(digest)
        out.append(tuple(_row(bench, case.axes, digest, figure, origin, sha256) for figure in case.figures))
    if not out:
        raise Malformed(f"the file holds no result of {found.tool}")
    return out


def _row(
    bench: str, axes: Mapping[str, str | int], digest: str, figure: Figure, origin: str, sha256: str
) -> Result:  # fmt: skip
    samples = tuple(figure.samples)
    if len(samples) > MAX_SAMPLES:
        chosen = random.Random(f"{sha256} {digest}").sample(range(len(samples)), MAX_SAMPLES)
        samples = tuple(samples[index] for index in sorted(chosen))
    flags = ["imported", *figure.flags]
    n = max(figure.n or 0, len(figure.samples))
    if figure.value is not None:
        flags += [] if samples else ["no_samples"]
        flags.append("no_interval")
        if not n:
            n = 1
            flags.append("n_unknown")
    return Result(
        suite=SUITE, bench=bench, bench_version=1, axes=dict(axes), metric=figure.metric, unit=figure.unit,
        better=figure.better, digest=digest, status=figure.status, value=figure.value, n=n, kept=len(samples),
        reason=figure.reason, seconds=figure.seconds, flags=tuple(dict.fromkeys(flags)), bytes=figure.bytes,
        rate_of=figure.rate_of, detail={**figure.detail, "origin": origin}, samples=samples,
    )  # fmt: skip


def left_out(names: Sequence[str]) -> tuple[str, ...]:
    """Return the notice about fields of the file that are not known here, none without any."""
    if not names:
        return ()
    once = list(dict.fromkeys(names))
    listed = ", ".join(printable(name, 60) for name in once[:6]) + (", ..." if len(once) > 6 else "")
    return (f"left out, not known here: {listed}",)
