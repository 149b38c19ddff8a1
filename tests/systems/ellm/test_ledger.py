"""The ledger's analytic peaks are those of the real layer stack, byte by byte, and say what the paper says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.model.layers import SHAPES, LayerShape, Stack, shape
from kvbench.systems.ellm import ledger
from kvbench.units import GiB
from tests.needs import missing_module, require

NAMES = sorted(SHAPES)
# Of the measured bytes. The stack's tensors are known one by one, so the tolerance is none at all; on a GPU, where the
# allocator rounds and kernels take scratch, the bench states what it finds.
TOLERANCE = 0


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    require("torch", missing_module("torch"))
    module = pytest.importorskip("torch")
    threads = module.get_num_threads()
    module.set_num_threads(1)  # small tensors: a second thread that has to wait for its CPU costs more than it brings
    yield module
    module.set_num_threads(threads)


@st.composite
def shapes(draw: Any) -> LayerShape:
    """Shapes whose peak may lie in any step: narrow and wide MLPs, many heads, huge vocabularies."""
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([8, 16]))
    return LayerShape(
        "drawn", draw(st.sampled_from([8, 64, 96])), 2, kv_heads * group, kv_heads, head_dim,
        draw(st.sampled_from([8, 24, 160])), draw(st.booleans()), draw(st.sampled_from(["rms", "layer"])),
        draw(st.sampled_from([16, 3000])), "drawn",
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(of=shapes(), tokens=st.integers(2, 40), cut=st.integers(1, 39), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_analytic_is_measured(torch: Any, of: LayerShape, tokens: int, cut: int, dtype: str) -> None:
    stack = Stack(of, dtype=dtype)
    e, ids, kv = stack.element_bytes, stack.ids(tokens), stack.make_kv(tokens)
    whole = ledger.measured_peak(lambda: stack.prefill(ids, kv))
    assert abs(whole.nbytes - ledger.prefill_peak(of, tokens, element_bytes=e).nbytes) <= TOLERANCE
    cut = min(cut, tokens - 1)
    rest = ledger.measured_peak(lambda: stack.prefill(ids[cut:], kv, cut))
    assert abs(rest.nbytes - ledger.peak(of, tokens - cut, element_bytes=e, past=True).nbytes) <= TOLERANCE
    batch = stack.make_kv(3, tokens)
    step = ledger.measured_peak(lambda: stack.decode(ids, batch, 2))
    assert abs(step.nbytes - ledger.decode_peak(of, tokens, element_bytes=e).nbytes) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_named_shapes_scaled_down(torch: Any, name: str) -> None:
    of = shape(name, "tiny")
    stack, n, chunk = Stack(of), 200, 64
    ids, kv = stack.ids(n), stack.make_kv(n)
    assert (
        ledger.measured_peak(lambda: stack.prefill(ids, kv)).nbytes
        == ledger.prefill_peak(of, n, element_bytes=4).nbytes
    )

    def chunked() -> None:
        for start in range(0, n, chunk):
            stack.prefill(ids[start : start + chunk], kv, start)

    found = ledger.measured_peak(chunked)
    assert found.nbytes == ledger.prefill_peak(of, n, chunk, element_bytes=4).nbytes
    assert found.tensors is not None
    assert found.tensors > 50


def test_the_measurement_sees_a_tensor_kept_too_long(torch: Any) -> None:
    """What is measured is measured: a stack that keeps one tensor more is heavier by just that."""
    of = shape("llama-3-8b", "tiny")
    stack, n = Stack(of, layers=1), 64
    ids, kv = stack.ids(n), stack.make_kv(n)
    kept: list[Any] = []
    pre = stack.layers[0].pre_attention
    stack.layers[0].pre_attention = lambda x: (kept.append(found := pre(x)), found)[1]  # type: ignore[method-assign]
    more = ledger.measured_peak(lambda: stack.prefill(ids, kv)).nbytes
    assert more - ledger.prefill_peak(of, n, element_bytes=4).nbytes == n * of.qkv * 4


def test_views_weights_and_what_was_there_before_do_not_count(torch: Any) -> None:
    old = torch.zeros(1000)

    def run() -> Any:
        view = old[10:500].view(-1)
        view.add_(1.0)
        made = view + 1.0
        same = made[3:]
        del made
        return same.mul_(2.0)

    found = ledger.measured_peak(run)
    assert (found.nbytes, found.tensors) == (490 * 4, 1)


def test_the_papers_numbers() -> None:
    """Section 1: 0.3 % at 2K to 30.8 % at 200K of an 80 GB board for MPT-30B; about 1 % or less of it in decode."""
    of = shape("mpt-30b")
    board = 80 * GiB
    assert ledger.prefill_peak(of, 2048).nbytes / board == pytest.approx(0.003, abs=0.0002)
    most = ledger.prefill_peak(of, 200 * 1024)
    assert most.nbytes / board == pytest.approx(0.308, abs=0.001)
    assert (most.step, most.nbytes) == ("activation", 200 * 1024 * 9 * 7168 * 2)
    engine = ledger.Engine(200 * 1024)
    assert engine.reserved(of) == most
    for batch in (1, 16, 64, 256):
        assert engine.decode(of, batch).nbytes / most.nbytes <= 0.01
    # in chunks of 512 the logits of 256 sequences weigh more than the prompt
    assert ledger.Engine(200 * 1024, 512).reserved(of) == ledger.decode_peak(of, 256)


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompts_are_a_line_and_chunks_a_plateau(name: str) -> None:
    of = shape(name)
    contexts = [2048 << i for i in range(8)]
    per_token = {ledger.prefill_peak(of, n).nbytes / n for n in contexts}
    assert len(per_token) == 1
    for chunk in (512, 2048):
        flat = [ledger.prefill_peak(of, n, chunk).nbytes for n in contexts]
        assert set(flat[1:]) == {flat[-1]}
        assert flat[0] <= flat[-1]
        assert flat[-1] == chunk * next(iter(per_token))
    engine = ledger.Engine(131072)
    assert engine.prefill(of, 2048).nbytes / engine.reserved(of).nbytes == pytest.approx(2048 / 131072)


def test_what_a_peak_is_made_of() -> None:
    found = ledger.peak(shape("llama-3-8b"), 10)
    assert dict(found.live) == {"residual": 81920, "up": 573440, "inner": 286720}
    assert found.nbytes == sum(found.live.values())


def test_what_is_refused() -> None:
    of = shape("opt-13b")
    with pytest.raises(UsageError, match="tokens below 1"):
        ledger.peak(of, 0)
    with pytest.raises(UsageError, match="more rows"):
        ledger.peak(of, 2, rows=3)
    with pytest.raises(UsageError, match="chunk below 0"):
        ledger.prefill_peak(of, 5, -1)
    with pytest.raises(UsageError, match="exceeds the context"):
        ledger.Engine(100).prefill(of, 101)
    with pytest.raises(UsageError, match="more sequences"):
        ledger.Engine(100, sequences=8).decode(of, 9)
