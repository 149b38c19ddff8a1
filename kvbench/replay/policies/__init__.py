"""The policies a replay knows by name, each with a frozen dataclass of parameters; modules are imported when asked for.

A module ``kvbench.replay.policies.<file>`` holds, for each of its policies, the class of parameters (every field a
number, a truth value or a word, with a default) and a function ``make(costs, params)`` that returns the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvbench.errors import UsageError, nearest

if TYPE_CHECKING:
    from kvbench.replay.costs import Costs
    from kvbench.replay.protocol import Policy


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a policy is: ``module`` below this package, the names of its parameter class and its factory."""

    module: str
    params: str = "Params"
    make: str = "make"


POLICIES: Mapping[str, Entry] = MappingProxyType(
    {
        "strata": Entry("strata"),
        "neo": Entry("neo"),
        "ellm_isolated": Entry("ellm", "IsolatedParams", "make_isolated"),
        "ellm_elastic": Entry("ellm", "ElasticParams", "make_elastic"),
        "directkv": Entry("directkv"),
        "recompute": Entry("recompute"),
        "preempt": Entry("preempt"),
        "lru": Entry("lru"),
    }
)


def entry(name: str) -> Entry:
    """Return where the policy called ``name`` is. Raises UsageError for an unknown one."""
    if name not in POLICIES:
        raise UsageError(
            "unknown policy", where="policy", got=name, expected=f"one of {', '.join(POLICIES)}",
            mend=nearest(name, POLICIES),
        )  # fmt: skip
    return POLICIES[name]


def params_class(name: str) -> type[Any]:
    """Return the dataclass of the parameters of policy ``name``."""
    found = entry(name)
    return getattr(import_module(f"{__name__}.{found.module}"), found.params)  # type: ignore[no-any-return]


def make(name: str, costs: Costs, params: Any = None) -> Policy:
    """Return a fresh policy ``name`` for a model on a machine; ``params`` of its own class, None for the defaults.

    Raises UsageError for an unknown name, for parameters of another policy, and where the policy refuses them.
    """
    found = entry(name)
    kind = params_class(name)
    chosen = kind() if params is None else params
    if type(chosen) is not kind:
        raise UsageError("parameters of another policy", where=name, got=type(chosen).__name__, expected=kind.__name__)
    factory: Callable[[Costs, Any], Policy] = getattr(import_module(f"{__name__}.{found.module}"), found.make)
    return factory(costs, chosen)


def parse_params(name: str, words: Iterable[str]) -> Any:
    """Return the parameters of policy ``name`` with ``words`` of ``field=value`` in place of defaults.

    Raises UsageError for a word of another form, an unknown field, a value of another type, and whatever the class
    itself refuses.
    """
    kind = params_class(name)
    known = {field.name: field for field in fields(kind)}
    defaults = kind()
    chosen: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            raise UsageError(
                "unknown parameter" if equals else "not NAME=VALUE", where=f"policy {name}", got=word,
                expected=f"one of {', '.join(known)}" if known else "no parameter",
                mend=nearest(key, known),
            )  # fmt: skip
        chosen[key] = _value(name, key, text, getattr(defaults, key))
    return kind(**chosen)


def _value(policy: str, key: str, text: str, default: object) -> object:
    """Return ``text`` as a value of the type of ``default``; a number where the default is None."""
    where = f"policy {policy}, {key}"
    if isinstance(default, bool):
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if text.lower() not in words:
            raise UsageError("not a truth value", where=where, got=text, expected="true or false")
        return words[text.lower()]
    if isinstance(default, str):
        return text
    if default is None and text.lower() == "none":
        return None
    try:
        if isinstance(default, int):
            return int(text)
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(text)
        return int(number) if default is None and number == int(number) else number
    except (ValueError, OverflowError):
        expected = "a whole number" if isinstance(default, int) else "a number"
        raise UsageError("not a number", where=where, got=text, expected=expected) from None
