"""Which route to a KV cache pays where: one workload for every policy, and a model of four routes beside it.

The workload has all requests at once: ``documents`` of ``context`` tokens, each asked ``questions`` times in turns, so
that between two questions about a document all others come. Near memory holds ``fits`` contexts, far memory all. The
model counts what each route has to move and compute when everything that can overlap does; it knows no order of
requests, so a policy that rearranges them (or shares a context among requests that run) may be faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs
from kvbench.replay.machine import Machine
from kvbench.replay.models import ELEMENT, token_bytes, weight_bytes
from kvbench.replay.request import Request, blocks_of
from kvbench.systems.directkv import serving

Route = Literal["recompute", "load", "in_place", "cpu"]
ROUTES: tuple[Route, ...] = get_args(Route)
# what each policy does with KV that does not fit near
ROUTE_OF: Mapping[str, Route] = {
    "strata": "load", "lru": "load", "neo": "cpu", "directkv": "in_place", "recompute": "recompute",
    "preempt": "recompute", "ellm_isolated": "recompute", "ellm_elastic": "recompute",
}  # fmt: skip
# the least machinery first: what wins by less than TIE over a simpler one does not pay
SIMPLEST = ("recompute", "preempt", "lru", "directkv", "ellm_isolated", "ellm_elastic", "neo", "strata")
TIE = 0.01
BLOCK = 256  # tokens a hash id names
PAGES = 64  # tokens: whole pages of every policy
CHUNK = 2048  # tokens of a prompt that are prefilled at once: the budget of continuous batching


@dataclass(frozen=True, slots=True)
class Cell:
    """One place of the map. ``link``: bytes/s, in either direction and by every transport; tokens of ``context``, of a
    ``question`` and of an ``output``. Raises UsageError for a number below 1 or a context of less than a block."""

    link: float
    context: int
    output: int = 64
    fits: int = 4
    questions: int = 3
    documents: int = 10
    question: int = 64

    def __post_init__(self) -> None:
        least = min(self.link, self.output, self.fits, self.documents, self.questions, self.question)
        if least < 1 or self.context < BLOCK:
            raise UsageError(
                "not a place of the map", where="routes", got=self, expected=f"1 or more, a context from {BLOCK} on"
            )

    @property
    def requests(self) -> int:
        return self.documents * self.questions

    def trace(self) -> Iterator[Request]:
        """Yield the workload: every document once, then every document again."""
        shared, tokens = self.context // BLOCK, self.context + self.question
        for i in range(self.requests):
            document = i % self.documents
            own = blocks_of(tokens, BLOCK) - shared
            ids = tuple(range(document * shared, (document + 1) * shared))
            first = self.documents * shared + i * (own + 1)
            ids += tuple(range(first, first + own))
            yield Request(i, 0.0, tokens, self.output, block_tokens=BLOCK, hash_ids=ids)

    def machine(self, base: Machine, weights: int, token: int) -> Machine:
        """Return ``base`` with this link and near memory for ``fits`` requests, for a model of so many bytes."""
        each = blocks_of(self.context + self.question + self.output, PAGES) * PAGES * token
        near, far = self.fits * each, self.requests * each
        return base.with_(
            why="the place of the map", link_in=self.link, link_out=self.link, sm_copy=self.link,
            direct_read=self.link, memory=(weights + near) / (1.0 - base["reserve_share"]) + 1.0,
            host_memory=float(far),
        )  # fmt: skip

    def costs(self, base: Machine, shape_name: str) -> Costs:
        """Return the costs at this place."""
        from kvbench.replay.models import model

        shape = model(shape_name)
        return Costs(self.machine(base, weight_bytes(shape), token_bytes(shape)), shape)


@dataclass(frozen=True, slots=True)
class Estimate:
    """``seconds`` of the whole workload by route.

    ``load_from``, ``place_from``: link rates, bytes/s, from which loading a context, and reading it in place while
    decoding, beat computing it again and decoding the few that fit near. None: at no rate.
    """

    seconds: Mapping[Route, float]
    load_from: float | None
    place_from: float | None

    @property
    def winner(self) -> Route:
        """The route that takes least."""
        return min(self.seconds, key=self.seconds.__getitem__)


def estimate(costs: Costs, cell: Cell) -> Estimate:
    """Return what each route takes for the workload, requests served in order.

    - recompute: each request is prefilled whole; ``fits`` are decoded at once.
    - load: each document is prefilled once, later questions load it while theirs is prefilled.
    - in_place: each request is prefilled in chunks, each of which reads what lies before it over the link; all are
      decoded at once, and their KV crosses the link every step.
    - cpu: each request is prefilled whole; beside ``fits`` near ones the CPU attends to as many as pay, a launch a
      layer included.
    """
    n, documents, layers = cell.requests, cell.documents, costs.layers
    tokens, kv = cell.context + cell.question, cell.context + cell.question + cell.output // 2
    whole = _seconds(costs, [(tokens, 0)])
    hit = _seconds(costs, [(cell.question, cell.context)])
    steps = cell.output - 1
    near = steps * n / cell.fits * _decode(costs, cell.fits, kv)
    crossing = n * kv * ELEMENT * costs.shape.kv_width * 2 * layers
    linear = layers * costs.linear(n).seconds + costs.head(n).seconds
    place = steps * (linear + layers * max(costs.attention_compute(n * kv), costs.read_in_place(n * kv)))
    loading = layers * costs.load(cell.context)
    seconds: dict[Route, float] = {
        "recompute": n * whole + near,
        "load": documents * whole + (n - documents) * max(hit, loading) + near,
        "in_place": n * _in_chunks(costs, tokens) + place,
        "cpu": n * whole + _beside(costs, cell, kv, steps),
    }
    context_bytes = cell.context * costs.token_bytes
    gain = whole - hit
    spare = near / steps - linear if steps else 0.0
    return Estimate(seconds, context_bytes / whole if gain > 0.0 else None, crossing / spare if spare > 0.0 else None)


def _beside(costs: Costs, cell: Cell, kv: int, steps: int) -> float:
    """Return the seconds of all decodes with the CPU's share: as many as its attention hides behind the near step."""
    best = steps * cell.requests / cell.fits * _decode(costs, cell.fits, kv)
    for more in range(1, cell.requests - cell.fits + 1):
        work = costs.layer((), cell.fits, cell.fits * kv, more).seconds
        far = costs.launch + costs.cpu_attention(more, more * kv)
        took = costs.layers * max(work, far) + costs.head(cell.fits + more).seconds
        best = min(best, steps * cell.requests / (cell.fits + more) * took)
    return best


