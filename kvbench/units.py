"""Sizes, rates and times as text, in one place. GB is 1e9 bytes, GiB is 2**30; the unit is always printed.

Everything stored is SI (s, B/s, FLOP/s, B, 1); scaling happens here and only for display.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kvbench.errors import UsageError

KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

MAX_BYTES = PiB  # no machine has a buffer of a PiB: a larger size is a typing error, not a request

_BINARY = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "PiB": PiB}
_DECIMAL = {"kB": KB, "MB": MB, "GB": GB, "TB": TB}
_UNITS = {**_BINARY, **_DECIMAL}
_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,40})?)[ ]?([A-Za-z]*)", re.ASCII)
_FORMS = "a whole number of bytes such as 4096, 64KiB, 256MiB, 1GiB or 1GB (GB = 1e9, GiB = 2^30)"

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"), (1e-12, "p"))
_SCALED_UP = frozenset({"B", "B/s", "FLOP/s", "FLOP", "Hz", "op/s"})
_SCALED_DOWN = frozenset({"s"})  # "ks" is nobody's unit: seconds only scale downwards
_SCALED_BOTH = frozenset({"W", "J"})


def parse_bytes(text: str, where: str = "") -> int:
    """Return the bytes ``text`` names, between 1 and ``MAX_BYTES``; ``where`` (an option, an axis) opens the message.

    Units are case-sensitive, because ``64kb`` has been read as 64,000 and as 65,536 and both by careful people.
    Raises UsageError on anything else, naming the nearest legal spelling where there is one.
    """
    stripped = text.strip()
    match = _SIZE.fullmatch(stripped)
    if match is None:
        raise UsageError("not a size", where=where, got=text, expected=_FORMS)
    number, unit = match.groups()
    scale = _UNITS.get(unit or "B")
    if scale is None:
        raise UsageError(
            "unknown or ambiguous unit", where=where, got=text, expected=_FORMS, mend=_nearest(number, unit)
        )
    size = Fraction(number) * scale
    if size.denominator != 1:
        raise UsageError("not a whole number of bytes", where=where, got=text, expected=_FORMS)
    if not 1 <= size <= MAX_BYTES:
        raise UsageError("size out of range", where=where, got=text, expected="1 byte to 1 PiB")
    return int(size)


def _nearest(number: str, unit: str) -> str:
    letter = unit[0].upper()
    if letter not in "KMGTP" or unit.lower() not in (letter.lower() + tail for tail in ("", "b", "ib", "i")):
        return f"write one of the units {', '.join(_UNITS)}"
    decimal = "k" if letter == "K" else letter
    alternatives = [f"{number}{letter}iB"] + ([f"{number}{decimal}B"] if f"{decimal}B" in _DECIMAL else [])
    return f"write {' or '.join(alternatives)}"


def compact_bytes(n: int) -> str:
    """Return ``n`` exactly and without a space (``256MiB``, ``1GB``, ``4097B``): :func:`parse_bytes` reads it back.

    The shortest exact spelling wins, binary before decimal. Raises ValueError when ``n`` is negative.
    """
    if n < 0:
        raise ValueError(f"a size cannot be negative, got {n}")
    if n == 0:
        return "0B"
    spellings = [f"{n // scale}{unit}" for unit, scale in _UNITS.items() if n % scale == 0]
    # min() keeps the first of equally short ones and _UNITS lists binary units first
    return min(spellings, key=lambda s: len(s.rstrip("BiKMGTPk")))


def format_bytes(n: int) -> str:
    """Return ``n`` for reading: exact where that is short (``256 MiB``, ``1 GB``), else about ``1.234 GiB``.

    Raises ValueError when ``n`` is negative.
    """
    exact = compact_bytes(n)
    digits = exact.rstrip("BiKMGTPk")
    if len(digits) <= 4:
        return f"{digits} {exact[len(digits) :]}"
    unit, scale = max(((u, s) for u, s in _BINARY.items() if s <= n), key=lambda pair: pair[1])
    if float(f"{n / scale:.3e}") >= 1024 and unit != "PiB":  # 1,048,575 B is 1.000 MiB, not 1024 KiB
        units = list(_BINARY.items())
        unit, scale = units[units.index((unit, scale)) + 1]
    return f"{_significant(n / scale, 4)} {unit}"


def format_value(value: float, unit: str) -> str:
    """Return an SI ``value`` scaled for reading, with 3 to 4 significant digits and its unit.

    ``12.3 GB/s``, ``97.1 ns``, ``117 GFLOP/s``; unit ``1`` is dimensionless and prints the bare number.
    Units without a known scaling print unscaled. Raises ValueError for NaN and infinity: no value is None.
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} {unit} is not a number that can be shown")
    if unit == "B" and value >= 0 and value == int(value):
        return format_bytes(int(value))
    if unit == "1":
        return _significant(value, 3)
    prefixes: tuple[tuple[float, str], ...] = ((1.0, ""),)
    if unit in _SCALED_UP:
        prefixes = _PREFIXES
    elif unit in _SCALED_DOWN:
        prefixes = _SMALL
    elif unit in _SCALED_BOTH:
        prefixes = _PREFIXES[:-1] + _SMALL
    magnitude = float(f"{abs(value):.2e}")  # rounded first: 999.6 ns is 1.00 us, not 1000 ns
    scale, prefix = next(((s, p) for s, p in prefixes if magnitude >= s), prefixes[-1])
    if value == 0:
        scale, prefix = 1.0, ""
    return f"{_significant(value / scale, 3)} {prefix}{unit}"


def _significant(value: float, digits: int) -> str:
    """``value`` with ``digits`` significant digits; whole digits are never cut, exponents only where they help."""
    if value == 0:
        return "0"
    rounded = float(f"{abs(value):.{digits - 1}e}")
    exponent = math.floor(math.log10(rounded))
    if exponent < -4 or exponent >= 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def format_interval(low: float | None, value: float, high: float | None, unit: str) -> str:
    """Return value and half-width: ``12.3 GB/s ±1.2 %``. The wider side of a lopsided interval is the one shown.

    Without bounds the bare value; where a percentage misleads (a value of 0, or a half-width of 100 % and more) the
    bounds themselves. Raises ValueError unless low <= value <= high.
    """
    text = format_value(value, unit)
    if low is None or high is None:
        return text
    if not low <= value <= high:
        raise ValueError(f"interval {low}..{high} does not hold its value {value}")
    half = max(high - value, value - low)
    percent = 100 * half / abs(value) if value else math.inf
    if half and percent >= 100:
        return f"{text} ({format_value(low, unit)} to {format_value(high, unit)})"
    return f"{text} ±{_percent(percent)} %"


def _percent(percent: float) -> str:
    if percent < 0.1:  # equal samples too: no clock is exact
        return "<0.1"
    return f"{percent:.1f}" if percent < 9.95 else f"{percent:.0f}"


def format_duration(seconds: float) -> str:
    """Return a time a person waits: ``350 ms``, ``12.0 s``, ``3 min 05 s``, ``1 h 02 min``.

    Raises ValueError when ``seconds`` is negative or not finite.
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"a duration is finite and not negative, got {seconds}")
    if seconds < 59.95:
        return format_value(seconds, "s")
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """Return ``1 case``, ``2 cases``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
