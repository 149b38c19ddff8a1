"""What crosses the link for a request whose KV is far: a token's q, k, v and o, or the KV itself (NEO 2.3, 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from kvbench.errors import UsageError
from kvbench.model.geometry import KVGeometry
from kvbench.model.layout import Moves, Pool, moves

# Query heads, KV heads, head_dim; the 70B model on one GPU
HEADS = {"Llama-2-7B": (32, 32, 128), "Llama-3-8B": (32, 8, 128), "Llama-3-70B": (64, 8, 128)}
_SOURCE = "config.json: num_attention_heads, num_key_value_heads, hidden_size / num_attention_heads"
ELEMENT, OUTPUT = 2, 4  # bytes: 16-bit q, k, v and cache; NEO's cores return the output in float32


@dataclass(frozen=True, slots=True)
class Request:
    """One layer's bytes of one request of ``model``: ``qkv`` go to the far side, ``o`` comes back, ``layer`` is the
    geometry of its KV. Raises UsageError for an unknown model."""

    model: str

    def __post_init__(self) -> None:
        if self.model not in HEADS:
            raise UsageError("unknown model", where="shipping", got=self.model, expected=", ".join(HEADS))

    @property
    def qkv(self) -> int:
        """Bytes of q, k and v of one token."""
        q, kv, dim = HEADS[self.model]
        return ELEMENT * (q + 2 * kv) * dim

    @property
    def o(self) -> int:
        """Bytes of the attention's output of one token."""
        q, _, dim = HEADS[self.model]
        return OUTPUT * q * dim

    @property
    def token(self) -> int:
        """Bytes of one token's K and V."""
        return self.layer.layer_token_bytes()

    @property
    def layer(self) -> KVGeometry:
        """KV of one layer."""
        _, kv, dim = HEADS[self.model]
        return KVGeometry(self.model, 1, kv, dim, 2, ELEMENT, _SOURCE)

    def crossover(self) -> float:
        """Return from how many tokens on the KV is more bytes than the shipping."""
        return (self.qkv + self.o) / self.token

    def layers(self, count: int) -> KVGeometry:
        """Return the geometry of ``count`` layers of KV."""
        return replace(self.layer, layers=count)


def record(name: str, nbytes: int) -> KVGeometry:
    """Return the geometry of one record of ``nbytes`` a request, as a page of one token."""
    return KVGeometry(name, 1, 1, nbytes, 1, 1, "NEO, per-token transfer")


@dataclass(frozen=True, slots=True)
class Transfer:
    """``pages`` pages of a near and a far pool that belong together, page i of ``near_pages`` to that of ``far_pages``.

    coalesced: neighbours on both sides, so that runs merge; scattered: no two are neighbours in the far pool, which
    holds twice as many. Raises UsageError for another word, or no pages.
    """

    shape: KVGeometry
    page_tokens: int
    pages: int
    copies: str
    seed: int

    def __post_init__(self) -> None:
        if self.copies not in ("coalesced", "scattered"):
            raise UsageError("unknown copies", where="shipping", got=self.copies, expected="coalesced or scattered")

    @property
    def near(self) -> Pool:
        """The pool of the near side, layer first."""
        return Pool(self.shape, "layer_first", self.page_tokens, self.pages)

    @property
    def far(self) -> Pool:
        """The pool of the far side, layer first."""
        return Pool(self.shape, "layer_first", self.page_tokens, self.pages * (2 if self.copies == "scattered" else 1))

    def moves(self, way: str, layers: range | None = None) -> Moves:
        """Return the fragments of ``way`` (fetch | evict), of ``layers`` alone if given."""
        numbers = np.arange(self.pages, dtype=np.int64)
        far = numbers
        if self.copies == "scattered":
            far = 2 * np.random.default_rng(self.seed).permutation(self.pages).astype(np.int64)
        if way == "fetch":
            return moves(self.far, self.near, far, numbers, layers=layers, follow="source")
        return moves(self.near, self.far, numbers, far, layers=layers, follow="target")


Run = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Leg:
    """``run(reps)`` moves ``nbytes`` in ``fragments`` a pass and returns its seconds; ``verify`` proves it."""

    run: Run
    nbytes: int
    fragments: int
    verify: Callable[[], None]
    kernel: str


def in_order(legs: list[Leg]) -> Leg:
    """Return ``legs`` one after the other as one."""

    def run(reps: int) -> float:
        return sum(leg.run(1) for _ in range(reps) for leg in legs)

    def verify() -> None:
        for leg in legs:
            leg.verify()

    return Leg(
        run, sum(leg.nbytes for leg in legs), sum(leg.fragments for leg in legs), verify,
        " | ".join(dict.fromkeys(leg.kernel for leg in legs)),
    )  # fmt: skip
