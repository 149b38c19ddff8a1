"""A trace file as requests: read once to know it, then streamed as often as it is replayed.

The first pass holds the file to what it claims to be and keeps counts; whatever a row does wrong is an error with its
line, or is counted and said. The second makes requests in the order of arrival and holds at most a window of rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.errors import NoData, UsageError, printable
from kvbench.replay.request import Request, blocks_of, seconds
from kvbench.replay.traces.formats import Format, Reader, Row, detect, format_named
from kvbench.replay.traces.lines import bad, lines, sha256
from kvbench.units import counted, format_duration

WINDOW = 10_000  # rows a row may stand too late by and is put right without being asked
LEAST_GAP, MOST_GAP = 1e-3, 60.0  # seconds between requests of a service, on average
MOST_BLOCKS = 2_000_000  # blocks whose place in the prefix tree is remembered
MOST_BAD_IDS = 0.01  # of the requests: more is another block size, not a fault of some rows
Numbered = tuple[int, Row]


@dataclass(slots=True)
class Facts:
    """What the first pass counted. Times in seconds on the file's clock; ``sha256`` of the bytes on disk.

    ``failed``: rows whose call gave no output; ``empty``: rows without input; ``late``: rows put in order;
    ``bad_ids``: requests whose number of hash ids is not ceil(input / block), whose ids are left out, and the line of
    the first; ``broken``: ids that follow another id than before; ``orphans``: turns whose parent is no earlier row.
    ``blocks`` and ``unique_blocks`` count hash ids; the latter is None beyond MOST_BLOCKS.
    """

    sha256: str = ""
    rows: int = 0
    requests: int = 0
    failed: int = 0
    empty: int = 0
    late: int = 0
    bad_ids: int = 0
    bad_line: int = 0
    without_ids: int = 0
    broken: int = 0
    orphans: int = 0
    totals: int = 0
    cut: bool = False
    first: float = 0.0
    last: float = 0.0
    block_tokens: int | None = None
    blocks: int = 0
    unique_blocks: int | None = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def rate(self) -> float | None:
        """Requests a second over the file; None where all come at once."""
        span = self.last - self.first
        return (self.requests - 1) / span if span > 0.0 else None


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file that has been read once. ``notices``: one line each, for the user."""

    path: Path
    format: Format
    facts: Facts
    notices: tuple[str, ...] = ()
    stamp: tuple[int, int] | None = None

    def requests(self, limit: int | None = None, rate: float | None = None) -> Iterator[Request]:
        """Yield the first ``limit`` requests (None: all) in the order they arrive, streaming.

        With ``rate`` all times are stretched so that the whole file has that many requests a second. Raises UsageError
        for a limit or rate that makes no sense.
        """
        if limit is not None and limit < 1:
            raise UsageError("requests", got=limit, expected="1 or more")
        own, scale = self.facts.rate, 1.0
        if rate is not None:
            if not 0.0 < rate <= 1e6:
                raise UsageError("rate", got=rate, expected="requests a second, more than 0, at most 1e6")
            if own is None:
                raise UsageError(
                    "rate", where=self.path.name, got=rate, expected="a trace whose requests do not all come at once"
                )
            scale = own / rate
        return itertools.islice(self._requests(scale), limit)

    def _requests(self, scale: float) -> Iterator[Request]:
        if self.stamp is not None and _stamp(self.path) not in (self.stamp, None):
            raise UsageError(
                "the file has changed since it was read", where=printable(self.path.name), mend="replay it again"
            )
        start = 0.0 if self.format.zero else self.facts.first
        kept = (pair for pair in rows(self.path, self.format) if _counts(pair[1]))
        in_order = reordered(kept, self.path, Facts()) if self.facts.late else kept
        for number, row in in_order:
            names = row.hash_ids
            if names is not None and len(names) != blocks_of(row.input_tokens, row.block_tokens or 1):
                names = None
            yield Request(
                number if row.id is None else row.id, seconds((row.time - start) * scale), row.input_tokens,
                row.output_tokens, row.session, row.parent, None if names is None else row.block_tokens, names,
            )  # fmt: skip


@dataclass(slots=True)
class Known:
    """The ids of a kvbench file: all that were read, those still to pass in the order of their times, when rows came
    that are no requests, and the first row whose parent is none before it. That one is an error once the whole file is
    known to be in order: else its order is what is wrong."""

    ids: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    left_out: dict[int, tuple[float, int]] = field(default_factory=dict)
    astray: tuple[int, int] | None = None

    def passes(self, number: int, row: Row) -> None:
        """Let ``row`` pass, and note it unless its parent did before: then no chain of parents can close."""
        parent = row.parent
        if parent is not None and (
            parent not in self.ids
            or parent in self.ahead
            or self.left_out.get(parent, (row.time, number)) > (row.time, number)
        ):
            self.astray = self.astray or (number, parent)
        self.ahead.discard(row.id or 0)


