"""Both sides of the pipeline with what they hold, and passes over it beside what the same stages take alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from kvbench.systems.neo.near import PacedNear, Rates, near_seconds, stage_seconds
from kvbench.systems.neo.pipeline import Near, observed, run_pass
from kvbench.systems.neo.schedule import Batch, Lane, Schedule, Stage, Timeline, forecast, lane_of, serial

if TYPE_CHECKING:
    from kvbench.model.layers import LayerShape
    from kvbench.systems.neo.far import FarSide
    from kvbench.systems.neo.near_torch import TorchNear

LAUNCH_PASSES = 9


class Marks(Protocol):
    """A recorder that keeps its marks with their seconds on the host's clock."""

    @property
    def seen(self) -> list[tuple[str, float]]: ...
    def mark(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """One pass: what was observed; the seconds of its stages alone in the same moment (``ca0``, ``pr1``...); what those
    predict; by how many seconds at most a paced near side was late with an end somebody waited for."""

    line: Timeline
    alone: Mapping[str, float]
    told: Timeline
    late: float

    def layer(self, name: str) -> float:
        """Return the mean seconds of the stages called ``name`` (``pr0``) over the layers."""
        spans = [end - begin for stage, (begin, end) in self.line.spans.items() if stage.split("[")[0] == name]
        return sum(spans) / len(spans)

    def lane_alone(self, lane: Lane) -> float:
        """Return what the stages of ``lane`` take in all, each alone."""
        return sum(self.alone[name.split("[")[0]] for name in self.line.spans if lane_of(name) == lane)

    def overlap(self, total: float) -> float:
        """Return the share of the shorter side that ran beside the longer one in a pass of ``total`` seconds (T63)."""
        near, cpu = self.lane_alone("near"), self.lane_alone("cpu")
        return (near + cpu - total) / min(near, cpu)


class Nobody:
    """A far side without work."""

    def attend(self, batch: int, layer: int) -> None:
        """Do nothing."""


class Rig(ABC):
    """``far`` is None where no decode is on the CPU; ``marks`` makes the recorder of a pass."""

    near: Near
    order: Schedule

    def __init__(self, of: LayerShape, context: int, far: FarSide | None, marks: Callable[[], Marks]) -> None:
        self.of, self.context, self.far, self._marks = of, context, far, marks
        self.taken: list[Taken] = []
        self.launch = 0.0

    @property
    def offloads(self) -> bool:
        """Whether the order in force has CPU decodes."""
        return any(batch.cpu for batch in self.order.batches)

    @property
    def kernel(self) -> str:
        """What runs, in words."""
        return self.name + ("" if self.far is None else f"; {self.far.attention.kernel}")

    @property
    @abstractmethod
    def name(self) -> str:
        """The near side, in words."""

    @abstractmethod
    def cost(self, kind: str, batch: Batch) -> float:
        """Return the seconds a layer of ``kind`` takes over ``batch``, as known before any pass."""

    @abstractmethod
    def alone(self) -> dict[str, float]:
        """Run each stage of the order in force with nothing beside it; return its seconds, by kind and batch."""

    @abstractmethod
    def verify(self) -> None:
        """Raise VerifyError unless a pass brings what one without overlap brings."""

    def use(self, order: Schedule) -> None:
        """Let further passes follow ``order``."""
        self.order = order
        if self.far is not None and self.offloads:
            self.far.arrange(order.batches)

    def go(self, far: Nobody | None = None) -> Timeline:
        """Carry out one pass and return it; ``far`` stands in for the CPU's side."""
        marks = self._marks()
        run_pass(
            self.order, self.near, far or (self.far if self.far is not None and self.offloads else Nobody()), marks
        )
        return observed(self.near, marks.seen)

    def run(self, reps: int) -> float:
        """Return the seconds of ``reps`` passes; the stages alone are taken before each, outside its window."""
        for _ in range(reps):
            alone = self.alone()
            line = self.go()
            self.taken.append(Taken(line, alone, forecast(self.order, alone, self.launch), self.lateness()))
        return sum(taken.line.total for taken in self.taken[-reps:])

    def lateness(self) -> float:
        """Return by how much the latest pass was late at most."""
        return 0.0

    def prepare(self) -> None:
        """Run what must not run for the first time inside a sample."""
        self.alone()
        self.go()


class PacedRig(Rig):
    """The near side held to ``rates`` by a thread on ``cpu``. Close it with its ``paced`` (a context manager)."""

    def __init__(
        self, of: LayerShape, context: int, far: FarSide | None, marks: Callable[[], Marks], rates: Rates,
        cpu: int | None,
    ) -> None:  # fmt: skip
        super().__init__(of, context, far, marks)
        self.rates = rates
        self.near = self.paced = PacedNear({}, self._carry, cpu)
        self._seconds: dict[str, float] = {}
        self._per_request = 0.0
        if far is not None:
            far.arrange([Batch(cpu=far.requests)])
            self._per_request = min(far.alone()[0] for _ in range(3)) / far.requests

    @property
    def name(self) -> str:
        return f"near side paced to {self.rates.name}"

    def _carry(self, stage: Stage) -> None:
        if self.far is not None:
            self.far.carry(stage)

    def use(self, order: Schedule) -> None:
        super().use(order)
        self._seconds = near_seconds(order, self.of, self.context, self.rates)
        self.paced.retime(self._seconds)

    def cost(self, kind: str, batch: Batch) -> float:
        if kind == "ca":
            return self._per_request * batch.cpu
        return stage_seconds(kind, batch, self.of, self.context, self.rates)

    def alone(self) -> dict[str, float]:
        attention = self.far.alone() if self.far is not None and self.offloads else {}
        return {**self._seconds, **{f"ca{b}": seconds for b, seconds in attention.items()}}

    def lateness(self) -> float:
        return max(self.paced.late, default=0.0)

    def prepare(self) -> None:
        """Also learn what submitting takes per CPU stage: passes in which no stage takes any time."""
        super().prepare()
        steps = sum(stage.lane == "cpu" for stage in self.order.stages)
        if steps:
            self.paced.retime(dict.fromkeys(self._seconds, 0.0))
            # the least: it is the program's own cost, and anything else that runs can only add to it
            self.launch = min(self.go(Nobody()).total for _ in range(LAUNCH_PASSES)) / steps
            self.paced.retime(self._seconds)

    def verify(self) -> None:
        if self.far is not None and self.offloads:
            self.far.poison()
            self.go()
            self.far.check()


class TorchRig(Rig):
    """Real torch layers on ``device``; each order has its own near side over the same layers."""

    def __init__(
        self, of: LayerShape, context: int, far: FarSide | None, marks: Callable[[], Marks], batch: Batch, layers: int,
        *, dtype: str = "bf16", device: str = "cuda:0", seed: int = 0,
    ) -> None:  # fmt: skip
        from kvbench.systems.neo.near_torch import make_layers

        super().__init__(of, context, far, marks)
        self._dtype, self._device, self._seed = dtype, device, seed
        self._layers = make_layers(of, layers, dtype, device, seed)
        self._known: dict[str, float] = {}
        self._decodes = batch.cpu
        if far is not None:
            first = Batch(batch.prefill, batch.gpu) if batch.attends_near else Batch(prefill=1)
            self.use(serial(layers, [first, Batch(cpu=batch.cpu)]))
            self.go()
            self._known = self.alone()

    @property
    def name(self) -> str:
        return "torch layers"

    def use(self, order: Schedule) -> None:
        from kvbench.systems.neo.near_torch import TorchNear

        super().use(order)
        self.near = self.real = TorchNear(
            self._layers, order.batches, self.context, self.far if self.offloads else None, dtype=self._dtype,
            device=self._device, seed=self._seed,
        )  # fmt: skip

    real: TorchNear

    def cost(self, kind: str, batch: Batch) -> float:
        if kind == "ca":
            return self._known["ca1"] * batch.cpu / self._decodes if batch.cpu else 0.0
        return self._known.get(f"{kind}{0 if batch.attends_near else 1}", 0.0)

    def alone(self) -> dict[str, float]:
        """The same batches one after the other, one stage at a time."""
        line = self._serial()
        found: dict[str, list[float]] = {}
        for name, (begin, end) in line.spans.items():
            found.setdefault(name.split("[")[0], []).append(end - begin)
        return {name: sum(spans) / len(spans) for name, spans in found.items()}

    def _serial(self) -> Timeline:
        order = self.order
        self.order = serial(order.layers, order.batches)
        try:
            return self.go()
        finally:
            self.order = order

    def verify(self) -> None:
        from kvbench.systems.neo.near_torch import agree

        self._serial()
        want = self.real.outputs()
        if self.far is not None and self.offloads:
            self.far.spoil()
        self.go()
        agree(self.real.outputs(), want)


def medians(taken: Sequence[Taken], names: Sequence[str]) -> dict[str, float]:
    """Return the median over ``taken`` of the seconds a layer of the stages called ``names``."""
    return {name: median(one.layer(name) for one in taken) for name in names}
