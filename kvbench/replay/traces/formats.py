"""The trace formats: how each is recognised, and how a line of it becomes a row. Times come out in seconds.

Sources: Mooncake (FAST '25 traces: ms, blocks of 512), BurstGPT (s), Azure LLM inference 2023 and 2024 (ISO times),
Alibaba Bailian (s, blocks of 16); kvbench's own lines are the fields of :class:`Request`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvbench.errors import UsageError, printable
from kvbench.replay.request import MOST_SECONDS, MOST_TOKENS
from kvbench.replay.traces.lines import bad, parsed

MOST_ID = 1 << 63


class Row(NamedTuple):
    """A row as it stands in the file: ``time`` in seconds, tokens may be 0.

    ``id``: None where the file gives none; ``parent``: that of an earlier row; ``orphan``: the row names a parent that
    is not in the file; ``total``: tokens the row itself says there are.
    """

    time: float
    input_tokens: int
    output_tokens: int
    id: int | None = None
    session: int | None = None
    parent: int | None = None
    orphan: bool = False
    block_tokens: int | None = None
    hash_ids: tuple[int, ...] | None = None
    total: int | None = None


Reader = Callable[[int, str, bool], Row]


@dataclass(frozen=True, slots=True)
class Format:
    """``unit``: what its times are taken for; ``header``: whether its first line names columns; ``zero``: whether its
    times already count from the beginning of the trace."""

    name: str
    unit: str
    header: bool
    zero: bool
    reader: Callable[[Path, str], Reader]


@dataclass(slots=True)
class Names:
    """Small numbers for whatever a file calls its sessions and rows."""

    _known: dict[object, int] = field(default_factory=dict)

    def of(self, word: object) -> int:
        return self._known.setdefault(word, len(self._known))


def integer(path: Path, number: int, name: str, value: object, most: int = MOST_TOKENS) -> int:
    """Return a whole number from 0 to ``most``; raises UsageError with the line for anything else."""
    if isinstance(value, str):
        value = int(value) if value.strip().isascii() and value.strip().isdigit() and len(value) < 20 else value
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise bad(path, number, name, got=_short(value), expected=f"a whole number, 0..{most}")
    return value


def time_of(path: Path, number: int, name: str, value: object, scale: float) -> float:
    """Return ``value`` times ``scale`` as seconds of 0 or more; raises UsageError with the line otherwise."""
    said = value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise bad(path, number, name, got=_short(value), expected="a number")
    try:
        value = float(value)
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise bad(path, number, name, got=_short(said), expected="a number")
    if value < 0:
        raise bad(path, number, f"negative {name}", got=value, expected="0 or more")
    if value > MOST_SECONDS / scale:
        raise bad(path, number, name, got=value, expected=f"at most {MOST_SECONDS / scale:.0e}, or it is another unit")
    return value * scale


def ids_of(path: Path, number: int, value: object) -> tuple[int, ...]:
    """Return hash ids: a list of whole numbers; raises UsageError with the line otherwise."""
    if not isinstance(value, list):
        raise bad(path, number, "hash_ids", got=_short(value), expected="a list of whole numbers")
    for each in value:
        if type(each) is not int or not 0 <= each < MOST_ID:
            raise bad(path, number, "hash id", got=_short(each), expected="a whole number, 0 or more")
    return tuple(value)


def pick(path: Path, number: int, row: Mapping[str, Any], *names: str) -> tuple[str, Any]:
    """Return (name, value) of the first of ``names`` the row has; raises UsageError with the line for none, and where
    two names of one field have different values."""
    found = [(name, row[name]) for name in names if row.get(name) is not None]
    if found:
        (name, value), *others = found
        for other, said in others:
            if said != value:
                raise bad(
                    path, number, f"{name} and {other} are one field", got=f"{_short(value)} and {_short(said)}",
                    expected="one value", mend="leave one of them out",
                )  # fmt: skip
        return name, value
    raise bad(
        path, number, f"no {names[0]}", got="fields " + " ".join(printable(str(k), 24) for k in list(row)[:12]),
        expected=" or ".join(names), mend="a file holds rows of one format only",
    )  # fmt: skip


INPUT = ("input_length", "input_tokens", "prompt_tokens")
OUTPUT = ("output_length", "output_tokens", "completion_tokens")
TIME = ("timestamp", "created_time")
DELAY = ("delay", "delay_ms")
# Fields that only rows of one format have. Mooncake and Bailian share `timestamp`, in different units.
TELLING: Mapping[str, frozenset[str]] = MappingProxyType({
    "mooncake": frozenset({"created_time", "session_id", *DELAY}),
    "bailian": frozenset({"chat_id", "parent_chat_id"}),
    "kvbench": frozenset({"arrival", "block_tokens"}),
})  # fmt: skip
FOREIGN = {
    own: {field: name for name, fields in TELLING.items() if name != own for field in sorted(fields)} for own in TELLING
}
FOREIGN["kvbench"]["timestamp"] = "mooncake or bailian"
COLUMNS: Mapping[str, frozenset[str]] = MappingProxyType({
    "burstgpt": frozenset({"timestamp", "request tokens", "response tokens"}),
    "azure": frozenset({"timestamp", "contexttokens", "generatedtokens"}),
})  # fmt: skip


def object_of(path: Path, number: int, text: str, whole: bool, own: str) -> dict[str, Any]:
    """Return the row of format ``own`` on a line; raises UsageError with the line where a field names another one."""
    row = parsed(path, number, text, whole)
    for key, name in FOREIGN[own].items():
        if row.get(key) is not None:
            raise bad(
                path, number, f"a row of {name} in a file of {own}", got=f"the field {key}",
                expected=f"rows of {own} only", mend="replay the rows of each format as a file of their own",
            )  # fmt: skip
    return row


def _mooncake(path: Path, first: str) -> Reader:
    last: dict[object, float] = {}
    sessions = Names()

    def read(number: int, text: str, whole: bool) -> Row:
        row = object_of(path, number, text, whole, "mooncake")
        said = row.get("session_id")
        dated = any(row.get(name) is not None for name in TIME)
        if not dated and all(row.get(name) is None for name in DELAY):
            pick(path, number, row, *TIME, *DELAY)  # says which there may be
        name, value = pick(path, number, row, *(TIME if dated else DELAY))
        time = time_of(path, number, name, value, 1e-3)
        if name.startswith("delay"):
            if said is None or said not in last:
                raise bad(
                    path, number, f"{name} without a turn before it", got=_short(said),
                    expected="an earlier row of its session_id with a timestamp",
                )  # fmt: skip
            time += last[said]
        if said is not None:
            if not isinstance(said, str | int):
                raise bad(path, number, "session_id", got=_short(said), expected="a word or a number")
            last[said] = time
        ids = row.get("hash_ids")
        return Row(
            time, integer(path, number, *pick(path, number, row, *INPUT)),
            integer(path, number, *pick(path, number, row, *OUTPUT)),
            session=None if said is None else sessions.of(said),
            block_tokens=None if ids is None else 512, hash_ids=None if ids is None else ids_of(path, number, ids),
        )  # fmt: skip

    return read


def _bailian(path: Path, first: str) -> Reader:
    seen: dict[object, tuple[int, int]] = {}  # chat: (its id, its session)

    def read(number: int, text: str, whole: bool) -> Row:
        row = object_of(path, number, text, whole, "bailian")
        _, chat = pick(path, number, row, "chat_id")
        if not isinstance(chat, str | int):
            raise bad(path, number, "chat_id", got=_short(chat), expected="a word or a number")
        if chat in seen:
            raise bad(path, number, "chat_id comes twice", got=_short(chat))
        parent = row.get("parent_chat_id")
        if parent is not None and parent == chat:
            raise bad(path, number, "the row is its own parent", got=_short(chat), expected="an earlier row")
        root = parent in (None, -1, "-1")
        known = None if root or not isinstance(parent, str | int) else seen.get(parent)
        own = len(seen)
        session = own if known is None else known[1]
        seen[chat] = (own, session)
        ids = row.get("hash_ids")
        return Row(
            time_of(path, number, *pick(path, number, row, "timestamp"), 1.0),
            integer(path, number, *pick(path, number, row, *INPUT)),
            integer(path, number, *pick(path, number, row, *OUTPUT)),
            own, session, None if known is None else known[0], not root and known is None,
            None if ids is None else 16, None if ids is None else ids_of(path, number, ids),
        )  # fmt: skip

    return read


def _own(path: Path, first: str) -> Reader:
    def read(number: int, text: str, whole: bool) -> Row:
        row = object_of(path, number, text, whole, "kvbench")
        arrival = time_of(path, number, *pick(path, number, row, "arrival"), 1.0)
        optional = {
            name: None if row.get(name) is None else integer(path, number, name, row[name], MOST_ID)
            for name in ("session", "parent", "block_tokens")
        }
        ids = row.get("hash_ids")
        own = integer(path, number, *pick(path, number, row, "id"), MOST_ID)
        if optional["parent"] == own:
            raise bad(path, number, "the row is its own parent", got=own, expected="the id of an earlier row")
        if (ids is None) is not (optional["block_tokens"] is None):
            raise bad(path, number, "hash_ids and block_tokens", expected="both or neither")
        return Row(
            arrival, integer(path, number, *pick(path, number, row, "input_tokens")),
            integer(path, number, *pick(path, number, row, "output_tokens")),
            own, optional["session"], optional["parent"], False, optional["block_tokens"],
            None if ids is None else ids_of(path, number, ids),
        )  # fmt: skip

    return read


def _cells(path: Path, number: int, text: str, columns: Sequence[str], whole: bool) -> dict[str, str]:
    if '"' in text:
        try:
            cells = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise bad(path, number, "not CSV", got=printable(text, 60), expected=printable(str(error), 100)) from None
    else:
        cells = text.split(",")
    if len(cells) != len(columns):
        raise bad(
            path, number, "fields of the row" if whole else "the file ends within a line", got=len(cells),
            expected=f"{len(columns)}, as its header has", mend="" if whole else "fetch it again",
        )  # fmt: skip
    found = dict(zip(columns, cells, strict=True))
    if all(cell.strip().lower() == name for name, cell in found.items()):
        raise bad(path, number, "a second header", mend="two files were joined: replay one of them")
    return found


def columns_of(header: str) -> list[str]:
    """Return the names of the columns of a CSV header, in lower case, without blanks around them."""
    return [cell.strip().strip('"').lower() for cell in header.split(",")]


def _burstgpt(path: Path, first: str) -> Reader:
    columns = columns_of(first)
    sessions = Names()

    def read(number: int, text: str, whole: bool) -> Row:
        row = _cells(path, number, text, columns, whole)
        session = row.get("session id", "").strip()
        total = row.get("total tokens")
        return Row(
            time_of(path, number, "Timestamp", row["timestamp"], 1.0),
            integer(path, number, "Request tokens", row["request tokens"]),
            integer(path, number, "Response tokens", row["response tokens"]),
            session=sessions.of(session) if session else None,
            total=None if total is None else integer(path, number, "Total tokens", total),
        )  # fmt: skip

    return read


def _azure(path: Path, first: str) -> Reader:
    columns = columns_of(first)
    zoned: bool | None = None

    def read(number: int, text: str, whole: bool) -> Row:
        nonlocal zoned
        row = _cells(path, number, text, columns, whole)
        try:
            time = datetime.fromisoformat(row["timestamp"].strip())
        except ValueError:
            raise bad(
                path, number, "TIMESTAMP", got=printable(row["timestamp"], 40),
                expected="a time as 2023-11-16 18:15:46.68",
            ) from None  # fmt: skip
        has_zone = time.tzinfo is not None
        if zoned is not None and has_zone is not zoned:
            raise bad(path, number, "times with and without a zone in one file", got=printable(row["timestamp"], 40))
        zoned = has_zone
        since = time - datetime(1970, 1, 1, tzinfo=UTC if has_zone else None)
        return Row(
            time_of(path, number, "TIMESTAMP", since.days * 86_400.0 + since.seconds + since.microseconds / 1e6, 1.0),
            integer(path, number, "ContextTokens", row["contexttokens"]),
            integer(path, number, "GeneratedTokens", row["generatedtokens"]),
        )  # fmt: skip

    return read


FORMATS: Mapping[str, Format] = MappingProxyType({
    each.name: each for each in (
        Format("mooncake", "milliseconds", False, False, _mooncake),
        Format("burstgpt", "seconds", True, False, _burstgpt),
        Format("azure", "dates", True, False, _azure),
        Format("bailian", "seconds", False, False, _bailian),
        Format("kvbench", "seconds", False, True, _own),
    )
})  # fmt: skip


def detect(path: Path, number: int, text: str, whole: bool) -> Format:
    """Return the format the first line of a file is in; raises UsageError that says what was found."""
    if text.lstrip().startswith("{"):
        row = parsed(path, number, text, whole)
        keys = dict.fromkeys(key for key, value in row.items() if value is not None).keys()
        if "arrival" in keys:
            return FORMATS["kvbench"]
        if "chat_id" in keys:
            return FORMATS["bailian"]
        if keys & set(TIME) and keys & set(INPUT):
            return FORMATS["mooncake"]
        got = "JSON with " + " ".join(printable(str(key), 24) for key in list(keys)[:8])
    else:
        named = columns_of(text)
        columns = set(named)
        found = [name for name, needed in COLUMNS.items() if needed <= columns]
        if len(found) > 1:
            raise bad(path, number, "columns of two formats", got=" and ".join(found), expected="those of one")
        if found:
            twice = next((name for i, name in enumerate(named) if name and name in named[:i]), None)
            if twice is not None:
                raise bad(path, number, "a column is there twice", got=printable(twice, 40), expected="each name once")
            return FORMATS[found[0]]
        got = printable(text, 80)
    raise bad(
        path, number, "no trace format known", got=got, expected="one of " + " ".join(FORMATS),
        mend="--format names it; docs/replay.md has the fields of each",
    )  # fmt: skip


def format_named(name: str) -> Format:
    """Return the format called ``name``; raises UsageError that lists them."""
    found = FORMATS.get(name)
    if found is None:
        raise UsageError("unknown trace format", where="--format", got=name, expected="one of " + " ".join(FORMATS))
    return found


def _short(value: object) -> str:
    return printable(str(value), 40)
