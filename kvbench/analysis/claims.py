"""The papers' claims as data: what each says, of which machine, and which cases would measure it.

One TOML file a system in results/claims. A claim is of one kind: a ``number``, a ``shape`` (how something runs over an
axis, or whether something stays small), or a ``direction`` (which of two is more). Its forms say how it is measured
here; a form without cases names the command that will once the bench is there.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kvbench import data
from kvbench.analysis.claim_needs import Need, parse_need
from kvbench.analysis.claim_rules import RULES
from kvbench.errors import UsageError

SYSTEMS = ("directkv", "neo", "ellm", "strata")
Kind = Literal["number", "shape", "direction"]
Bound = Literal["about", "at_least", "at_most"]
Side = Literal["above", "below"]
# gpu: as in the paper. host: the same mechanism without a GPU. model: computed, emulated or simulated, not measured.
On = Literal["gpu", "host", "model"]
_ID = re.compile(r"[a-z]+(-[a-z0-9]+)+")
_BENCH = re.compile(r"[a-z_]+/[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Number:
    """A figure of a paper in an SI unit (``1``: a ratio or share). ``high``: where the paper gives a range."""

    name: str
    value: float
    unit: str
    high: float | None = None
    bound: Bound = "about"


@dataclass(frozen=True, slots=True)
class Cases:
    """Cases of one bench under the name a rule knows them by. Axes that are not named have their one quick value."""

    name: str
    bench: str
    metric: str
    axes: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to measure a claim: on which machines (``needs``), from which ``cases``, by which rule.

    ``planned``: no bench measures it yet, and this is the command that will. Then there are no cases and no rule.
    """

    on: On
    needs: tuple[Need, ...]
    cases: tuple[Cases, ...] = ()
    rule: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    planned: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of a paper in our words. ``numbers[0]`` is the one that is judged.

    ``tolerance`` is relative. ``neutral`` and ``side``: the direction holds when what we measure lies on that side of
    it. ``verified`` is False where the figure could not be read in the paper itself; ``contradiction`` says which other
    number of the paper it disagrees with. Neither kind of figure can be reproduced as a number.
    """

    system: str
    id: str
    kind: Kind
    statement: str
    numbers: tuple[Number, ...]
    section: str
    hardware: str
    baseline: str
    conditions: str
    misquoted: str
    forms: tuple[Form, ...]
    tolerance: float | None = None
    neutral: float | None = None
    side: Side | None = None
    verified: bool = True
    contradiction: str = ""


def load_claims(system: str | None = None, folder: Path | None = None) -> tuple[Claim, ...]:
    """Return the claims of ``system``, or of all. Raises UsageError for an unknown system and for a malformed file."""
    if system is not None and system not in SYSTEMS:
        raise UsageError("unknown system", got=system, expected=f"one of {' '.join(SYSTEMS)}")
    folder = data.root("results") / "claims" if folder is None else folder
    found = [
        claim for name in (SYSTEMS if system is None else (system,)) for claim in read_claims(folder / f"{name}.toml")
    ]
    seen: dict[str, str] = {}
    for claim in found:
        if seen.setdefault(claim.id, claim.system) != claim.system:
            raise UsageError("two systems claim it", where=str(folder), got=claim.id)
    return tuple(found)


def read_claims(path: Path) -> tuple[Claim, ...]:
    """Return the claims of one file, whose name is the system. Raises UsageError naming file, claim and key."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the claims cannot be read ({error})", where=str(path), mend="reinstall kvbench") from None
    top = _Table(document, str(path))
    claims = tuple(_claim(each, path.stem) for each in top.tables("claim"))
    top.done()
    for index, claim in enumerate(claims):
        if claim.id in {other.id for other in claims[:index]}:
            raise UsageError("two claims have this id", where=str(path), got=claim.id)
    return claims


