"""The sampler on a clock the test owns (every number is then exact), and on the real one where only that shows it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import KvbenchError
from kvbench.timing import sampler
from kvbench.timing.budget import BUDGETS, budget
from kvbench.timing.clock import Quantum
from kvbench.timing.sampler import sample, sample_pair
from kvbench.timing.samples import Samples

QUICK, SMOKE = budget("quick"), budget("smoke")


class Clock:
    """A clock that only work moves; ``work`` makes runs whose pass takes ``seconds``."""

    def __init__(self) -> None:
        self.ns = 0
        self.calls: list[tuple[str, int]] = []

    def __call__(self) -> int:
        return self.ns

    def work(
        self, seconds: float | Iterable[float], own: float | None = None, name: str = "run"
    ) -> Callable[[int], float | None]:
        """A run of ``seconds`` per pass (the last value of a list repeats) that reports ``own`` x its true time."""
        costs: Iterator[float] = iter([seconds] if isinstance(seconds, float) else seconds)
        last = 0.0

        def run(reps: int) -> float | None:
            nonlocal last
            last = next(costs, last)
            self.calls.append((name, reps))
            self.ns += round(last * reps * 1e9)
            return None if own is None else own * last * reps

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(sampler, "now_ns", fake)
    for module in ("sampler", "budget"):
        monkeypatch.setattr(f"kvbench.timing.{module}.quantum", lambda: Quantum(step_ns=50, cost_ns=50.0, reads=1))
    return fake


class Script:
    """A gate that finds the blocks disturbed whose turn is in ``bad``."""

    kind = "delay"
    reason = ""

    def __init__(self, bad: Callable[[int], bool]) -> None:
        self.bad, self.turn, self.closed = bad, -1, False

    def rebase(self) -> None: ...

    def disturbed(self, wall_ns: int) -> bool:
        self.turn += 1
        return self.bad(self.turn)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], Script]:
    def install(bad: Callable[[int], bool]) -> Script:
        script = Script(bad)
        monkeypatch.setattr(sampler, "open_gate", lambda kind, tids: script)
        return script

    return install


def taken(samples: Samples) -> tuple[int, int, str]:
    return len(samples.seconds), samples.warm_calls, samples.stop


def test_smoke_is_one_warm_up_call_and_six_samples(clock: Clock) -> None:
    found = sample(clock.work(0.02), SMOKE, gate=None)
    assert taken(found) == (6, 1, "converged")
    assert len(clock.calls) == 7
    assert found.summary is not None
    assert found.summary.median == pytest.approx(0.02)
    assert found.warm_seconds == pytest.approx(0.02)
    assert found.sampled_seconds == pytest.approx(0.12)
    assert (found.gate, found.gate_reason, found.flags) == (None, "", ())


def test_smoke_ends_at_half_a_second_with_what_it_has(clock: Clock) -> None:
    assert taken(sample(clock.work(0.11), SMOKE, gate=None)) == (5, 1, "timeout")


@pytest.mark.parametrize(("profile", "warm"), [("smoke", 1), ("quick", 3), ("full", 3)])
def test_pass_longer_than_the_cap_gives_three_samples(clock: Clock, profile: str, warm: int) -> None:
    found = sample(clock.work(20.0), budget(profile), gate=None)
    assert taken(found) == (3, warm, "timeout")
    assert found.summary is not None
    assert (found.summary.median, found.summary.low) == (20.0, None)


def test_quick_warms_up_by_time_and_converges_after_half_a_second(clock: Clock) -> None:
    found = sample(clock.work(0.01), QUICK, gate=None)
    assert found.stop == "converged"
    assert found.warm_seconds >= 0.2
    assert 0.5 <= found.sampled_seconds < 0.52
    assert found.reps == 1


def test_short_passes_are_batched_to_the_target(clock: Clock) -> None:
    found = sample(clock.work(1e-7), QUICK, gate=None)
    assert found.summary is not None
    assert found.summary.median == pytest.approx(1e-7)
    assert found.reps * 1e-7 >= QUICK.target_seconds()
    assert found.reps * 1e-7 < 4 * QUICK.target_seconds()
    assert "short_samples" not in found.flags


def test_coarse_clock_makes_longer_blocks(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.timing.budget.quantum", lambda: Quantum(step_ns=4_000, cost_ns=50.0, reads=1))
    found = sample(clock.work(1e-6), QUICK, gate=None)
    assert found.reps * 1e-6 >= 1_000 * 4e-6


def test_cold_call_does_not_hide_a_short_pass(clock: Clock) -> None:
    # Compiling takes 0.3 s in the one warm-up call of smoke; the passes after it take 2 us.
    found = sample(clock.work([0.3, 2e-6]), SMOKE, gate=None)
    assert len(found.seconds) == 6
    assert found.reps * 2e-6 >= SMOKE.target_seconds()
    assert found.first_call_ratio == pytest.approx(0.3 / 2e-6)


def test_own_window_counts_instead_of_the_call(clock: Clock) -> None:
    found = sample(clock.work(0.02, own=0.5), SMOKE, gate=None)
    assert found.summary is not None
    assert found.summary.median == pytest.approx(0.01)


@pytest.mark.parametrize("own", [1.5, -0.1, float("nan"), float("inf")])
def test_window_that_cannot_be_true_is_an_error(clock: Clock, own: float) -> None:
    with pytest.raises(
        KvbenchError, match=r"the timed window of a run cannot be true, got .* inside a call of 0\.02 s"
    ):
        sample(clock.work(0.02, own=own), SMOKE, gate=None)


def test_windows_of_zero_are_no_samples(clock: Clock) -> None:
    found = sample(clock.work(0.02, own=0.0), SMOKE, gate=None)
    assert found.stop == "no_samples"
    assert found.summary is None
    assert (len(found.seconds), len(found.kept)) == (0, 0)
    assert found.unusable == found.taken >= 3
    assert "no sample could be used" in found.reason
    assert max(reps for _, reps in clock.calls) * 0.02 <= 0.3  # no endless search for a window


def test_a_few_zero_windows_taint(clock: Clock) -> None:
    turn = iter(range(1000))
    work = clock.work(0.02)

    def run(reps: int) -> float:
        work(reps)
        return 0.0 if next(turn) == 5 else 0.02 * reps

    found = sample(run, SMOKE, gate=None)
    assert (found.unusable, len(found.seconds)) == (1, 6)
    assert {"tainted", "unusable_windows"} <= set(found.flags)


def test_gated_samples_are_set_aside_and_do_not_count(clock: Clock, gated: Callable[..., Script]) -> None:
    costs = [0.02] * 3 + [0.09] + [0.02]
    gate = gated(lambda turn: turn == 2)
    found = sample(clock.work(costs), SMOKE)
    assert (len(found.seconds), found.gated, found.taken) == (6, 1, 7)
    assert found.aside.tolist() == pytest.approx([0.09])
    assert found.summary is not None
    assert found.summary.max == pytest.approx(0.02)
    assert (found.gate, found.tainted, gate.closed) == ("delay", False, True)


def test_many_gated_samples_taint(clock: Clock, gated: Callable[..., Script]) -> None:
    gated(lambda turn: turn % 4 == 0)
    found = sample(clock.work(0.02), SMOKE)
    assert found.tainted
    assert "were disturbed" in found.reason


def test_when_nearly_all_are_gated_all_are_used_and_tainted(clock: Clock, gated: Callable[..., Script]) -> None:
    gated(lambda turn: turn != 4)
    found = sample(clock.work(0.02), SMOKE)
    assert found.stop == "timeout"
    assert found.gated == found.taken - 1
    assert len(found.seconds) == found.taken == 25
    assert len(found.aside) == 0
    assert found.tainted
    assert "all are used" in found.reason


def test_gate_that_cannot_work_is_flagged(clock: Clock, gated: Callable[..., Script]) -> None:
    gated(lambda turn: False).reason = "schedstat counts nothing on this kernel"
    found = sample(clock.work(0.02), SMOKE)
    assert found.gate is None
    assert "gate_off" in found.flags
    assert "counts nothing" in found.reason
    assert not found.tainted


def test_marks_cover_their_stretch_and_taint(clock: Clock) -> None:
    asked: list[int] = []

    def marker() -> Sequence[str]:
        asked.append(clock.ns)
        return ("steal",) if len(asked) in (3, 4) else ()

    found = sample(clock.work(0.021), SMOKE, gate=None, marker=marker)
    assert found.marks == ("steal",)
    assert (found.marked, len(found.seconds)) == (2, 6)
    assert {"steal", "tainted"} <= set(found.flags)


def test_one_mark_of_six_does_not_taint(clock: Clock) -> None:
    words = iter([(), ("steal",)])
    found = sample(clock.work(0.021), SMOKE, gate=None, marker=lambda: next(words, ()))
    assert found.marked == 1
    assert "steal" in found.flags
    assert not found.tainted


def test_marker_is_not_asked_oftener_than_counters_move(clock: Clock) -> None:
    asked: list[int] = []

    def marker() -> Sequence[str]:
        asked.append(clock.ns)
        return ()

    sample(clock.work(0.001), QUICK, gate=None, marker=marker)
    assert min(np.diff(asked[:-1])) >= sampler.MARK_NS


def test_slow_first_sample_is_dropped_and_reported(clock: Clock) -> None:
    found = sample(clock.work([0.02, 0.2, 0.02]), SMOKE, gate=None)
    assert found.first_ratio == pytest.approx(10.0)
    assert "first_sample_dropped" in found.flags
    assert found.aside.tolist() == pytest.approx([0.2])
    assert len(found.seconds) == 5


def test_noise_that_never_converges_is_called_so(clock: Clock) -> None:
    noise = 0.001 * np.exp(0.2 * np.random.default_rng(0).standard_normal(30_000))
    assert sample(clock.work(list(noise)), QUICK, gate=None).stop == "stabilised_noisy"


def test_drift_runs_into_the_cap_and_is_flagged(clock: Clock) -> None:
    found = sample(clock.work(list(np.linspace(0.001, 0.002, 3000))), QUICK, gate=None)
    assert found.stop == "timeout"
    assert {"drifting", "autocorrelated"} <= set(found.flags)


def test_no_more_than_the_largest_count(clock: Clock) -> None:
    noise = 0.001 * np.exp(0.02 * np.random.default_rng(0).standard_normal(3000))
    found = sample(clock.work(list(noise)), replace(QUICK, max_samples=100, min_seconds=1.0), gate=None)
    assert (found.taken, found.stop) == (100, "timeout")


def test_kept_samples_are_a_seeded_thousand(clock: Clock) -> None:
    noise = 0.0002 * np.exp(0.001 * np.random.default_rng(0).standard_normal(20_000))
    found = [sample(clock.work(list(noise)), QUICK, gate=None, seed=seed) for seed in (1, 1, 2)]
    assert all(len(f.kept) == 1000 < len(f.seconds) for f in found)
    assert np.array_equal(found[0].kept, found[1].kept)
    assert not np.array_equal(found[0].kept, found[2].kept)


def test_progress_is_told_outside_of_samples(clock: Clock) -> None:
    told: list[tuple[int, float]] = []
    found = sample(clock.work(0.05), QUICK, gate=None, on_progress=lambda n, s: told.append((n, s)))
    assert 5 <= len(told) <= found.sampled_seconds / 0.1 + 1
    assert told[0] == (2, pytest.approx(0.1))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_a_run_raises_passes_and_nothing_is_left_open(clock: Clock, error: type[BaseException]) -> None:
    turn = iter(range(100))
    work = clock.work(0.02)

    def run(reps: int) -> None:
        work(reps)
        if next(turn) == 4:
            raise error

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        sample(run, SMOKE)
    assert gc.isenabled()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pair_runs_abba_and_cancels_drift(clock: Clock) -> None:
    speed = {"a": 0.02, "b": 0.01}

    def run(name: str) -> Callable[[int], None]:
        def go(reps: int) -> None:
            clock.calls.append((name, reps))
            clock.ns += round(speed[name] * (1.0 + 0.5 * clock.ns * 1e-9) * reps * 1e9)

        return go

    pair = sample_pair(run("a"), run("b"), SMOKE, gate=None)
    a, b = pair
    order = "".join(name for name, _ in clock.calls)
    assert order.startswith("ab" + "abbaabba")  # one warm-up call each, then the turns
    assert (len(a.seconds), len(b.seconds), len(pair.ratios)) == (6, 6, 6)
    assert pair.ratio is not None
    assert pair.ratio.value == pytest.approx(2.0, rel=0.005)
    assert pair.ratio.low is not None
    assert pair.ratio.high is not None
    assert pair.ratio.low <= 2.0 <= pair.ratio.high


def test_pair_gives_each_side_its_whole_budget_and_matched_blocks(clock: Clock) -> None:
    a, b = sample_pair(clock.work(0.009, name="a"), clock.work(1e-6, name="b"), QUICK, gate=None)
    assert (a.stop, b.stop) == ("converged", "converged")
    assert a.sampled_seconds >= 0.5
    assert b.sampled_seconds >= 0.5
    assert b.reps * 1e-6 == pytest.approx(0.009, rel=0.01)
    assert b.summary is not None
    assert b.summary.median == pytest.approx(1e-6)


def test_pair_ends_when_one_side_reaches_its_cap(clock: Clock) -> None:
    noise = 0.05 * np.exp(0.2 * np.random.default_rng(0).standard_normal(300))
    a, b = sample_pair(clock.work(list(noise)), clock.work(0.015), QUICK, gate=None)
    assert (a.stop, b.stop) == ("timeout", "converged")
    assert len(a.seconds) == len(b.seconds)
    assert 2.0 <= a.sampled_seconds < 2.2


def test_pair_of_passes_longer_than_the_cap(clock: Clock) -> None:
    a, b = sample_pair(clock.work(20.0), clock.work(30.0), QUICK, gate=None)
    assert (len(a.seconds), len(b.seconds)) == (3, 3)


def test_pair_ratio_leaves_out_disturbed_blocks(clock: Clock, gated: Callable[..., Script]) -> None:
    gated(lambda turn: turn == 2)  # the second pair's first block
    costs = [0.02, 0.02, 0.02, 0.02]
    pair = sample_pair(clock.work(costs), clock.work([0.02, 0.02, 0.09, 0.02]), SMOKE)
    assert pair.b.gated == 1
    assert len(pair.ratios) == len(pair.a.seconds) - 1
    assert pair.ratios.tolist() == pytest.approx([1.0] * len(pair.ratios))


def test_pair_restarts_both_when_one_was_only_cold(clock: Clock) -> None:
    a, b = sample_pair(clock.work([0.3, 2e-6], name="a"), clock.work(0.02, name="b"), SMOKE, gate=None)
    assert (len(a.seconds), len(b.seconds)) == (6, 6)
    assert a.reps * 2e-6 >= SMOKE.target_seconds()


def test_real_clock_measures_a_sleep() -> None:
    found = sample(lambda reps: time.sleep(0.003 * reps), SMOKE)
    assert found.summary is not None
    assert found.summary.min >= 0.003
    assert found.wall_seconds >= found.sampled_seconds + found.warm_seconds


def test_overhead_prints_every_kind(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.timing import overhead

    real = overhead.measure
    monkeypatch.setattr(overhead, "measure", lambda kind, tids: real(kind, tids, samples=200, batches=3))
    assert overhead.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["clock", "ungated", "delay", "delay", "cpu", "cpu"]
    assert all(float(line.split()[1]) > 0.0 for line in lines[1:])


def test_every_profile_samples_something(clock: Clock) -> None:
    for limits in BUDGETS.values():
        assert sample(clock.work(0.01), limits, gate=None).summary is not None
