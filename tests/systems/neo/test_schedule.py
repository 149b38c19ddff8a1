"""Schedules: what overlaps in which mode, which order has to hold, and that a removed wait is found."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError, VerifyError
from kvbench.systems.neo import schedule as s

LAYERS = 3
WORK = s.Batch(prefill=64, gpu=6, cpu=10)


def made(mode: str, layers: int = LAYERS, batch: s.Batch = WORK, few: int = 2) -> s.Schedule:
    if mode == "asymmetric":
        return s.asymmetric(layers, batch, few)
    return {"gpu_only": s.gpu_only, "simple": s.simple, "symmetric": s.symmetric}[mode](layers, batch)


def seconds(schedule: s.Schedule, **known: float) -> dict[str, float]:
    return {f"{x.kind}{x.batch}": known.get(f"{x.kind}{x.batch}", known.get(x.kind, 0.0)) for x in schedule.stages}


def names(schedule: s.Schedule, lane: str) -> list[str]:
    return [stage.name for stage in schedule.stages if stage.lane == lane]


def test_the_order_of_the_pipeline_is_the_papers() -> None:
    order = made("asymmetric", layers=2)
    assert names(order, "near") == [
        "pr0[0]", "pr1[0]", "ga0[0]", "po0[0]", "pr0[1]", "po1[0]", "pr1[1]", "ga0[1]", "po0[1]", "po1[1]",
    ]  # fmt: skip
    assert names(order, "cpu") == ["ca0[0]", "ca1[0]", "ca0[1]", "ca1[1]"]
    assert order.batches == (s.Batch(64, 6, 2), s.Batch(cpu=8))


def test_symmetric_halves_the_decodes_and_prefills_before_them() -> None:
    order = made("symmetric", batch=s.Batch(64, 5, 9))
    assert order.batches == (s.Batch(gpu=3, cpu=5), s.Batch(gpu=2, cpu=4), s.Batch(prefill=64))
    near = names(order, "near")
    assert near.index("po2[2]") < near.index("pr0[0]")
    assert "ga1[0]" in near


def test_gpu_only_leaves_the_cpu_requests_waiting() -> None:
    order = made("gpu_only")
    assert order.batches == (s.Batch(64, 6, 0),)
    assert {stage.lane for stage in order.stages} == {"near"}


def test_simple_overlaps_nothing() -> None:
    order = made("simple")
    times = seconds(order, pr=1.0, po=2.0, ga=0.5, ca=4.0, qkv=0.25, o=0.125)
    line = s.forecast(order, times)
    assert line.total == pytest.approx(LAYERS * sum(times.values()))
    assert line.stall("near") == pytest.approx(LAYERS * (4.0 + 0.25 + 0.125))


def test_the_pipeline_takes_the_papers_time_between_its_ends() -> None:
    """T = L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0)), for many layers, whichever side is the longer one."""
    for cpu in (0.5, 2.0, 9.0):
        order = made("asymmetric", layers=60)
        times = seconds(order, pr0=1.0, po0=3.0, pr1=0.5, po1=1.0, ga0=0.5, ca0=cpu / 2, ca1=cpu)
        layer = max(4.0, cpu) + max(2.0, cpu / 2)
        assert s.forecast(order, times).total / 60 == pytest.approx(layer, rel=0.03)


def test_ends_of_the_pipeline_are_exposed() -> None:
    """One layer: pr0, pr1 and ga0 beside ca0, then ca1 beside po0, then po1."""
    order = made("asymmetric", layers=1)
    line = s.forecast(order, seconds(order, pr0=1.0, pr1=1.0, ga0=1.0, po0=1.0, po1=1.0, ca0=4.0, ca1=3.0))
    assert line.total == pytest.approx(1.0 + 4.0 + 3.0 + 1.0)
    assert line.spans["po0[0]"] == (5.0, 6.0)


def test_launch_delays_each_cpu_stage() -> None:
    order = made("simple")
    times = seconds(order, ca=1.0)
    assert s.forecast(order, times, 0.25).total == pytest.approx(LAYERS * 1.25)


@pytest.mark.parametrize("mode", ["simple", "symmetric", "asymmetric"])
def test_every_wait_is_needed_or_implied(mode: str) -> None:
    """Removing a wait is refused, except where submitting after a CPU stage or the lane orders it anyway."""
    order = made(mode)
    refused = 0
    for stage in order.stages:
        for wait in stage.after:
            less = order.without(stage.name, wait)
            # a ca is over when anything behind it is submitted; simple's qkv waits for ga, and ga is behind pr
            if wait.startswith("ca") or (mode == "simple" and stage.kind == "qkv"):
                less.verify()
                continue
            with pytest.raises(VerifyError, match=re.escape(f"expected a wait for {wait}")):
                less.verify()
            refused += 1
    assert refused >= (1 if mode == "simple" else 3) * LAYERS


@pytest.mark.parametrize("mode", ["gpu_only", "simple", "symmetric", "asymmetric"])
def test_a_missing_stage_and_a_swapped_order_are_refused(mode: str) -> None:
    order = made(mode)
    with pytest.raises(VerifyError):
        replace(order, stages=order.stages[:-1]).verify()
    with pytest.raises(VerifyError):
        replace(order, stages=tuple(reversed(order.stages))).verify()
    with pytest.raises(VerifyError, match="twice"):
        replace(order, stages=(*order.stages, order.stages[0])).verify()


@given(
    st.sampled_from(["gpu_only", "simple", "symmetric", "asymmetric"]), st.integers(1, 5), st.integers(0, 3),
    st.integers(0, 4), st.integers(0, 5), st.integers(0, 5), st.lists(st.floats(0.0, 5.0), min_size=6, max_size=6),
)  # fmt: skip
def test_any_schedule_is_complete_and_no_faster_than_its_busiest_lane(
    mode: str, layers: int, prefill: int, gpu: int, cpu: int, few: int, times: list[float]
) -> None:
    batch = s.Batch(prefill, gpu, cpu)
    if not batch.tokens or (mode == "gpu_only" and not batch.attends_near):
        with pytest.raises(UsageError):
            made(mode, layers, batch, min(few, cpu))
        return
    order = made(mode, layers, batch, min(few, cpu))
    order.verify()
    line = s.forecast(order, seconds(order, **dict(zip(("pr", "po", "ga", "ca", "qkv", "o"), times, strict=True))))
    assert line.total >= max(line.busy.values()) - 1e-9
    assert line.total <= sum(line.busy.values()) + 1e-9
    for stage in order.stages:
        for name in order.inputs(stage):
            assert line.spans[name][1] <= line.spans[stage.name][0] + 1e-9


def test_nothing_to_do_is_an_error() -> None:
    for build, layers, batch in ((s.simple, 0, WORK), (s.gpu_only, 2, s.Batch(cpu=3)), (s.simple, 2, s.Batch(gpu=-1))):
        with pytest.raises(UsageError):
            build(layers, batch)
    with pytest.raises(UsageError, match=r"expected 0\.\.10"):
        s.asymmetric(2, WORK, 11)