def open_trace(path: Path, format_name: str | None = None, *, strict: bool = False) -> Trace:
    """Return the trace in ``path`` after reading all of it once.

    ``strict``: what would be counted or warned about is an error. Raises UsageError with the line of what is wrong;
    NoData for a file without a usable request.
    """
    stamp = _stamp(path)
    form = None if format_name is None else format_named(format_name)
    form = form or format_of(path)
    facts = Facts()
    before: dict[int, int] = {}
    known = Known()
    for number, row in reordered(_checked(path, form, facts, before, known, strict=strict), path, facts):
        if form.zero:
            known.passes(number, row)
        if not facts.requests:
            facts.first = row.time
        facts.requests += 1
        facts.last = row.time
    if known.astray is not None:
        number, parent = known.astray
        raise bad(path, number, "parent", got=parent, expected="the id of an earlier row of the file")
    if not facts.requests:
        raise NoData(
            "no request to replay", where=printable(path.name), got=counted(facts.rows, "row"),
            expected="a row with input and output tokens",
        )  # fmt: skip
    facts.unique_blocks = len(before) if len(before) < MOST_BLOCKS else None
    _judge_ids(path, facts, strict=strict)
    found = list(_notices(path, form, facts))
    gap = None if facts.requests < 2 else (facts.last - facts.first) / (facts.requests - 1)
    if gap and not LEAST_GAP <= gap <= MOST_GAP:
        text = f"{counted(facts.requests, 'request')} come {gap:.3g} s apart on average when times are {form.unit}"
        if strict:
            raise UsageError(
                text, where=path.name, expected=f"{LEAST_GAP:g} to {MOST_GAP:g} s", mend="is it another unit or format?"
            )
        found.insert(0, f"{text}, outside {LEAST_GAP:g} to {MOST_GAP:g} s: is it another unit or format?")
    if facts.cut and strict:
        raise UsageError("the last line has no line end: it may be cut", where=path.name, mend="fetch it again")
    facts.sha256 = sha256(path)
    if _stamp(path) != stamp:
        raise UsageError(
            "the file changes while it is read", where=printable(path.name), mend="wait until it is written"
        )
    return Trace(path, form, facts, tuple(found), stamp)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return size and time of the last change, None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def format_of(path: Path) -> Format:
    """Return the format of ``path`` by its first line; raises UsageError, for an empty file too."""
    for number, text, whole in lines(path):
        return detect(path, number, text, whole)
    raise UsageError("the trace is empty", where=printable(path.name), expected="a header or a row")


def rows(path: Path, form: Format, facts: Facts | None = None) -> Iterator[Numbered]:
    """Yield (line number, row) of every row in the order of the file. Ids are the number of the row where the file
    gives none, so a row that is left out leaves a gap."""
    read: Reader | None = None
    index = 0
    for number, text, whole in lines(path):
        if facts is not None and not whole:
            facts.cut = True
        if read is None:
            read = form.reader(path, text)
            if form.header:
                if detect(path, number, text, whole) is not form:
                    raise bad(path, number, f"no header of {form.name}", got=printable(text, 60))
                continue
        row = read(number, text, whole)
        yield number, row if row.id is not None else row._replace(id=index)
        index += 1


def reordered(found: Iterator[Numbered], path: Path, facts: Facts) -> Iterator[Numbered]:
    """Yield rows by time, rows of one time in the order of the file; count those that stood too late.

    A row may stand up to WINDOW rows behind its place; UsageError with the command that sorts the file beyond.
    """
    window: list[tuple[float, int, Row]] = []
    highest = last = -math.inf
    for number, row in found:
        if row.time < last:
            raise bad(
                path, number, f"the time is earlier than one more than {WINDOW} rows before", got=f"{row.time:g} s",
                expected="rows in the order of their times",
                mend=f"kvbench replay {printable(path.name, 80)} --sorted-copy OUT sorts the file",
            )  # fmt: skip
        if row.time < highest:
            facts.late += 1
        else:
            highest = row.time
        heapq.heappush(window, (row.time, number, row))
        if len(window) > WINDOW:
            last, number, row = heapq.heappop(window)
            yield number, row
    while window:
        _, number, row = heapq.heappop(window)
        yield number, row


def _counts(row: Row) -> bool:
    return row.input_tokens > 0 and row.output_tokens > 0


