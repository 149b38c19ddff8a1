"""Presets: traces made here that have the published statistics of a dataset; ``NAME[:key=value,...]`` names one.

Published (docs/replay.md has the table): means of input and output, numbers of documents and questions, the recipe of
the agents. The shapes of the laws around those means are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from kvbench.errors import UsageError, nearest
from kvbench.replay.generate.conversations import ConversationLaw, conversations
from kvbench.replay.generate.documents import DISTANCES, Distance, DocumentLaw, documents
from kvbench.replay.generate.laws import Arrivals, Lengths, Uniform, stream
from kvbench.replay.request import Request

BLOCK_TOKENS = 512
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Option:
    """One ``key=value`` of a preset: its default, and how its text is read (raises ValueError)."""

    default: Any
    read: Callable[[str], Any]
    expected: str


Maker = Callable[[int, Arrivals, int, Mapping[str, Any]], Iterator[Request]]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named generator. ``rate``: requests a second where none is asked for; ``requests``: size of the dataset."""

    name: str
    about: str
    rate: float
    requests: int
    options: Mapping[str, Option]
    make: Maker


@dataclass(frozen=True, slots=True)
class Chosen:
    """A preset with its options; ``text`` is its one canonical name (defaults left out, keys sorted)."""

    preset: Preset
    values: Mapping[str, Any]
    text: str

    def requests(self, count: int, rate: float | None = None, seed: int = 0) -> Iterator[Request]:
        """Yield ``count`` requests at ``rate`` a second (None: the preset's). The same arguments give the same trace.

        Raises UsageError for a rate, seed or count out of range.
        """
        if not 1 <= count <= MOST_REQUESTS:
            raise UsageError("requests", got=count, expected=f"1..{MOST_REQUESTS}")
        arrivals = Arrivals(self.preset.rate if rate is None else rate, self.values["cv"])
        stream(seed, "check")
        return self.preset.make(count, arrivals, seed, self.values)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return read


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not low < value <= high:
            raise ValueError
        return value

    return read


