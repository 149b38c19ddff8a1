"""``measure``: values, rates, verification, ceilings and the rows they become. Time comes from the work itself here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import pytest

from kvbench.context import Context
from kvbench.contract import axis
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench, bench
from kvbench.contract.case import Case
from kvbench.contract.result import Basis, Ceiling, Result
from kvbench.errors import KvbenchError, Unavailable, VerifyError
from kvbench.measure import Measure, Reference
from kvbench.report.table import results_table
from kvbench.runner import failed_row
from kvbench.worker import measure_case

PASS_S = 1e-3
N = axis.integer(smoke="1", quick="1", full="1")


@pytest.fixture(scope="module")
def context() -> Context:
    made = Context.create(profile="smoke", scratch=None, seed=1)
    # samples this short would otherwise be waited for: the work below only says how long it took
    return dataclasses.replace(made, budget=dataclasses.replace(made.budget, block_seconds=0.0, quanta=0.0))


def timed(seconds: float = PASS_S) -> Callable[[int], float]:
    """Work whose every pass takes exactly ``seconds`` by its own window; the call is long enough to hold it."""
    from time import perf_counter

    def run(reps: int) -> float:
        end = perf_counter() + reps * seconds
        while perf_counter() < end:
            pass
        return reps * seconds

    return run


def declared(body: Callable[[Case, Measure], None], unit: str = "B/s", better: str = "higher") -> Bench:
    body.__doc__ = "A bench."
    return bench(
        version=1, metric="m", unit=unit, better=better, extra_metrics=["x"], n=N,  # type: ignore[arg-type]
    )(body).in_suite("s", "f")  # fmt: skip


def rows_of(
    context: Context, body: Callable[[Case, Measure], None], unit: str = "B/s", better: str = "higher"
) -> list[Result]:
    return measure_case(declared(body, unit, better), {"n": 1}, context)


def test_a_rate_counts_the_bytes_it_names(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=3000, unique=1000, rate_of="unique")

    row = rows_of(context, body)[0]
    assert row.value == pytest.approx(1000 / PASS_S)
    assert row.rate_of == "unique"
    assert (row.bytes.link, row.bytes.unique, row.bytes.demand) == (3000, 1000, None)
    assert row.seconds == pytest.approx(PASS_S)
    assert row.low is not None
    assert row.high is not None
    assert row.low <= row.value <= row.high


def test_a_time_is_per_operation_and_a_flop_rate_counts_operations(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), ops=4)

    row = rows_of(context, body, "s", "lower")[0]
    assert row.value == pytest.approx(PASS_S / 4)
    assert row.seconds == pytest.approx(PASS_S / 4)
    assert row.rate_of is None
    assert rows_of(context, body, "FLOP/s")[0].value == pytest.approx(4 / PASS_S)


def test_link_bytes_may_be_counted_after_the_timing(context: Context) -> None:
    seen: list[int] = []

    def body(case: Case, measure: Measure) -> None:
        work = timed()

        def run(reps: int) -> float:
            seen.append(reps)
            return work(reps)

        measure(run, link=lambda: 7 if seen else 0)

    assert rows_of(context, body)[0].bytes.link == 7


def test_a_failed_payload_check_leaves_no_number(context: Context) -> None:
    def wrong() -> None:
        raise VerifyError("byte 3 differs")

    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=1, verify=wrong)
        measure.extra("x", 1.0, unit="1", better="higher")

    (row,) = rows_of(context, body)
    assert (row.status, row.value, row.samples) == ("failed", None, ())
    assert "byte 3 differs" in row.reason


def test_the_reference_of_a_pair_is_verified_too(context: Context) -> None:
    def wrong() -> None:
        raise VerifyError("the ceiling copied nothing")

    def body(case: Case, measure: Measure) -> None:
        measure.pair(timed(), Reference("stream", timed(), 1, wrong), link=1)

    assert rows_of(context, body)[0].status == "failed"


def test_a_measured_ceiling_heads_the_list_and_a_pair_above_it_is_retaken_once_then_flagged(context: Context) -> None:
    calls: list[int] = []

    def body(case: Case, measure: Measure) -> None:
        slow = timed(2 * PASS_S)

        def ceiling(reps: int) -> float:
            calls.append(reps)
            return slow(reps)

        physical = Ceiling("link", 1e12, "physical", "spec")
        measure.pair(timed(), Reference("stream", ceiling, 1000), link=1000, ceilings=[physical])

    row = rows_of(context, body)[0]
    assert [c.name for c in row.ceilings] == ["stream", "link"]
    assert row.ceilings[0].value == pytest.approx(500 / PASS_S, rel=0.01)
    assert row.fraction == pytest.approx(2.0, rel=0.01)
    assert "above_ceiling" in row.flags
    assert row.detail["retaken"] == 1
    assert len(calls) >= 2 * 6


def test_above_a_physical_ceiling_is_invalid(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=1000, ceilings=[Ceiling("link", 500 / PASS_S, "physical", "spec sheet")])

    row = rows_of(context, body)[0]
    assert row.status == "invalid"
    assert "spec sheet" in row.reason


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (Unavailable("asked for 9 TiB", mend="buy memory"), "skipped", "buy memory"),
        (MemoryError("no"), "skipped", "out of memory"),
        (KvbenchError("the device went away"), "failed", "went away"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError: x (test_measure.py:"),
        (AssertionError("differs"), "failed", "AssertionError"),
    ],
)
def test_whatever_a_bench_raises_becomes_one_row(
    context: Context, error: Exception, status: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=1)
        raise error

    (row,) = rows_of(context, body)
    assert (row.status, row.value) == (status, None)
    assert text in row.reason


def test_an_error_while_closing_is_a_failed_row(context: Context) -> None:
    @contextlib.contextmanager
    def resource() -> Iterator[None]:
        yield
        raise KvbenchError("the device went away at the end")

    def body(case: Case, measure: Measure) -> None:
        measure.enter(resource())
        measure(timed(), link=1)

    (row,) = rows_of(context, body)
    assert (row.status, row.value) == ("failed", None)
    assert "at the end" in row.reason


def test_measuring_nothing_is_a_failure_even_with_further_rows(context: Context) -> None:
    def nothing(case: Case, measure: Measure) -> None:
        measure.note("a", 1)

    def only_extra(case: Case, measure: Measure) -> None:
        measure.extra("x", 1.0, unit="1", better="higher")

    for body in (nothing, only_extra):
        (row,) = rows_of(context, body)
        assert (row.status, row.metric) == ("failed", "m")


def test_an_undeclared_metric_and_a_rate_without_bytes_are_refused(context: Context) -> None:
    def undeclared(case: Case, measure: Measure) -> None:
        measure(timed(), link=1)
        measure.extra("y", 1.0, unit="1", better="higher")

    def unnamed(case: Case, measure: Measure) -> None:
        measure(timed(), unique=1)

    assert "undeclared metric" in rows_of(context, undeclared)[0].reason
    assert "a rate of link bytes needs them" in rows_of(context, unnamed)[0].reason


def test_more_than_any_core_can_do_is_invalid_even_where_no_ceiling_is_known(context: Context) -> None:
    def lost(case: Case, measure: Measure) -> None:
        measure(timed(), link=1 << 44)

    def device(case: Case, measure: Measure) -> None:
        measure.on_device()
        measure(timed(), link=1 << 44)

    row = rows_of(context, lost)[0]
    assert row.status == "invalid"
    assert "cores" in row.reason
    assert row.ceilings == ()
    assert row.fraction is None
    assert rows_of(context, device)[0].status in ("ok", "tainted")


def test_a_window_that_leaves_out_most_of_the_call_says_so(context: Context) -> None:
    whole = timed(5e-3)

    def body(case: Case, measure: Measure) -> None:
        def run(reps: int) -> float:
            return whole(reps) / 20

        measure(run, link=1000)

    row = rows_of(context, body)[0]
    assert "small_window" in row.flags
    share = row.detail["window_share"]
    assert isinstance(share, float)
    assert 0.01 < share < 0.06  # a busy machine lengthens the calls, never the window


def test_a_model_says_so(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.model(5.0, source="bytes / beta")

    (row,) = rows_of(context, body)
    assert (row.basis, row.value, row.n) == ("modelled", 5.0, 0)
    assert "modelled" in results_table([row])


def test_flags_of_a_case_reach_every_row_and_the_table_survives_hostile_text(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.flag("[red]odd[/red]\x1b[31m")
        measure(timed(), link=1)
        measure.extra("x", 1.0, unit="1", better="higher")

    rows = rows_of(context, body)
    assert all(row.flags for row in rows)
    table = results_table(rows)
    assert "[red]odd[/red]" in table
    assert "\x1b" not in table


def test_best_picks_the_fastest_variant(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.note("best", measure.best({"slow": timed(3e-3), "fast": timed(1e-3), "middle": timed(2e-3)}))
        measure(timed(), link=1)

    assert rows_of(context, body)[0].detail["best"] == "fast"


def test_a_target_is_reused_and_a_source_keeps_its_payload(context: Context) -> None:
    import numpy as np

    from kvbench.memory import payload

    seen: list[tuple[int, int]] = []

    def body(case: Case, measure: Measure) -> None:
        source = measure.sources(1, 2 << 20, "4k")[0]
        target = measure.target(2 << 20, "4k")
        assert np.array_equal(source.array(), payload.expected(2 << 20, 1, "bits"))
        target.array()[:] = 0
        seen.append((source.address, target.address))
        measure(timed(), link=1)

    def floats(case: Case, measure: Measure) -> None:
        values = measure.sources(1, 2 << 20, "4k", kind="float64")[0].array(np.float64)
        assert 1.0 <= values.min() < values.max() < 2.0
        measure(timed(), link=1)

    for work in (body, floats, body):
        (row,) = rows_of(context, work)
        assert row.status in ("ok", "tainted"), row.reason
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


def test_several_ceilings_are_taken_in_turns_and_keep_their_order(context: Context) -> None:
    order: list[str] = []

    def named(name: str, seconds: float) -> Callable[[int], float]:
        work = timed(seconds)

        def run(reps: int) -> float:
            order.append(name)
            return work(reps)

        return run

    def body(case: Case, measure: Measure) -> None:
        measure.pair(
            named("case", 2 * PASS_S),
            [Reference("gather", named("gather", PASS_S), 1000), Reference("read", named("read", PASS_S / 2), 1000)],
            link=1000,
        )

    row = rows_of(context, body)[0]
    assert [(c.name, c.kind) for c in row.ceilings] == [("gather", "measured"), ("read", "measured")]
    assert row.fraction == pytest.approx(0.5, rel=0.01)
    assert row.ceilings[1].value == pytest.approx(2000 / PASS_S, rel=0.01)
    sampled = order[-36:] if len(order) >= 36 else order
    assert "case gather read read gather case" in " ".join(sampled)


@pytest.mark.parametrize("checked", [0, 1])
def test_every_ceiling_of_a_row_is_verified(context: Context, checked: int) -> None:
    def wrong() -> None:
        raise VerifyError("the ceiling copied nothing")

    def body(case: Case, measure: Measure) -> None:
        checks = [wrong if i == checked else None for i in range(2)]
        measure.pair(timed(), [Reference(f"c{i}", timed(), 1, check) for i, check in enumerate(checks)], link=1)

    assert rows_of(context, body)[0].status == "failed"


def test_a_pair_needs_a_ceiling(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.pair(timed(), [], link=1)

    row = rows_of(context, body)[0]
    assert row.status == "failed"
    assert "without a reference" in row.reason


@pytest.mark.parametrize("basis", ["modelled", "simulated", "emulated"])
def test_what_was_not_measured_says_so(context: Context, basis: str) -> None:
    def body(case: Case, measure: Measure) -> None:
        if basis == "modelled":
            measure.model(3.0, source="a law")
        elif basis == "simulated":
            measure.simulated(3.0, source="a replay")
        else:
            measure(timed(), link=1000, basis="emulated")

    row = rows_of(context, body)[0]
    assert row.basis == basis
    assert row.status in ("ok", "tainted")  # of a busy machine


def test_a_computed_row_is_the_only_primary_row(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=1000)
        measure.model(3.0, source="a law")

    assert "measured twice" in rows_of(context, body)[0].reason


@pytest.mark.parametrize(("value", "status", "fraction"), [(0.5, "ok", 0.5), (1.01, "ok", 1.01), (2.0, "invalid", 2.0)])
def test_a_further_metric_is_held_against_its_ceilings(
    context: Context, value: float, status: str, fraction: float
) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure(timed(), link=1000)
        top = [Ceiling("spec", 1.0, "physical", "a law")]
        measure.extra("x", value, unit="1", better="higher", ceilings=top)

    row = rows_of(context, body)[1]
    assert (row.status, row.fraction) == (status, pytest.approx(fraction))
    assert row.ceilings[0].name == "spec"


def test_what_is_counted_is_measured_and_says_by_what(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.counted(4096.0, n=3, source="allocator ledger")

    (row,) = rows_of(context, body, "B", "lower")
    assert (row.basis, row.value, row.n, row.stop) == ("measured", 4096.0, 3, None)
    assert row.detail["counted_by"] == "allocator ledger"


def test_counting_nothing_is_no_measurement(context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        measure.counted(0.0, n=0, source="nobody")

    assert rows_of(context, body, "B", "lower")[0].status == "failed"


@pytest.mark.parametrize("basis", ["simulated", "modelled", "emulated"])
@pytest.mark.parametrize("wrong", ["skip", "unavailable", "raise", "nothing", "verify", "no value"])
def test_a_case_without_a_value_has_the_basis_of_its_bench(basis: Basis, wrong: str, context: Context) -> None:
    def body(case: Case, measure: Measure) -> None:
        """A bench."""
        if wrong == "skip":
            measure.skip("not here")
        if wrong == "unavailable":
            raise Unavailable("not here")
        if wrong == "raise":
            raise RuntimeError("bad")
        if wrong == "verify":
            raise VerifyError("bytes differ")
        if wrong == "no value":
            measure.simulated(1.0, source="events")
            measure.extra("x", None, unit="1", better="higher", status="skipped", reason="none", basis=basis)

    made = bench(version=1, metric="m", unit="1", better="higher", extra_metrics=["x"], basis=basis, n=N)(body)
    rows = measure_case(made.in_suite("s", "f"), {"n": 1}, context)
    row = rows[-1]
    assert (row.value, row.basis) == (None, basis)
    assert row.status in ("skipped", "failed")
    lost = failed_row(made, made.case({"n": 1}), "killed", 1, 2.0)
    assert (lost.status, lost.basis) == ("failed", basis)


def test_what_is_measured_stays_so_in_a_bench_of_another_basis(context: Context) -> None:
    def of(axes: Mapping[str, Value]) -> Basis:
        return "modelled" if axes["n"] == 1 else "measured"

    def timing(case: Case, measure: Measure) -> None:
        """A bench."""
        measure(timed())

    def counting(case: Case, measure: Measure) -> None:
        """A bench."""
        measure.counted(3.0, n=3, source="a counter")

    def nothing(case: Case, measure: Measure) -> None:
        """A bench."""
        measure(lambda reps: 0.0)

    for body in (timing, counting):
        made = bench(version=1, metric="m", unit="s", better="lower", basis=of, n=N)(body).in_suite("s", "f")
        (row,) = measure_case(made, {"n": 1}, context)
        assert row.value is not None
        assert row.basis == "measured"
    made = bench(version=1, metric="m", unit="s", better="lower", basis=of, n=N)(nothing).in_suite("s", "f")
    (row,) = measure_case(made, {"n": 1}, context)
    assert (row.value, row.basis) == (None, "measured")
    assert made.basis_of({"n": 2}) == "measured"
    with pytest.raises(ValueError, match="basis='guessed'"):
        bench(version=1, metric="m", unit="s", better="lower", basis="guessed", n=N)  # type: ignore[arg-type]


def test_a_bench_may_call_what_it_measured_suspect(context: Context) -> None:
    def slow(case: Case, measure: Measure) -> None:
        """A bench."""
        measure(timed())
        measure.suspect("half of what it should be")

    def early(case: Case, measure: Measure) -> None:
        """A bench."""
        measure.suspect("of what?")

    (row,) = rows_of(context, slow, "s", "lower")
    assert row.value is not None
    assert row.status in ("suspect", "tainted")
    assert "half of what it should be" in row.reason
    (row,) = rows_of(context, early, "s", "lower")
    assert (row.status, row.value) == ("failed", None)
    assert "nothing measured can be suspect" in row.reason
