"""Who does what after what in one iteration: GPU-only, simple offloading, symmetric and asymmetric pipelining.

NEO (MLSys 2025, arXiv 2411.01142), section 3.1, and the order in which its code queues the work. A layer of a batch is
``pr`` (norm, QKV projection), attention, ``po`` (output projection, MLP). Attention is ``ga`` on the near side (prefill
and decodes whose KV is there) and, for decodes whose KV is in host memory, ``qkv`` (their q, k, v move to the host),
``ca`` (attention on the CPU), ``o`` (its output moves back). The stages of a schedule stand in the order in which one
thread submits them; that thread also does ``ca``, so nothing behind a ``ca`` is submitted before it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvbench.errors import UsageError, VerifyError

Mode = Literal["gpu_only", "simple", "symmetric", "asymmetric"]
MODES: tuple[Mode, ...] = get_args(Mode)
Kind = Literal["pr", "po", "ga", "ca", "qkv", "o"]
Lane = Literal["near", "cpu", "down", "up"]
LANES: tuple[Lane, ...] = get_args(Lane)
LANE_OF: Mapping[str, Lane] = {"pr": "near", "po": "near", "ga": "near", "ca": "cpu", "qkv": "down", "o": "up"}


@dataclass(frozen=True, slots=True)
class Batch:
    """Part of an iteration: ``prefill`` tokens of one prompt, ``gpu`` and ``cpu`` decodes by where their KV is."""

    prefill: int = 0
    gpu: int = 0
    cpu: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the linear operations see."""
        return self.prefill + self.gpu + self.cpu

    @property
    def attends_near(self) -> bool:
        return self.prefill + self.gpu > 0


@dataclass(frozen=True, slots=True)
class Stage:
    """``kind`` of ``batch`` (its number in the schedule) in ``layer``. ``after``: stages of other lanes it waits for.

    Within a lane stages run in the order of the schedule.
    """

    kind: Kind
    batch: int
    layer: int
    after: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}{self.batch}[{self.layer}]"

    @property
    def lane(self) -> Lane:
        return LANE_OF[self.kind]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The stages of one iteration over ``layers`` layers in the order of submission."""

    mode: Mode
    layers: int
    batches: tuple[Batch, ...]
    stages: tuple[Stage, ...]

    def inputs(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of the stages whose results ``stage`` reads."""
        b, i = stage.batch, stage.layer
        of = self.batches[b]
        if stage.kind == "pr":
            return (f"po{b}[{i - 1}]",) if i else ()
        if stage.kind == "po":
            near = (f"ga{b}[{i}]",) if of.attends_near else ()
            return (f"pr{b}[{i}]", *near, *((f"o{b}[{i}]",) if of.cpu else ()))
        return ({"ga": "pr", "qkv": "pr", "ca": "qkv", "o": "ca"}[stage.kind] + f"{b}[{i}]",)

    def without(self, stage: str, wait: str) -> Schedule:
        """Return the schedule in which ``stage`` does not wait for ``wait`` (to see that :meth:`verify` objects)."""
        return replace(
            self,
            stages=tuple(
                replace(s, after=tuple(w for w in s.after if w != wait)) if s.name == stage else s for s in self.stages
            ),
        )

    def verify(self) -> None:
        """Raise VerifyError unless every layer of every batch is complete and every input is ordered before its use.

        Ordered is: by the stage's own lane, by its waits, or because one thread submitted it only after a ``ca``.
        """
        before: dict[str, frozenset[str]] = {}
        last: dict[Lane, str] = {}
        submitted: frozenset[str] = frozenset()  # what was over when a stage is submitted
        for stage in self.stages:
            if stage.name in before:
                raise VerifyError("a stage stands twice in the schedule", where=self.mode, got=stage.name)
            known = submitted
            for name in (*stage.after, *((last[stage.lane],) if stage.lane in last else ())):
                if name not in before:
                    raise VerifyError("waits for a stage that comes later", where=f"{self.mode} {stage.name}", got=name)
                known |= before[name] | {name}
            for name in self.inputs(stage):
                if name not in known:
                    raise VerifyError(
                        "may run before its input exists", where=f"{self.mode} {stage.name}",
                        expected=f"a wait for {name}",
                    )  # fmt: skip
            before[stage.name] = known
            last[stage.lane] = stage.name
            if stage.lane == "cpu":
                submitted = known | {stage.name}
        missing = sorted(set(self._wanted()) - set(before))
        if missing:
            raise VerifyError("stages are missing", where=self.mode, got=" ".join(missing[:6]))

    def _wanted(self) -> Iterator[str]:
        for b, batch in enumerate(self.batches):
            if not batch.tokens:
                continue
            kinds = ["pr", "po", *(["ga"] if batch.attends_near else []), *(["qkv", "ca", "o"] if batch.cpu else [])]
            yield from (f"{kind}{b}[{i}]" for kind in kinds for i in range(self.layers))