def _word(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


_CV = Option(1.0, _number(0.0, 10.0), "coefficient of variation of the gaps, 0..10; 1 is Poisson")
_BLOCK = Option(BLOCK_TOKENS, _whole(1, 1 << 20), "tokens of a prefix block, 1..1048576")
_DISTANCE = Option("shuffle", _word(*DISTANCES), " ".join(DISTANCES))
_TOKENS = _whole(1, 1 << 24)


def _documents(name: str, about: str, rate: float, law: DocumentLaw) -> Preset:
    def make(count: int, arrivals: Arrivals, seed: int, values: Mapping[str, Any]) -> Iterator[Request]:
        return documents(law, count, arrivals, seed, values["block"], cast(Distance, values["distance"]))

    return Preset(
        name, about, rate, law.questions, {"cv": _CV, "block": _BLOCK, "distance": _DISTANCE}, make
    )  # fmt: skip


def _conversations(name: str, about: str, rate: float, requests: int, law: ConversationLaw) -> Preset:
    def make(count: int, arrivals: Arrivals, seed: int, values: Mapping[str, Any]) -> Iterator[Request]:
        return conversations(law, count, arrivals, seed, values["block"])

    return Preset(name, about, rate, requests, {"cv": _CV, "block": _BLOCK}, make)


def _plain(
    count: int, arrivals: Arrivals, seed: int, inputs: Iterator[int], outputs: Iterator[int]
) -> Iterator[Request]:
    times = arrivals.times(stream(seed, "arrivals"))
    for i, at, new, out in zip(range(count), times, inputs, outputs, strict=False):
        yield Request(i, at, new, out)


def _osc(count: int, arrivals: Arrivals, seed: int, values: Mapping[str, Any]) -> Iterator[Request]:
    inputs = OSC_INPUT.draws(stream(seed, "inputs"))
    return _plain(count, arrivals, seed, inputs, OSC_OUTPUT.draws(stream(seed, "outputs")))


def _synthetic(count: int, arrivals: Arrivals, seed: int, values: Mapping[str, Any]) -> Iterator[Request]:
    laws = [Uniform(values[name], values["spread"]).draws(stream(seed, name)) for name in ("input", "output")]
    return _plain(count, arrivals, seed, *laws)


# Strata, Table 1: documents, questions, mean input and output.
LOOGLE = DocumentLaw(105, 2410, 21_613.0, 15.6, 30.0, 0.4, 0.8)
NARRATIVEQA = DocumentLaw(50, 1461, 54_797.0, 13.0, 15.0, 0.6, 0.8)
REVIEWMT = DocumentLaw(100, 1092, 17_708.0, 208.0, 60.0, 0.3, 0.6, dialogue=True)
_NEW, _OUT = 160.0, 261.0
# The mean number of turns follows from the mean input when it counts the history: 681 = new + (turns - 1)(new + out).
SHAREGPT = ConversationLaw(
    1.0 + (681.0 - _NEW) / (_NEW + _OUT), Lengths(_NEW, 1.2), Lengths(_OUT, 0.9), Lengths(60_000.0, 0.0),
    most_context=1 << 17,
)  # fmt: skip
# The manifest of aiperf's agentic_code_gen: mean, median and maximum of each law; 20 turns and 200,000 tokens are ours.
AGENTIC = ConversationLaw(
    20.0, Lengths.of(6000.0, 4000.0, 1, 50_000), Lengths.of(1000.0, 800.0, 1, 10_000), Lengths.of(5000.0, 2000.0),
    Lengths.of(30_000.0, 15_000.0), quick=0.7, shared=32_768, reset=0.05, most_context=200_000,
)  # fmt: skip
# NEO's shipped lengths: mean and range of prompts and outputs.
OSC_INPUT, OSC_OUTPUT = Lengths(372.0, 0.4, 29, 589), Lengths(45.0, 0.5, 15, 129)

_ALL = (
    _documents("loogle", "long documents, about 23 short questions each", 1.0, LOOGLE),
    _documents("narrativeqa", "books, about 29 short questions each", 0.5, NARRATIVEQA),
    _documents("reviewmt", "dialogues of about 11 turns about a paper each", 1.0, REVIEWMT),
    _conversations("sharegpt", "chats of about two turns, 60 s apart", 1.0, 200_869, SHAREGPT),
    _conversations("agentic", "agents that write code, 32k tokens in common, about 20 turns", 1.0, 1205 * 20, AGENTIC),
    Preset("osc", "prompts to summarise, lengths only", 1.0, 2000, {"cv": _CV}, _osc),
    Preset(
        "synthetic", "lengths uniform around input and output, lengths only", 1.0, 1000,
        {"cv": _CV, "input": Option(2048, _TOKENS, "tokens, 1..16777216"),
         "output": Option(2048, _TOKENS, "tokens, 1..16777216"),
         "spread": Option(0.1, _number(-1e-12, 0.99), "0..0.99")},
        _synthetic,
    ),
)  # fmt: skip
PRESETS: Mapping[str, Preset] = MappingProxyType({each.name: each for each in _ALL})


def preset(text: str) -> Chosen:
    """Return the preset ``NAME[:key=value,...]`` names. Raises UsageError that lists presets or options."""
    name, colon, rest = text.partition(":")
    found = PRESETS.get(name)
    if found is None:
        raise UsageError(
            "unknown preset", got=name, expected="one of " + " ".join(PRESETS),
            mend=nearest(name, PRESETS, "a trace is named by its file"),
        )  # fmt: skip
    values = {key: option.default for key, option in found.options.items()}
    given: set[str] = set()
    for word in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in word.partition("="))
        option = found.options.get(key)
        if option is None or not equals:
            raise UsageError(
                "not an option of the preset", where=name, got=word,
                expected=" ".join(f"{each}=VALUE" for each in found.options),
            )  # fmt: skip
        if key in given:
            raise UsageError("option given twice", where=name, got=word)
        given.add(key)
        try:
            values[key] = option.read(value)
        except ValueError:
            raise UsageError(
                "value of a preset's option", where=f"{name}:{key}", got=value, expected=option.expected
            ) from None
    changed = [f"{key}={values[key]}" for key in sorted(values) if values[key] != found.options[key].default]
    return Chosen(found, values, f"{name}:{','.join(changed)}" if changed else name)