def _checked(
    path: Path, form: Format, facts: Facts, before: dict[int, int], known: Known, *, strict: bool
) -> Iterator[Numbered]:  # fmt: skip
    """Yield the rows that are requests; count the others and everything odd, or raise in ``strict`` mode."""
    for number, row in rows(path, form, facts):
        facts.rows += 1
        if form.zero and row.id is not None:
            if row.id in known.ids:
                raise bad(path, number, "the id comes twice", got=row.id)
            known.ids.add(row.id)
            if _counts(row):
                known.ahead.add(row.id)
            else:
                known.left_out[row.id] = row.time, number
        if row.output_tokens == 0:
            facts.failed += 1
            continue
        if row.input_tokens == 0:
            if strict:
                raise bad(path, number, "a request without input", got=0, expected="1 token or more")
            facts.empty += 1
            continue
        if row.total is not None and row.total != row.input_tokens + row.output_tokens:
            if strict:
                raise bad(
                    path, number, "total tokens", got=row.total, expected=str(row.input_tokens + row.output_tokens)
                )
            facts.totals += 1
        facts.orphans += row.orphan
        facts.input_tokens += row.input_tokens
        facts.output_tokens += row.output_tokens
        _check_ids(path, number, row, facts, before, strict=strict)
        yield number, row


def _check_ids(path: Path, number: int, row: Row, facts: Facts, before: dict[int, int], *, strict: bool) -> None:
    if row.hash_ids is None or row.block_tokens is None:
        facts.without_ids += 1
        return
    if row.block_tokens < 1:
        raise bad(path, number, "block_tokens", got=row.block_tokens, expected="1 or more")
    if facts.block_tokens is None:
        facts.block_tokens = row.block_tokens
    if row.block_tokens != facts.block_tokens:
        raise bad(
            path, number, "another block size than before", got=row.block_tokens, expected=str(facts.block_tokens),
            mend="ids of two block sizes name different prefixes",
        )  # fmt: skip
    expected = blocks_of(row.input_tokens, row.block_tokens)
    if len(row.hash_ids) != expected:
        if strict:
            raise bad(path, number, "number of hash ids", got=len(row.hash_ids), expected=_ceil(row, expected))
        facts.bad_ids += 1
        facts.bad_line = facts.bad_line or number
        return
    facts.blocks += expected
    previous = -1
    for each in row.hash_ids:
        known = before.get(each)
        if known is None:
            if len(before) < MOST_BLOCKS:
                before[each] = previous
        elif known != previous:
            if strict:
                raise bad(
                    path, number, f"hash id {each} follows {previous}", got=f"it followed {known} before",
                    expected="one id for one whole prefix",
                )  # fmt: skip
            facts.broken += 1
        previous = each


def _ceil(row: Row, expected: int) -> str:
    return f"{expected} = ceil({row.input_tokens} / {row.block_tokens})"


def _judge_ids(path: Path, facts: Facts, *, strict: bool) -> None:
    if facts.bad_ids > MOST_BAD_IDS * (facts.requests - facts.without_ids):
        raise bad(
            path, facts.bad_line, f"the number of hash ids is not ceil(input / {facts.block_tokens})",
            got=f"{facts.bad_ids} such rows, first here", expected=f"at most {MOST_BAD_IDS:.0%} of the rows",
            mend="is it a format with another block size?",
        )  # fmt: skip


def _notices(path: Path, form: Format, facts: Facts) -> Iterator[str]:
    name = printable(path.name, 80)
    if facts.failed:
        yield f"{name}: {counted(facts.failed, 'row')} without output left out: calls that failed"
    if facts.empty:
        yield f"{name}: {counted(facts.empty, 'row')} without input left out"
    if facts.late:
        yield f"{name}: {counted(facts.late, 'row')} out of order, put in the order of their times"
    if facts.bad_ids:
        yield (
            f"{name}: hash ids of {counted(facts.bad_ids, 'row')} left out (line {facts.bad_line} first): their number "
            f"is not ceil(input / {facts.block_tokens})"
        )
    if facts.blocks and facts.without_ids:
        yield f"{name}: {counted(facts.without_ids, 'row')} without hash ids: they share no prefix"
    if facts.broken:
        yield f"{name}: {counted(facts.broken, 'hash id')} followed another id than before: not names of whole prefixes"
    if facts.totals:
        yield f"{name}: total tokens of {counted(facts.totals, 'row')} are not the sum of request and response"
    if facts.orphans:
        yield f"{name}: {counted(facts.orphans, 'turn')} whose parent is no earlier row begin new conversations"
    if facts.cut:
        yield f"{name}: the last line has no line end: it may be cut"


def describe(trace: Trace) -> str:
    """Return one line about the trace for the user."""
    facts = trace.facts
    span = format_duration(facts.last - facts.first)
    text = f"{printable(trace.path.name, 80)}: {trace.format.name}, {counted(facts.requests, 'request')} in {span}"
    if facts.blocks and facts.unique_blocks is not None:
        share = 1.0 - facts.unique_blocks / facts.blocks
        text += f", {share:.1%} of {facts.blocks} blocks of {facts.block_tokens} tokens seen before"
    return text
