"""What a claim needs of a machine: small predicates on the hardware key of design 7, with three answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fact = float | str | None  # None: not known here
FACTS = ("gpus", "gpu_name", "gpu_memory_gib", "pcie_gen", "pcie_width", "c2c", "numa_nodes", "cores")
_NEED = re.compile(r"(?P<fact>[a-z0-9_]+) (?P<op>>=|<=|==|has) (?P<value>\S.*)")
# Boards whose memory is reached over NVLink-C2C; others do not answer how many such links they have.
_C2C_BOARDS = re.compile(r"\b(GH|GB)[0-9]")


@dataclass(frozen=True, slots=True)
class Need:
    """``fact op value``: ``pcie_gen == 5``, ``gpu_name has H200``, ``c2c == 0``."""

    fact: str
    op: str
    value: float | str

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.fact} {self.op} {value}"


def parse_need(text: object) -> Need:
    """Return the need ``text`` states. Raises ValueError."""
    match = _NEED.fullmatch(text) if isinstance(text, str) else None
    if match is None or match["fact"] not in FACTS:
        raise ValueError(f"{text!r} is no need: expected FACT >= | <= | == | has VALUE, FACT one of {' '.join(FACTS)}")
    if match["op"] == "has":
        return Need(match["fact"], "has", match["value"])
    try:
        return Need(match["fact"], match["op"], float(match["value"]))
    except ValueError:
        raise ValueError(f"{text!r}: {match['value']!r} is no number") from None


def machine_facts(machine: Mapping[str, Any]) -> dict[str, Fact]:
    """Return the facts of ``machine`` (Fingerprint.machine or RunInfo.machine); what it does not tell is None.

    Of several kinds of boards the first kind counts. A board that does not answer about C2C is judged by its name.
    """
    key = machine.get("key")
    if not isinstance(key, Mapping):
        return dict.fromkeys(FACTS)
    boards = key.get("gpus")
    first: Any = boards[0] if isinstance(boards, list) and boards else {}
    first = first if isinstance(first, Mapping) else {}
    name = first.get("name")
    c2c = first.get("c2c")
    if not isinstance(c2c, bool):
        c2c = bool(_C2C_BOARDS.search(name)) if isinstance(name, str) else None
    count: Fact = None
    if isinstance(boards, list):
        counts = [board.get("count") for board in boards if isinstance(board, Mapping)]
        count = float(sum(each for each in counts if isinstance(each, int)))
    return {
        "gpus": count, "gpu_name": name if isinstance(name, str) else None,
        "gpu_memory_gib": _number(first.get("memory_gib")), "pcie_gen": _number(first.get("max_gen")),
        "pcie_width": _number(first.get("max_width")), "c2c": None if c2c is None else float(c2c),
        "numa_nodes": _number(key.get("numa_nodes")), "cores": _number(key.get("cores")),
    }  # fmt: skip


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether a need is ``met`` (None: not known) and what was ``found``, in words."""

    need: Need
    met: bool | None
    found: str


def answer(need: Need, facts: Mapping[str, Fact]) -> Answer:
    """Return whether ``facts`` meet ``need``."""
    fact = facts.get(need.fact)
    if fact is None:
        without_gpu = facts.get("gpus") == 0.0 and need.fact in ("gpu_name", "gpu_memory_gib", "pcie_gen", "pcie_width",
                                                                 "c2c")  # fmt: skip
        return Answer(need, False, "no GPU") if without_gpu else Answer(need, None, "not known")
    if need.op == "has":
        return Answer(need, str(need.value).lower() in str(fact).lower(), str(fact))
    if not isinstance(fact, float) or not isinstance(need.value, float):
        return Answer(need, None, "not known")
    met = {">=": fact >= need.value, "<=": fact <= need.value, "==": fact == need.value}[need.op]
    return Answer(need, met, f"{fact:g}")
