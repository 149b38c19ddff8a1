"""A replay carried out on a pair of this host beside its simulation: does the schedule take what the replay says?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Basis
    from kvbench.replay.executor import Errors


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: a real near side holds no KV."""
    return axes["near"] != "blas" or axes["offload"] == "all"


def basis_of(axes: Mapping[str, Value]) -> Basis:
    """Return the basis: a near side that is held to a preset's rates is emulated."""
    return "measured" if axes["near"] == "blas" else "emulated"


@bench(
    version=2, metric="executed_time", unit="s", better="lower", where=exists, basis=basis_of, limit=240.0,
    extra_metrics=["simulated_time", "executor_error", "work_error", "iteration_error"],
    seconds={"smoke": 3.5, "quick": 9.0, "full": 40.0},
    pair=axis.choice("dram:dram"),
    offload=axis.choice("part", "none", "all", smoke=["part"], quick=["part", "all"]),
    near=axis.choice(
        "blas", "t4", "a10g", "a100", "h100", smoke=["a10g"], quick=["blas", "a10g"],
        full=["blas", "t4", "a10g"],
    ),
    requests=axis.integer(smoke=["16"], quick=["48"], full=["60", "200"], high=2000),
    layers=axis.integer(smoke=["4"], quick=["4"], full=["4"], high=64),
)  # fmt: skip
def executor(case: Case, measure: Measure) -> None:
    """Seconds of a short trace carried out iteration by iteration, beside the seconds its replay says.

    NEO's scheduler (`offload` part, none: GPU-only, all: every KV far). CPU attention and all copies are real.
    near=blas: so is the near side, small layers by one core's BLAS, and the row is measured. Else `layers` layers of
    Llama-3-8B are held to the rates of that preset, and the row is emulated. What the replay charges for the CPU, the
    copies, the hand-over and a real near side is measured right before on the same memory and threads.
    executor_error: executed over simulated, less 1; work_error: the same of what is real alone (copies, CPU attention,
    a real near side), hidden behind the pace or not; iteration_error: its median over the iterations that have any. A
    paced near side is held to the simulation and has no error: `paced_share` of the detail is the part of the simulated
    time in phases of it alone. Every page is checked at its far end, and a further pass, one step at a time, attends to
    what was copied.
    """
    from statistics import median

    from kvbench.attention.cpu import DecodeAttention
    from kvbench.replay.executor import Mover
    from kvbench.replay.executor_trial import Trial, open_pair, real_trial

    cpus = measure.context.topology.measuring_cpus("all")
    if len(cpus) < 2:
        measure.skip("the threads that attend and the one that copies need a core each, there is one")
    seed, real = measure.context.seed % 1000, case.near == "blas"
    if real:
        from kvbench.kernels.blas import blas_threads

        measure.enter(blas_threads(1))
        trial = real_trial(case.requests, case.layers, seed)
    else:
        trial = Trial(case.requests, case.offload, machine=case.near, layers=case.layers, seed=seed)
    basis = basis_of(case.axes)
    team = measure.team_on(cpus[:-1])
    mover: Mover = measure.enter(Mover(cpus[-1]))
    near = trial.near(cpus[-1])
    measure.enter(near or nullcontext())
    measure.threads([*team.tids, mover.tid, *([near.tid] if near is not None else [])])
    buffer = measure.target(trial.nbytes(), "thp")
    made = open_pair(trial, trial.memory(buffer.address), DecodeAttention(trial.kv_shape(), team), mover, near)
    errors: list[Errors] = []

    def run(reps: int) -> float:
        seconds = 0.0
        for _ in range(reps):
            seconds += made.executor.run()
            errors.append(made.executor.errors())
        return seconds

    row = measure(run, verify=made.executor.verify, kernel=made.executor.kernel, transport="cpu", basis=basis)
    counts, spans = made.outcome.counters, made.executor.spans
    for name in (
        "pipelined",
        "near_only",
        "exposed",
        "cpu_decodes",
        "near_decodes",
        "far_prefills",
        "far_undecoded",
        "swapped_in",
    ):
        measure.note(name, counts[name])
    measure.note("digest", made.outcome.digest[:12])
    measure.note("iterations", len(made.executor.turns))
    measure.note("paced_share", made.executor.paced)
    measure.note("copy_bandwidth", made.measured.copy)
    measure.note("launch", made.measured.launch)
    measure.note("notes", "; ".join(made.notes))
    if spans is not None:
        measure.note("late", spans.late)
        measure.note("attention_seconds", spans.attention)
        measure.note("copy_seconds", spans.copies)
    if row.value is None:
        return
    simulated = made.executor.simulated
    measure.extra(
        "simulated_time", simulated, unit="s", better="lower", basis="simulated", n=1,
        kernel="kvbench.replay.engine, CPU, copies and hand-over as measured right before",
    )  # fmt: skip
    measure.extra(
        "executor_error", row.value / simulated - 1.0, unit="1", better="lower", basis=basis, n=row.n,
        status=row.status, reason=row.reason,
    )  # fmt: skip
    taken = errors[-row.n :]
    measure.note("working_iterations", taken[-1].iterations)
    for name, values, n in (
        ("work_error", [each.work for each in taken], row.n),
        ("iteration_error", [each.iteration for each in taken], taken[-1].iterations),
    ):
        known = [value for value in values if value is not None]
        measure.extra(
            name, median(known) if known else None, unit="1", better="lower", basis=basis, n=n,
            status=row.status if known else "skipped",
            reason=row.reason if known else "nothing is copied or attended to: the near side is paced",
        )  # fmt: skip
