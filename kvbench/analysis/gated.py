"""What a gate found: every case with its looks, and one word for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvbench.analysis.compare import Side
    from kvbench.analysis.gate import Judged, Rule
    from kvbench.contract.result import Result

Word = Literal["PASS", "REGRESSION", "INCONCLUSIVE", "TAINTED", "NO_DATA", "REPORT_ONLY"]
Key = tuple[str, str]  # case digest, metric


@dataclass(frozen=True, slots=True)
class Gated:
    """One case as the gate saw it. ``row_a`` and ``row_b`` are a row of each side, None where that side has none."""

    key: Key
    row_a: Result | None
    row_b: Result | None
    judged: Judged | None
    rule: Rule
    looks: int
    outcome: Literal["pass", "regression", "unknown"]
    reason: str

    @property
    def loss(self) -> float:
        return self.judged.effect.loss if self.judged else 0.0


@dataclass(frozen=True, slots=True)
class GateResult:
    """``word`` and ``reason`` are the verdict; ``sides`` the runs of the first look; ``left_out`` cases the baseline
    does not have."""

    word: Word
    reason: str
    cases: tuple[Gated, ...]
    sides: tuple[Side, Side]
    moved: tuple[str, ...]
    left_out: int
