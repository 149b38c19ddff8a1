"""Half of an iteration: a sub-batch with its sums, what its stages take a layer, and the slacks between two of them.

NEO (MLSys 2025, arXiv 2411.01142), section 3.2: batch 1's CPU attention hides behind batch 0's linear operations
(T_l0 >= T_ca1), batch 0's behind batch 1's linear operations and batch 0's near attention (T_l1 + T_ga0 >= T_ca0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbench.systems.neo.hide import Half


class Cost(Protocol):
    """Seconds a layer of each stage; ``launch`` is what a CPU stage takes beyond its attention (NEO's lnch)."""

    @property
    def launch(self) -> float: ...
    def linear(self, tokens: int) -> float:
        """Return the seconds of projections and MLP over ``tokens``; 0 for none."""
        ...

    def prefill(self, tokens: int) -> float:
        """Return the seconds of attention over one prompt of ``tokens``."""
        ...

    def near(self, requests: int, tokens: int) -> float:
        """Return the seconds of near decode attention of ``requests`` over ``tokens`` of KV in all."""
        ...

    def far(self, requests: int, tokens: int) -> float:
        """Return the seconds of CPU decode attention of ``requests`` over ``tokens`` of KV in all."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A request as the scheduler sees it: ``prompt`` tokens to prefill, at most ``total`` tokens of KV in the end.

    ``cached``: tokens of KV it holds; ``blocks``: what they take. ``prompt`` grows when KV is dropped: what was
    produced has to be computed again.
    """

    key: int
    prompt: int
    total: int
    cached: int = 0
    blocks: int = 0


class SubBatch:
    """One of the two batches of an iteration while it is put together."""

    __slots__ = ("_cost", "_prefill", "far", "far_kv", "near", "near_kv", "prefills", "tokens")

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.prefills: list[tuple[Job, bool]] = []
        self.near: list[Job] = []
        self.far: list[Job] = []
        self.tokens = self.near_kv = self.far_kv = 0
        self._prefill: list[float] = [0.0]  # running sums: taking the last prompt off leaves exactly what was before

    @property
    def requests(self) -> int:
        return len(self.prefills) + len(self.near) + len(self.far)

    def add_prefill(self, job: Job, far: bool) -> None:
        """Add the prompt of ``job``; ``far``: its KV goes to host memory."""
        self.prefills.append((job, far))
        self.tokens += job.prompt
        self._prefill.append(self._prefill[-1] + self._cost.prefill(job.prompt))

    def pop_prefill(self) -> tuple[Job, bool]:
        """Take the latest prompt off and return it."""
        job, far = self.prefills.pop()
        self.tokens -= job.prompt
        self._prefill.pop()
        return job, far

    def add_near(self, job: Job) -> None:
        self.near.append(job)
        self.tokens += 1
        self.near_kv += job.cached + 1

    def add_far(self, job: Job) -> None:
        self.far.append(job)
        self.tokens += 1
        self.far_kv += job.cached + 1

    def pop_far(self) -> Job:
        job = self.far.pop()
        self.tokens -= 1
        self.far_kv -= job.cached + 1
        return job

    @property
    def linear(self) -> float:
        """Seconds a layer of its linear operations (T_l)."""
        return self._cost.linear(self.tokens) if self.tokens else 0.0

    @property
    def attention(self) -> float:
        """Seconds a layer of its near attention (T_ga): prompts one by one, decodes together."""
        near = self._cost.near(len(self.near), self.near_kv) if self.near else 0.0
        return self._prefill[-1] + near

    @property
    def cpu(self) -> float:
        """Seconds a layer of its CPU attention with the launch (T_ca); 0 without CPU decodes."""
        return self._cost.far(len(self.far), self.far_kv) + self._cost.launch if self.far else 0.0


def spans(first: SubBatch, second: SubBatch) -> tuple[Half, Half]:
    """Return both half-stages of a layer: T_l0 beside T_ca1, and T_l1 + T_ga0 beside T_ca0.

    Batch 1 has no near attention in NEO; where it has (symmetric pipelining), T_ga1 stands beside T_l0.
    """
    return (
        Half(first.linear + second.attention, second.cpu),
        Half(second.linear + first.attention, first.cpu),
    )
