"""The numbers of a machine that costs are made of, each with its source: presets, and changes to them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, get_args

from kvbench.errors import UsageError, nearest

SCHEMA = "kvbench.machine/1"
Kind = Literal["measured", "spec", "assumed", "given"]
PRESETS = ("t4", "a10g", "a100", "h100", "h200", "gh200")
THIS = "this"
# name -> (unit, smallest, largest): what each number may be; a share is of the number it belongs to
NUMBERS: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "flops": ("FLOP/s", 1e6, 1e18),
        "flops_share": ("1", 1e-3, 1.0),
        "attention_share": ("1", 1e-3, 1.0),
        "hbm": ("B/s", 1e6, 1e16),
        "hbm_share": ("1", 1e-3, 1.0),
        "memory": ("B", 1.0, 1e16),
        "link_in": ("B/s", 1e3, 1e15),
        "link_out": ("B/s", 1e3, 1e15),
        "link_duplex": ("1", 1.0, 100.0),
        "sm_copy": ("B/s", 1e3, 1e15),
        "direct_read": ("B/s", 1e3, 1e15),
        "ce_call": ("s", 0.0, 1.0),
        "batch_call": ("s", 0.0, 1.0),
        "host_bandwidth": ("B/s", 1e3, 1e15),
        "cpu_share": ("1", 1e-3, 1.0),
        "cpu_flops": ("FLOP/s", 1e3, 1e18),
        "host_memory": ("B", 0.0, 1e16),
        "map_chunk": ("s", 0.0, 10.0),
        "unmap_chunk": ("s", 0.0, 10.0),
        "chunk_bytes": ("B", 1.0, 1e12),
        "launch": ("s", 0.0, 10.0),
        "reserve_share": ("1", 0.0, 0.99),
    }
)


@dataclass(frozen=True, slots=True)
class Number:
    """``value`` in the SI unit of :data:`NUMBERS`; ``kind``: ``measured`` (somewhere, ``source`` says where), ``spec``
    (a data sheet or a paper's citation), ``assumed``, or ``given`` by the caller."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Every number of :data:`NUMBERS`. ``devices`` GPUs share a model ideally: near memory, rates and link multiply.

    Raises UsageError for a missing or unknown number, and for one outside its range.
    """

    name: str
    title: str
    numbers: Mapping[str, Number]
    devices: int = 1

    def __post_init__(self) -> None:
        for name in (*NUMBERS, *self.numbers):
            if name not in NUMBERS or name not in self.numbers:
                raise _number_error(self.name, name, "unknown" if name not in NUMBERS else "missing")
            unit, low, high = NUMBERS[name]
            value = self.numbers[name].value
            if not (isinstance(value, int | float) and math.isfinite(value) and low <= value <= high):
                raise UsageError(
                    "number out of range", where=f"machine {self.name}, {name}", got=value,
                    expected=f"{low:g}..{high:g} {unit}",
                )  # fmt: skip
        if not 1 <= self.devices <= 1024:
            raise UsageError("devices", where=f"machine {self.name}", got=self.devices, expected="1..1024")

    def __getitem__(self, name: str) -> float:
        return self.numbers[name].value

    def with_(self, *, devices: int | None = None, why: str = "given by the caller", **values: float) -> Machine:
        """Return the machine with other ``values``, which then are ``given``; UsageError for names that are unknown."""
        changed = {name: Number(float(value), "given", why) for name, value in values.items()}
        return replace(self, numbers={**self.numbers, **changed}, devices=devices or self.devices)

    def taking(self, found: Mapping[str, Number]) -> Machine:
        """Return the machine with the numbers ``found`` in place of its own."""
        return replace(self, numbers={**self.numbers, **found})

    def to_json(self) -> dict[str, Any]:
        """Return the ``kvbench.machine/1`` document: every number with its kind and source."""
        numbers = {
            name: {"value": n.value, "unit": NUMBERS[name][0], "kind": n.kind, "source": n.source}
            for name, n in ((name, self.numbers[name]) for name in NUMBERS)
        }
        return {
            "schema": SCHEMA, "name": self.name, "title": self.title, "devices": self.devices, "numbers": numbers,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Rebuild a machine from :meth:`to_json`; UsageError for another schema or a malformed document."""
        if data.get("schema") != SCHEMA:
            raise UsageError("not a machine", where="machine", got=data.get("schema"), expected=SCHEMA)
        try:
            numbers = {name: _number(str(data["name"]), name, entry) for name, entry in data["numbers"].items()}
            return cls(str(data["name"]), str(data["title"]), numbers, int(data["devices"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                "malformed machine", where="machine", got=f"{type(error).__name__}: {error}", expected=SCHEMA
            ) from error


def _number(machine: str, name: str, entry: Mapping[str, Any]) -> Number:
    kind = entry["kind"]
    if kind not in get_args(Kind) or not entry["source"]:
        raise UsageError(
            "a number without its source", where=f"machine {machine}, {name}", got=f"kind {kind!r}",
            expected=f"kind {', '.join(get_args(Kind))}, and a source",
        )  # fmt: skip
    return Number(float(entry["value"]), kind, str(entry["source"]))


def _number_error(machine: str, name: str, what: str) -> UsageError:
    return UsageError(
        f"{what} number", where=f"machine {machine}", got=name, expected=", ".join(NUMBERS),
        mend=nearest(name, NUMBERS) if what == "unknown" else "",
    )  # fmt: skip


@cache
def preset(name: str) -> Machine:
    """Return the machine called ``name``. Raises UsageError for a name that is not in :data:`PRESETS`."""
    if name not in PRESETS:
        raise UsageError(
            "unknown machine", where="machine", got=name, expected=f"one of {', '.join((*PRESETS, THIS))}",
            mend=nearest(name, PRESETS),
        )  # fmt: skip
    text = files("kvbench.replay").joinpath("machines", f"{name}.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    numbers = {key: _number(name, key, entry) for key, entry in data.items() if isinstance(entry, dict)}
    return Machine(data["name"], data["title"], MappingProxyType(numbers))
