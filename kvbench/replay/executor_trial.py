"""A short trace to simulate and to carry out on a pair: model, machine, memory of both tiers, requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

from kvbench.errors import UsageError
from kvbench.replay.contention import Contention
from kvbench.replay.engine import Outcome, replay
from kvbench.replay.executor import Executor, Mover
from kvbench.replay.executor_costs import NearCosts, PairCosts, measure_beside, measure_near, measure_pair
from kvbench.replay.executor_course import Taker
from kvbench.replay.executor_near import HOST_LAYER, BlasNear
from kvbench.replay.executor_pair import PairMemory
from kvbench.replay.generate.laws import Arrivals, Uniform, stream
from kvbench.replay.machine import preset
from kvbench.replay.models import model
from kvbench.replay.policies.neo import Neo, Params
from kvbench.replay.request import Request

if TYPE_CHECKING:
    from kvbench.attention.cpu import DecodeAttention
    from kvbench.attention.shapes import Shape
    from kvbench.model.layers import LayerShape
    from kvbench.replay.costs import Costs

PAGE = 16
FAR_BLOCKS, NEAR_TOKENS = 768, 2048  # 12k tokens of KV far
MOST = 64  # requests of an iteration
BLAS = "blas"  # in place of a machine: the near side is real


@dataclass(frozen=True, slots=True)
class Trial:
    """What is replayed and carried out: ``requests`` of about ``prompt`` and ``output`` tokens through NEO's scheduler
    with ``offload``, on ``layers`` layers of Llama-3-8B whose near side is paced to the preset ``machine``; ``blas``:
    layers for one core, done for real (all KV far: there is no near KV to attend to).

    ``rate``: Poisson requests a second, None: all at once. ``tokens``: most of an iteration. Raises UsageError for
    values out of range.
    """

    requests: int
    offload: str = "part"
    prompt: int = 200
    output: int = 30
    rate: float | None = None
    machine: str = "a10g"
    layers: int = 4
    far_blocks: int = FAR_BLOCKS
    near_tokens: int = NEAR_TOKENS
    tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.machine == BLAS and self.offload != "all":
            raise UsageError("near attention", where="executor", got=self.offload, expected="offload all with blas")
        for name in ("requests", "layers", "far_blocks", "near_tokens"):
            if getattr(self, name) < 1:
                raise UsageError("parameter", where=f"executor.{name}", got=getattr(self, name), expected="1 or more")

    def layer_shape(self) -> LayerShape:
        """Return the layers that are carried out."""
        return replace(HOST_LAYER if self.machine == BLAS else model("llama-3-8b"), layers=self.layers)

    def near(self, cpu: int) -> BlasNear | None:
        """Return the near side, in a thread on ``cpu``; None where it is paced."""
        if self.machine != BLAS:
            return None
        return BlasNear(self.layer_shape(), self.layers, self.tokens, 2 * self.prompt, cpu, self.seed)

    def kv_shape(self) -> Shape:
        """Return the shape of the KV that is attended to."""
        from kvbench.attention.shapes import Shape

        of = self.layer_shape()
        return Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)

    def nbytes(self) -> int:
        """Return the bytes of the pair's memory."""
        return PairMemory.needs(self.kv_shape(), self.layers, self.far_blocks)

    def memory(self, address: int) -> PairMemory:
        """Return both ends in the :meth:`nbytes` bytes at ``address``."""
        return PairMemory(self.kv_shape(), self.layers, self.far_blocks, MOST, address, self.seed)

    def trace(self) -> list[Request]:
        """Return the requests."""
        sizes = [
            Uniform(mean).draws(stream(self.seed, what))
            for mean, what in ((self.prompt, "input"), (self.output, "output"))
        ]
        times = repeat(0.0) if self.rate is None else Arrivals(self.rate).times(stream(self.seed, "arrivals"))
        return [
            Request(i, at, into, out) for i, at, into, out in zip(range(self.requests), times, *sizes, strict=False)
        ]

    def costs(self, measured: PairCosts, near: NearCosts | None = None, contention: Contention | None = None) -> Costs:
        """Return what the simulation charges: the near side's preset rates, or as measured; all else as measured."""
        machine = preset("a10g" if self.machine == BLAS else self.machine)
        return measured.costs(machine, self.layer_shape(), near, contention)

    def simulate(self, priced: Costs) -> tuple[Outcome, Taker]:
        """Return the replay and its course."""
        params = Params(
            near_tokens=self.near_tokens, far_tokens=self.far_blocks * PAGE, page=PAGE, requests=MOST,
            tokens=self.tokens, floor=64, offload=self.offload, transport="ideal",
        )  # fmt: skip
        taker = Taker()
        found = replay(iter(self.trace()), Neo(priced, params), priced, watch=taker.take, single_steps=True)
        if found.tally.finished != self.requests:
            raise UsageError(
                "not every request fits", where="executor", got=f"{found.tally.rejected} rejected", expected="none"
            )
        return found, taker


def real_trial(requests: int, layers: int = 4, seed: int = 0) -> Trial:
    """Return a trial with a real near side: small layers, every KV far, both sides with about as much to do."""
    return Trial(requests, "all", 128, 24, machine=BLAS, layers=layers, tokens=256, seed=seed)


@dataclass(frozen=True, slots=True)
class Pair:
    """A trial ready to be carried out, with the replay it follows and what the pair was measured at before."""

    executor: Executor
    outcome: Outcome
    measured: PairCosts
    notes: tuple[str, ...]


def open_pair(
    trial: Trial, memory: PairMemory, attention: DecodeAttention, mover: Mover, near: BlasNear | None = None
) -> Pair:  # fmt: skip
    """Measure the pair, replay ``trial`` with what was measured, and make everything its execution needs."""
    measured = measure_pair(memory, attention, mover, near)
    if near is None:
        priced = trial.costs(measured)
    else:
        found = measure_near(near)
        priced = trial.costs(measured, found, measure_beside(memory, attention, near))
        memory.fill()
    outcome, taker = trial.simulate(priced)
    return Pair(Executor(taker.turns, memory, attention, mover, near), outcome, measured, tuple(priced.notes))