def _in_chunks(costs: Costs, tokens: int) -> float:
    """Return the seconds of a prefill whose KV goes far and is read back chunk by chunk."""
    total = costs.head(1).seconds
    heads = serving.Heads(costs.shape.heads, costs.shape.kv_heads, costs.shape.head_dim)
    for context in range(0, tokens, CHUNK):
        new = min(CHUNK, tokens - context)
        near = costs.near_seconds(serving.prefill(heads, new, context, "in_place").near)
        arithmetic = costs.attention_compute(new * context + new * (new + 1) / 2)
        attention = max(arithmetic, near, costs.read_in_place(context))
        total += costs.layers * (costs.linear(new).seconds + attention)
    return total


def _seconds(costs: Costs, prefill: list[tuple[int, int]]) -> float:
    return costs.layers * costs.layer(prefill).seconds + costs.head(1).seconds


def _decode(costs: Costs, requests: int, kv: int) -> float:
    return costs.layers * costs.layer((), requests, requests * kv).seconds + costs.head(requests).seconds


def ranking(rates: Mapping[str, float]) -> Sequence[str]:
    """Return the policies by their ``rates``, best first; of those within 1 % of the best the simplest leads."""
    best = max(rates.values())
    return sorted(
        rates, key=lambda name: (rates[name] < best * (1.0 - TIE), SIMPLEST.index(name)
                                 if rates[name] >= best * (1.0 - TIE) else -rates[name]),
    )  # fmt: skip


def words(policy: str, cell: Cell) -> tuple[str, ...]:
    """Return the parameters ``policy`` is run with at a place.

    Its defaults, but that every one moves at the link's rate (``sm``), may see a prompt this long, and, where it asks
    how often a context is used before it is kept, keeps it at once: every one here is asked again.
    """
    longest = cell.context + cell.question + cell.output
    chosen: Mapping[str, tuple[str, ...]] = {
        "strata": ("write=write_through",),
        "neo": ("transport=sm", f"tokens={max(20_480, longest)}"),
        "ellm_isolated": (f"context={longest}", f"slo_prompt={min(2048, longest - 1)}"),
        "ellm_elastic": (f"context={longest}", f"slo_prompt={min(2048, longest - 1)}"),
        "preempt": ("transport=sm",), "lru": ("transport=sm",),
    }  # fmt: skip
    return chosen.get(policy, ())
