"""Which route to a KV cache pays where: one workload for every policy, and a model of four routes beside it.

The workload has all requests at once: ``documents`` of ``context`` tokens, each asked ``questions`` times in turns, so
that between two questions about a document all others come. Near memory holds ``fits`` contexts, far memory all. The
model counts the least each route has to move and compute, in order of the requests: no policy that keeps the order is
faster. One that rearranges them, or shares a context among those that run (Strata's), is not slower than ``shared``.
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
ROUTES: tuple[Route, ...] = get_args(Route)  # the least machinery first
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
TOKENS = 20_480  # of an iteration of NEO
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

    ``shared``: the least of a policy that rearranges requests: no load at all, every step with all requests.
    """

    seconds: Mapping[Route, float]
    load_from: float | None
    place_from: float | None
    shared: float

    @property
    def winner(self) -> Route:
        """The route that takes least; of those within TIE of it the simplest."""
        least = min(self.seconds.values())
        return next(route for route in ROUTES if self.seconds[route] <= least * (1.0 + TIE))


def estimate(costs: Costs, cell: Cell) -> Estimate:
    """Return the least each route can take for the workload, requests served in order.

    - recompute: each request is prefilled whole; as many as fit near are decoded at once.
    - load: each document is prefilled once, later questions load it while theirs is prefilled; where all fit near they
      need not, and those that run may share it.
    - in_place: each request is prefilled in chunks, each of which reads what lies before it over the link; all are
      decoded at once, and their KV crosses the link every step.
    - cpu: each request is prefilled whole; beside what fits near the CPU attends to as many as pay, a launch a layer
      included.

    A decode step may ride in an iteration that prefills a later request: it then reads no weights of its own.
    """
    n, documents, layers = cell.requests, cell.documents, costs.layers
    tokens, kv = cell.context + cell.question, cell.context + cell.question + cell.output // 2
    steps = cell.output - 1
    slots = max(1, min(n, costs.near_tokens // tokens))
    chunks, again = _chunks(tokens, slots), n - documents
    head = costs.head(1).seconds / max(1, CHUNK // tokens)  # of prompts that share an iteration
    whole = layers * costs.layer([(tokens, 0)]).seconds + head
    hit = layers * (cell.question * _a_token(costs) + costs.prefill_attention(cell.question, cell.context).seconds)
    loading = layers * costs.load(cell.context)
    # a step beside a load may hide altogether
    left = n * steps - min(n * steps, (slots - 1) * again)
    served = _near(costs, slots, left, kv, _riding(documents, steps, chunks, slots - 1))
    shared = documents * whole + again * hit + _near(costs, n, n * steps, kv, 0)
    place, step = _in_place(costs, cell, kv, steps)
    seconds: dict[Route, float] = {
        "recompute": n * whole + _near(costs, slots, n * steps, kv, _riding(n, steps, chunks, slots - 1)),
        "load": documents * whole + again * max(hit, loading) + served if documents > slots else shared,
        "in_place": place,
        "cpu": n * whole + _beside(costs, slots, n, tokens, kv, steps),
    }
    crossing = n * kv * ELEMENT * costs.shape.kv_width * 2 * layers
    spare = n / slots * _decode(costs, slots, kv) - step
    # the time a load may take; where nothing has to be loaded, that of computing the context
    pays = (seconds["recompute"] - documents * whole - served) / again if documents > slots and again else whole
    return Estimate(
        seconds, cell.context * costs.token_bytes / pays if pays > hit else None,
        crossing / spare if steps and spare > 0.0 else None, shared,
    )  # fmt: skip


def _a_token(costs: Costs) -> float:
    """Return the seconds of a token more in the linear operations of a layer whose weights are read anyway."""
    return costs.linear(CHUNK).seconds / CHUNK


def _chunks(tokens: int, decodes: int) -> int:
    """Return the iterations a prompt is prefilled in beside so many decodes."""
    return -(-tokens // max(1, CHUNK - decodes))


def _riding(requests: int, steps: int, chunks: int, beside: int) -> int:
    """Return the most decode steps that prefills of later requests can carry, ``beside`` of them an iteration."""
    return min(sum(min(steps, chunks * later) for later in range(requests)), beside * chunks * requests)


def _near(costs: Costs, slots: int, decodes: int, kv: int, riding: int) -> float:
    """Return the seconds of ``decodes`` near decode steps over ``kv`` tokens each, ``riding`` of them with prefills."""
    riding = min(riding, decodes)
    carried = costs.layers * (_a_token(costs) + costs.decode_attention(1, kv).seconds)
    return riding * carried + (decodes - riding) / slots * _decode(costs, slots, kv)


def _beside(costs: Costs, slots: int, n: int, tokens: int, kv: int, steps: int) -> float:
    """Return the seconds of all decodes with the CPU's share: as many as its attention hides behind the near step.

    NEO prefills whole prompts, as many at once as its tokens allow; of what rides only linear operations are charged.
    """
    together = max(1, TOKENS // tokens)
    riding = sum(min(steps, -(-later // together)) for later in range(n))
    decodes = n * steps - riding
    best = decodes / slots * _decode(costs, slots, kv)
    for more in range(1, n - slots + 1):
        work = costs.layer((), slots, slots * kv, more).seconds
        far = costs.launch + costs.cpu_attention(more, more * kv)
        took = costs.layers * max(work, far) + costs.head(slots + more).seconds
        best = min(best, decodes / (slots + more) * took)
    return riding * costs.layers * _a_token(costs) + best


def _in_place(costs: Costs, cell: Cell, kv: int, steps: int) -> tuple[float, float]:
    """Return the seconds of the route in place, and of one step's linear operations with all requests.

    Attention takes the longest of arithmetic, near memory and link; steps that ride share theirs with prefills.
    """
    n, tokens, layers = cell.requests, cell.context + cell.question, costs.layers
    heads = serving.Heads(costs.shape.heads, costs.shape.kv_heads, costs.shape.head_dim)
    riding = _riding(n, steps, _chunks(tokens, n), n)
    arithmetic = costs.attention_compute(riding * kv)
    near, link = 0.0, costs.read_in_place(riding * kv)
    for new, context in _stream(n, tokens):
        near += costs.near_seconds(serving.prefill(heads, new, context, "in_place").near)
        arithmetic += costs.attention_compute(new * context + new * (new + 1) / 2)
        link += costs.read_in_place(context)
    left = n * steps - riding
    attention = max(arithmetic, near, link) + left * max(costs.attention_compute(kv), costs.read_in_place(kv))
    # the request that came last decodes all its steps after the last prefill
    linear = (n * tokens + riding) * _a_token(costs) + steps * costs.linear(max(1, left // max(1, steps))).seconds
    heads_read = (n * tokens / CHUNK + steps) * costs.head(1).seconds
    step = layers * costs.linear(n).seconds + costs.head(n).seconds
    return layers * (linear + attention) + heads_read, step


def _stream(n: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (new, context) of the chunks of ``n`` prompts, one behind the other in iterations of CHUNK tokens."""
    filled = 0
    for _ in range(n):
        context = 0
        while context < tokens:
            new = min(CHUNK - filled, tokens - context)
            yield new, context
            context += new
            filled = (filled + new) % CHUNK


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
        "neo": ("transport=sm", f"tokens={max(TOKENS, longest)}"),
        "ellm_isolated": (f"context={longest}", f"slo_prompt={min(2048, longest - 1)}"),
        "ellm_elastic": (f"context={longest}", f"slo_prompt={min(2048, longest - 1)}"),
        "preempt": ("transport=sm",), "lru": ("transport=sm",),
    }  # fmt: skip
    return chosen.get(policy, ())