class _Table:
    """A TOML table that is emptied key by key: what is left over is a misspelt key."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._left, self.where = dict(table), where

    def take(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        if key not in self._left:
            if default is None:
                raise UsageError("a key is missing", where=self.where, expected=key)
            return default
        value = self._left.pop(key)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise UsageError("not what this key holds", where=f"{self.where} {key}", got=str(value))
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text on one line, however the file breaks it."""
        return " ".join(str(self.take(key, str, default)).split())

    def word(self, key: str, legal: Sequence[str], default: str | None = None) -> Any:
        value = self.take(key, str, default)
        if value not in legal:
            raise UsageError("unknown word", where=f"{self.where} {key}", got=value, expected=" ".join(legal))
        return value

    def number(self, key: str) -> float | None:
        return float(self.take(key, (int, float))) if key in self._left else None

    def tables(self, key: str) -> list[_Table]:
        found = self.take(key, list, [])
        if not all(isinstance(each, dict) for each in found):
            raise UsageError("not a list of tables", where=f"{self.where} {key}")
        return [_Table(each, f"{self.where} {key} {each.get('id', number)}") for number, each in enumerate(found)]

    def table(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.take(key, dict, {})
        return found

    def done(self) -> None:
        if self._left:
            raise UsageError("unknown key", where=self.where, got=sorted(self._left)[0])

    def fail(self, what: str, got: object = None, expected: str = "") -> UsageError:
        return UsageError(what, where=self.where, got=got, expected=expected)


def _claim(table: _Table, system: str) -> Claim:
    kind: Kind = table.word("kind", get_args(Kind))
    found = Claim(
        system=system, id=table.take("id", str), kind=kind, numbers=tuple(map(_number, table.tables("numbers"))),
        forms=tuple(_form(each, kind) for each in table.tables("form")), tolerance=table.number("tolerance"),
        neutral=table.number("neutral"), side=table.word("side", ("", *get_args(Side)), "") or None,
        verified=table.take("verified", bool, True),
        contradiction=table.text("contradiction", ""),
        **{key: table.text(key) for key in
           ("statement", "section", "hardware", "baseline", "conditions", "misquoted")},
    )  # fmt: skip
    table.done()
    if not _ID.fullmatch(found.id) or not found.id.startswith(f"{system}-"):
        raise table.fail("not an id of this system", found.id, f"{system}-words")
    for name in ("statement", "section", "hardware", "conditions"):
        if not getattr(found, name).strip():
            raise table.fail("an empty text", name)
    if not found.forms:
        raise table.fail("no form says how it is measured", expected="[[claim.form]]")
    if kind == "number" and (not found.numbers or found.tolerance is None or not 0.0 < found.tolerance <= 1.0):
        raise table.fail("a number needs numbers and a tolerance", found.tolerance, "0 < tolerance <= 1")
    if (found.neutral is None) != (found.side is None) or (kind == "direction" and found.side is None):
        raise table.fail("neutral and side go together, and a direction needs them")
    return found


def _number(table: _Table) -> Number:
    value, high = table.number("value"), table.number("high")
    if value is None:
        raise table.fail("a key is missing", expected="value")
    found = Number(
        table.take("name", str), value, table.take("unit", str), high, table.word("bound", get_args(Bound), "about")
    )
    table.done()
    if high is not None and (high <= value or found.bound != "about"):
        raise table.fail("not a range", f"{value}..{high}", "value < high, without a bound")
    return found


def _form(table: _Table, kind: Kind) -> Form:
    needs = []
    for text in table.take("needs", list, []):
        try:
            needs.append(parse_need(text))
        except ValueError as error:
            raise table.fail(str(error)) from None
    found = Form(
        on=table.word("on", get_args(On)), needs=tuple(needs), cases=tuple(map(_cases, table.tables("case"))),
        rule=table.take("rule", str, ""), args=table.table("args"), planned=table.text("planned", ""),
    )  # fmt: skip
    table.done()
    if bool(found.planned) == bool(found.cases):
        raise table.fail("a form has either cases or the command that is planned")
    if kind == "number" and found.on == "host":
        raise table.fail("a host form supports no number of a paper", found.on, "gpu or model")
    if found.on == "gpu" and not any(need.fact == "gpus" for need in needs):
        raise table.fail("a form on a GPU needs one", expected='"gpus >= 1" among its needs')
    if found.cases:
        if found.rule not in RULES:
            raise table.fail("unknown rule", found.rule, " ".join(sorted(RULES)))
        try:
            inspect.signature(RULES[found.rule]).bind(None, **found.args)
        except TypeError as error:
            raise table.fail(f"the rule {found.rule} does not take these args ({error})") from None
    return found


def _cases(table: _Table) -> Cases:
    axes: dict[str, tuple[str, ...]] = {}
    for name, value in table.table("axes").items():
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(each, str | int) and not isinstance(each, bool) for each in values):
            raise table.fail("an axis value is a word or a whole number", str(value))
        axes[name] = tuple(str(each) for each in values)
    found = Cases(table.take("name", str), table.take("bench", str), table.take("metric", str), axes)
    table.done()
    if not _BENCH.fullmatch(found.bench):
        raise table.fail("not a bench", found.bench, "suite/bench")
    return found