class _Builder:
    """Collects stages; a stage waits for those of its inputs that another lane makes."""

    def __init__(self, mode: Mode, layers: int, batches: Sequence[Batch]) -> None:
        if layers < 1 or any(min(b.prefill, b.gpu, b.cpu) < 0 for b in batches) or not sum(b.tokens for b in batches):
            raise UsageError(
                "nothing to schedule", where=mode, got=f"{layers} layers of {list(batches)}",
                expected="one layer and one token or more",
            )  # fmt: skip
        self.bare = Schedule(mode, layers, tuple(batches), ())
        self.stages: list[Stage] = []

    def add(self, kind: Kind, batch: int, layer: int, *also: str) -> None:
        """Add the stage if the batch has it; ``also``: further waits than for its inputs."""
        of = self.bare.batches[batch]
        has = of.attends_near if kind == "ga" else of.cpu > 0 if kind in ("qkv", "ca", "o") else of.tokens > 0
        if not has or not 0 <= layer < self.bare.layers:
            return
        stage = Stage(kind, batch, layer)
        waits = [name for name in self.bare.inputs(stage) if lane_of(name) != stage.lane]
        self.stages.append(replace(stage, after=tuple(dict.fromkeys((*waits, *also)))))

    def linear(self, batch: int, layer: int) -> None:
        """Add ``po`` of ``layer`` and what the next layer needs from this batch, its transfer included."""
        self.add("po", batch, layer)
        self.add("pr", batch, layer + 1)
        self.add("qkv", batch, layer + 1)

    def alone(self, batch: int) -> None:
        """Add all layers of ``batch``, one stage after the other."""
        for layer in range(self.bare.layers):
            self.add("pr", batch, layer)
            self.add("ga", batch, layer)
            # nothing overlaps: what leaves for the CPU leaves behind the near attention
            self.add("qkv", batch, layer, *((f"ga{batch}[{layer}]",) if self.bare.batches[batch].attends_near else ()))
            self.add("ca", batch, layer)
            self.add("o", batch, layer)
            self.add("po", batch, layer)

    def done(self) -> Schedule:
        made = replace(self.bare, stages=tuple(self.stages))
        made.verify()
        return made


def gpu_only(layers: int, batch: Batch) -> Schedule:
    """Return the iteration over the near requests of ``batch``; those whose KV is in host memory wait."""
    build = _Builder("gpu_only", layers, (replace(batch, cpu=0),))
    build.alone(0)
    return build.done()


def simple(layers: int, batch: Batch) -> Schedule:
    """Return simple offloading (section 3.1, first strawman): one batch, one stage at a time."""
    return serial(layers, (batch,))


def serial(layers: int, batches: Sequence[Batch]) -> Schedule:
    """Return ``batches`` one after the other, one stage at a time: what any other order has to agree with."""
    build = _Builder("simple", layers, batches)
    for b in range(len(batches)):
        build.alone(b)
    return build.done()


