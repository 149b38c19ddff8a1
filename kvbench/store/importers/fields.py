"""A JSON object of a foreign file, read field by field: a wrong one is named with its path, never guessed."""

from __future__ import annotations

import math
import re
from collections.abc import Container
from decimal import Decimal
from typing import Any

from kvbench.errors import printable
from kvbench.store.importers.source import Malformed

LARGEST = 1 << 63
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_WHOLE = re.compile(r"-?[0-9]{1,19}")


class Fields:
    """An object at ``path`` of a document. Raises Malformed when it is none."""

    __slots__ = ("_values", "path")

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise Malformed(f"{path or 'the document'} is {short(value)}, expected an object")
        self._values: dict[str, Any] = value
        self.path = path

    def at(self, name: str) -> str:
        """Return the path of field ``name``."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self._values.get(name) is not None

    def others(self, known: Container[str]) -> list[str]:
        """Return the names of the fields that are not ``known``."""
        return [name for name in self._values if name not in known]

    def pairs(self) -> list[tuple[str, Any]]:
        """Return every field with its value."""
        return list(self._values.items())

    def raw(self, name: str) -> Any:
        """Return the field, None where it is missing."""
        return self._values.get(name)

    def word(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "text")
        return value

    def number(self, name: str) -> float:
        """Return a finite number that stands as a number."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        try:
            found = float(value)
        except OverflowError:
            raise self._wrong(name, "a finite number") from None
        if not math.isfinite(found):
            raise self._wrong(name, "a finite number")
        return found

    def count(self, name: str) -> int:
        """Return a whole number from 0 on."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST:
            raise self._wrong(name, "a count")
        return value

    def flag(self, name: str) -> bool:
        """Return a truth value, False where it is missing."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        """Return a list, an empty one where it is missing or null."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value or []

    def child(self, name: str) -> Fields:
        """Return an object. Raises Malformed where it is missing."""
        if name not in self._values:
            raise Malformed(f"{self.path or 'the document'} lacks the field {name!r}")
        return Fields(self._values[name], self.at(name))

    def children(self, name: str) -> list[Fields]:
        """Return a list of objects, an empty one where it is missing or null."""
        return [Fields(value, f"{self.at(name)}[{index}]") for index, value in enumerate(self.items(name))]

    def _wrong(self, name: str, expected: str) -> Malformed:
        if name not in self._values:
            return Malformed(f"{self.path or 'the document'} lacks the field {name!r}")
        return Malformed(f"{self.at(name)} is {short(self._values[name])}, expected {expected}")


def written_number(text: object, path: str, power: int = 0) -> float:
    """Return the finite number that stands as ``text`` times 10**power, the double nearest to it.

    Raises Malformed for "nan", "inf" and anything else.
    """
    if not isinstance(text, str) or not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise Malformed(f"{path} is {short(text)}, expected a finite number")
    return float(Decimal(text).scaleb(power))  # times 1e-9 would round twice


def written_whole(text: object, path: str) -> int:
    """Return the 64-bit whole number that stands as ``text`` or as a number. Raises Malformed."""
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text) if abs(text) < LARGEST else ""
    if not isinstance(text, str) or not _WHOLE.fullmatch(text) or not -LARGEST <= int(text) < LARGEST:
        raise Malformed(f"{path} is {short(text)}, expected a 64-bit whole number")
    return int(text)


def short(value: object) -> str:
    """Return ``value`` for an error line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST:
        return "a number of more than 64 bits"
    return printable(repr(value), 60)
