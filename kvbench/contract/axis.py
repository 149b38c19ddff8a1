"""Typed axes: the coordinates of a case. Grids are the same on every machine; what does not fit there is skipped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UsageError, nearest
from kvbench.units import compact_bytes, parse_bytes

Value = str | int
Profile = Literal["smoke", "quick", "full"]
PROFILES: tuple[Profile, ...] = ("smoke", "quick", "full")
MAX_VALUE_CHARS = 64  # axis values are identities, not payloads (a parametrised tensor once made a 1.8 GB result file)
_MULTIPLE = re.compile(r"^([1-9][0-9]{0,3})x(llc)$")
_RANGE = re.compile(r"^(.+)\.\.(.+)$")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its kind, the legal values or range, and the values each profile visits.

    ``kind`` is ``choice``, ``bytes``, ``threads`` or ``integer``. Words that depend on the machine (``all`` threads,
    ``4xllc`` bytes) stay words in the case; the resolved number stands beside. An axis added after the bench's first
    release carries ``since`` (the bench version's text, informative) and ``default``, and is left out of the digest at
    its default so that history survives.
    """

    kind: Literal["choice", "bytes", "threads", "integer"]
    smoke: tuple[Value, ...]
    quick: tuple[Value, ...]
    full: tuple[Value, ...]
    legal: tuple[str, ...] = ()
    low: int = 1
    high: int = 1 << 50
    since: str | None = None
    default: Value | None = None

    def values(self, profile: Profile) -> tuple[Value, ...]:
        """Return the values ``profile`` visits."""
        return {"smoke": self.smoke, "quick": self.quick, "full": self.full}[profile]

    def parse(self, text: str, where: str) -> Value:
        """Return the typed value ``text`` names; raises UsageError naming the nearest legal value."""
        text = text.strip()
        if len(text) > MAX_VALUE_CHARS:
            raise UsageError("value too long", where=where, got=text, expected=f"at most {MAX_VALUE_CHARS} characters")
        if self.kind == "choice":
            if text in self.legal:
                return text
            raise UsageError(
                "unknown value", where=where, got=text, expected="one of " + " ".join(self.legal),
                mend=nearest(text, self.legal),
            )  # fmt: skip
        if self.kind == "bytes":
            if _MULTIPLE.match(text):
                return text
            return self._in_range(parse_bytes(text, where), where)
        if self.kind == "threads" and text == "all":
            return text
        if not re.fullmatch(r"[0-9]{1,12}", text):
            extra = " or the word 'all'" if self.kind == "threads" else ""
            raise UsageError("not a whole number", where=where, got=text, expected=f"{self.low}..{self.high}{extra}")
        return self._in_range(int(text), where)

    def parse_list(self, text: str, where: str) -> tuple[Value, ...]:
        """Return the values of a comma list; ``A..B`` (numbers) doubles from A up to B."""
        found: list[Value] = []
        for part in text.split(","):
            if not part.strip():
                raise UsageError("empty value", where=where, got=text, expected="VALUE[,VALUE]...")
            span = _RANGE.match(part.strip()) if self.kind != "choice" else None
            if span:
                first, last = (self.parse(end, where) for end in span.groups())
                found.extend(doubling(first, last, where))
            else:
                found.append(self.parse(part, where))
        return tuple(dict.fromkeys(found))

    def format(self, value: Value) -> str:
        """Return the text a user would type for ``value``."""
        return compact_bytes(value) if self.kind == "bytes" and isinstance(value, int) else str(value)

    def describe(self) -> str:
        """Return the legal values in words, for ``kvbench list``."""
        if self.kind == "choice":
            return " | ".join(self.legal)
        if self.kind == "bytes":
            return f"{compact_bytes(self.low)}..{compact_bytes(self.high)} or Nxllc"
        return f"{self.low}..{self.high}" + (" or all" if self.kind == "threads" else "")

    def _in_range(self, number: int, where: str) -> int:
        if not self.low <= number <= self.high:
            bounds = f"{self.format(self.low)}..{self.format(self.high)}"
            raise UsageError("out of range", where=where, got=self.format(number), expected=bounds)
        return number


def doubling(first: Value, last: Value, where: str) -> Iterable[int]:
    """Yield first, 2 x first, ... up to and including ``last`` where the doubling meets it."""
    if not (isinstance(first, int) and isinstance(last, int)) or first > last:
        raise UsageError("not a range", where=where, got=f"{first}..{last}", expected="SMALL..LARGE, two plain numbers")
    number = first
    while number <= last:
        yield number
        number *= 2


def choice(
    *legal: str, smoke: Sequence[str] | None = None, quick: Sequence[str] | None = None,
    full: Sequence[str] | None = None, since: str | None = None, default: str | None = None,
) -> Axis:  # fmt: skip
    """Return an axis over the words ``legal``; a profile without a list visits all of them."""
    for listed in (smoke, quick, full):
        for word in listed or ():
            if word not in legal:
                raise ValueError(f"profile lists {word!r}, which is not one of {legal}")
    return Axis(
        "choice", tuple(smoke or legal), tuple(quick or legal), tuple(full or legal), legal=legal, since=since,
        default=default,
    )  # fmt: skip


def sizes(
    *, smoke: str | Sequence[str], quick: str | Sequence[str], full: str | Sequence[str], low: str = "64B",
    high: str = "1TiB", since: str | None = None, default: str | None = None,
) -> Axis:  # fmt: skip
    """Return a byte axis. Lists hold sizes (``256MiB``), ranges (``4KiB..1GiB``, doubling) or ``Nxllc``."""
    return _numeric("bytes", smoke, quick, full, parse_bytes(low), parse_bytes(high), since, default)


def threads(
    *, smoke: str | Sequence[str] = ("1", "all"), quick: str | Sequence[str] = ("1", "all"),
    full: str | Sequence[str] = ("1..128", "all"), high: int = 4096, since: str | None = None,
    default: str | None = None,
) -> Axis:  # fmt: skip
    """Return a thread-count axis: whole numbers and the word ``all`` (one thread per core in the affinity mask)."""
    return _numeric("threads", smoke, quick, full, 1, high, since, default)


def integer(
    *, smoke: str | Sequence[str], quick: str | Sequence[str], full: str | Sequence[str], low: int = 1,
    high: int = 1 << 31, since: str | None = None, default: str | None = None,
) -> Axis:  # fmt: skip
    """Return a whole-number axis."""
    return _numeric("integer", smoke, quick, full, low, high, since, default)


def _numeric(
    kind: Literal["bytes", "threads", "integer"], smoke: str | Sequence[str], quick: str | Sequence[str],
    full: str | Sequence[str], low: int, high: int, since: str | None, default: str | None,
) -> Axis:  # fmt: skip
    bare = Axis(kind, (), (), (), low=low, high=high)

    def listed(values: str | Sequence[str]) -> tuple[Value, ...]:
        text = values if isinstance(values, str) else ",".join(values)
        return bare.parse_list(text, f"{kind} axis")

    return Axis(
        kind, listed(smoke), listed(quick), listed(full), low=low, high=high, since=since,
        default=None if default is None else bare.parse(default, f"{kind} axis"),
    )  # fmt: skip


# `axis.bytes(...)` is how suites write it; the name shadows the builtin only as an attribute of this module.
bytes = sizes