def pipelined(mode: Mode, layers: int, first: Batch, second: Batch, before: Batch | None = None) -> Schedule:
    """Return two batches a half-layer apart: the linear operations of one beside the attention of the other.

    Half-stages a layer: ``ga0 ca0 | po1 pr1`` and ``ca1 (ga1) | po0 pr0``. ``before`` is a batch that passes through
    all layers first, alone.
    """
    batches = (first, second) if before is None else (first, second, before)
    build = _Builder(mode, layers, batches)
    if before is not None:
        build.alone(2)
    build.linear(0, -1)
    for i in range(layers):
        build.linear(1, i - 1)
        build.add("ga", 0, i)
        build.add("ca", 0, i)
        build.add("o", 0, i)
        build.linear(0, i)
        build.add("ga", 1, i)
        build.add("ca", 1, i)
        build.add("o", 1, i)
    build.linear(1, layers - 1)
    return build.done()


def symmetric(layers: int, batch: Batch) -> Schedule:
    """Return FastDecode's pipeline (second strawman): decodes cut into equal halves, prefill before them, alone."""
    half = Batch(gpu=batch.gpu // 2, cpu=batch.cpu // 2)
    other = Batch(gpu=batch.gpu - half.gpu, cpu=batch.cpu - half.cpu)
    prompt = Batch(prefill=batch.prefill) if batch.prefill else None
    return pipelined("symmetric", layers, other, half, prompt)


def asymmetric(layers: int, batch: Batch, few: int) -> Schedule:
    """Return NEO's pipeline: batch 0 is the prefill, the near decodes and ``few`` CPU decodes, batch 1 the other ones.

    Raises UsageError unless 0 <= few <= batch.cpu.
    """
    if not 0 <= few <= batch.cpu:
        raise UsageError("CPU decodes of batch 0", where="asymmetric", got=few, expected=f"0..{batch.cpu}")
    return pipelined("asymmetric", layers, replace(batch, cpu=few), Batch(cpu=batch.cpu - few))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one iteration: ``total``, what each lane was busy, and begin and end of each stage."""

    total: float
    busy: Mapping[Lane, float]
    spans: Mapping[str, tuple[float, float]]

    def stall(self, lane: Lane) -> float:
        """Return the seconds in which ``lane`` did nothing."""
        return self.total - self.busy[lane]


def timeline(spans: Mapping[str, tuple[float, float]]) -> Timeline:
    """Return what begins and ends of stages, seconds on one clock, amount to."""
    busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    for name, (begin, end) in spans.items():
        busy[lane_of(name)] += end - begin
    first, last = min(b for b, _ in spans.values()), max(e for _, e in spans.values())
    return Timeline(last - first, busy, dict(spans))


def lane_of(name: str) -> Lane:
    """Return the lane of the stage called ``name``."""
    return LANE_OF[name.split("[")[0].rstrip("0123456789")]


def forecast(schedule: Schedule, seconds: Mapping[str, float], launch: float = 0.0) -> Timeline:
    """Return the iteration when each stage takes ``seconds`` (by kind and batch, ``pr0``): the exact recurrence.

    A stage begins when its lane is free, its waits are over and it has been submitted; ``launch`` is what the thread
    that submits takes before each ``ca`` (NEO's lnch). Neither side slows the other here.
    """
    free: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
    spans: dict[str, tuple[float, float]] = {}
    submitted = 0.0
    for stage in schedule.stages:
        begin = max(submitted, free[stage.lane], *(spans[name][1] for name in stage.after), 0.0)
        if stage.lane == "cpu":
            begin = max(begin, submitted + launch)
        end = begin + seconds[f"{stage.kind}{stage.batch}"]
        spans[stage.name] = (begin, end)
        free[stage.lane] = end
        if stage.lane == "cpu":
            submitted = end
    return timeline(spans)
