"""What a decode step's fetch costs as a CUDA graph when its block ids change at every replay (DirectKV D8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from kvbench.memory.cuda.device import Stream


@bench(
    version=1, metric="step", unit="s", better="lower", limit=120.0,
    extra_metrics=["change_time", "replay_time"],
    seconds={"smoke": 0.3, "quick": 1.0, "full": 20.0},
    mode=axis.choice("update", "rerecord", "kernel"),
    blocks=axis.integer(smoke=["64"], quick=["64", "512"], full=["16", "64", "256", "512"], high=512),
    bytes=axis.bytes(smoke=["32KiB"], quick=["32KiB"], full=["4KiB", "32KiB", "128KiB"], low="16B", high="16MiB"),
    device=axis.integer(smoke=["0"], quick=["0"], full=["0"], low=0, high=63),
)  # fmt: skip
def graph_replay(case: Case, measure: Measure) -> None:
    """Seconds of a step that fetches other blocks than the last, from its ids being known to the blocks being there.

    By the host's clock from an idle device. `update` gives each copy node of the graph new addresses, `rerecord`
    records the graph again, `kernel` replays one kernel that reads a table of block ids, which a copy brings.
    change_time: the host's part before the launch; replay_time: the same step with its addresses left as they are.
    Blocks come from a pool of four times as many in page-locked host memory. On a host there is no graph.
    """
    from kvbench.systems.directkv.gpu_replay import Replay
    from kvbench.timing.clock import now_ns
    from kvbench.timing.gpu_rows import add_sampled, on_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(case.device) as gpu:
        on_gpu(measure, gpu, link=True)
        work = Replay(
            gpu.service, gpu.enter, case.mode, case.blocks, case.bytes, 4 * case.blocks, measure.context.seed
        )  # fmt: skip
        for flag in work.flags:
            measure.flag(flag)
        steps = [work.draw() for _ in range(32)]  # drawn before: drawing takes as long as an update
        turn = [0]

        def change() -> None:
            turn[0] += 1
            work.change(steps[turn[0] % len(steps)])

        def step(stream: Stream) -> None:
            change()
            work.submit(stream)

        timed = gpu.clock.submission(step, work.operations)

        def verify() -> None:
            work.check()
            for _ in range(2):  # two more, each with other blocks: the last step alone could have been there before
                work.spoil()
                timed(1)
                work.check()

        row = measure(
            timed, link=work.link_bytes, unique=work.link_bytes, verify=verify, kernel=work.kernel,
            transport="sm" if case.mode == "kernel" else "ce",
        )  # fmt: skip
        if row.value is None:
            return

        def changes(reps: int) -> float:
            begin = now_ns()
            for _ in range(reps):
                change()
            return (now_ns() - begin) * 1e-9

        add_sampled(
            measure, gpu, "change_time", changes, unit="s", better="lower", amount=1.0, kernel=work.kernel
        )  # fmt: skip
        again = gpu.clock.submission(work.submit, work.operations)
        add_sampled(measure, gpu, "replay_time", again, unit="s", better="lower", amount=1.0, kernel=work.kernel)
        work.check()
