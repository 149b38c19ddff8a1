"""The work of the benches: right numbers of bytes, ceilings on the same bytes, and no wrong step that passes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvbench.attention.cpu_work import DecodeWork, fill_numbers, layers_for, nbytes_for
from kvbench.attention.shapes import Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.timing.budget import BUDGETS
from kvbench.timing.sampler import sample

SHAPE = Shape("bf16", 8, 2, 64, 16)
LENGTHS = [100, 37, 16]


@pytest.fixture
def memory() -> HostBuffer:
    return host_buffer(nbytes_for(SHAPE, LENGTHS, 2), kind=None)


@pytest.mark.parametrize("members", [1, 2])
def test_a_step_reads_its_layers_and_is_verified(
    members: int, memory: HostBuffer, teams: Callable[[int], Team]
) -> None:
    work = DecodeWork(SHAPE, LENGTHS, 2, teams(members), memory.address)
    assert work.nbytes == memory.nbytes == 2 * 2 * 11 * SHAPE.page_bytes
    assert work.kv_bytes == 2 * 153 * SHAPE.token_bytes
    assert work.flops == 2 * 153 * 4 * 8 * 64
    with pytest.raises(VerifyError, match="nothing was run"):
        work.verify()
    assert work.run(2) > 0
    work.verify()
    detail = work.detail(1e9, 2e9, 4e9)
    assert detail["read_fraction"] == 0.25
    assert detail["bound"] in ("bandwidth", "compute")
    assert detail["work_items"] == 11
    assert work.resident_rate(1) > 0


def test_ceilings_read_the_same_pages_in_the_same_order(memory: HostBuffer, teams: Callable[[int], Team]) -> None:
    work = DecodeWork(SHAPE, LENGTHS, 2, teams(1), memory.address)
    gather = next(iter(work.gathers().values()))
    first = work._batches[0].blocks()
    assert gather.fragment == SHAPE.page_bytes
    assert gather.index[:22:2].tolist() == first.tolist()
    assert gather.index[1:22:2].tolist() == (first + 11).tolist()
    assert gather.link_bytes == work.nbytes
    for name, run, amount, verify in work.ceilings(gather):
        assert amount == work.nbytes
        run(1)
        verify()
        assert "read" in name


def test_a_kernel_that_stops_working_is_found(memory: HostBuffer, teams: Callable[[int], Team]) -> None:
    work = DecodeWork(SHAPE, LENGTHS, 2, teams(1), memory.address)
    work.run()
    work.verify()
    work.steps[1].run = lambda: 1.0  # type: ignore[method-assign]
    work.run()
    with pytest.raises(VerifyError, match="not written"):
        work.verify()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_another_table_is_found(seed: int, memory: HostBuffer, teams: Callable[[int], Team]) -> None:
    work = DecodeWork(SHAPE, LENGTHS, 2, teams(1), memory.address, seed=seed)
    for layer, drawn in enumerate(work._batches):
        swapped = drawn.table.copy()
        swapped[:, 0] = np.roll(swapped[:, 0], 1)
        work._batches[layer] = replace(drawn, table=swapped)
    work.run()
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.verify()


def test_one_value_of_a_wrong_head_is_found(memory: HostBuffer, teams: Callable[[int], Team]) -> None:
    work = DecodeWork(SHAPE, LENGTHS, 1, teams(1), memory.address)
    work.run()
    for step in work.steps:
        step.out += np.float32(0.01)
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.verify()


def test_dense_forms_read_the_same_memory(teams: Callable[[int], Team]) -> None:
    lengths = [48, 48]
    memory = host_buffer(nbytes_for(SHAPE, lengths, 2), kind=None)
    work = DecodeWork(SHAPE, lengths, 2, teams(1), memory.address)
    dense = work.dense("numpy", 1)
    assert dense.kv_bytes == work.kv_bytes
    assert dense.layers[1][1].ctypes.data == memory.address + 3 * work.nbytes // 4
    dense.run()
    dense.verify()
    with pytest.raises(UsageError, match="ragged lengths"):
        DecodeWork(SHAPE, [48, 40], 1, teams(1), memory.address).dense("numpy", 1)


@pytest.mark.parametrize(("dtype", "item"), [("fp32", np.float32), ("fp16", np.float16), ("bf16", np.uint16)])
def test_numbers_are_finite_and_of_both_signs(dtype: str, item: type) -> None:
    raw = np.zeros(1 << 14, np.uint8)
    fill_numbers(raw, dtype, 3)
    values = Shape(dtype, 1, 1, 64, 8).floats(raw.view(item))  # type: ignore[arg-type]
    assert np.abs(values).min() >= 0.5
    assert np.abs(values).max() < 2.0
    assert abs(float(np.sign(values).mean())) < 0.1


def test_layers_are_enough_to_leave_the_caches(teams: Callable[[int], Team]) -> None:
    assert layers_for(SHAPE, [16], 1) == 1
    assert layers_for(SHAPE, [16, 17], 10 * 2 * SHAPE.page_bytes) == 4
    with pytest.raises(UsageError, match="without a token"):
        DecodeWork(SHAPE, [0], 1, teams(1), 0)


def test_a_busy_neighbour_marks_the_samples(memory: HostBuffer) -> None:
    """A number taken while another program had the core must say so (design 6.6)."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print('go', flush=True)\nwhile True: pass"
    with Team([cpu]) as team:
        work = DecodeWork(SHAPE, LENGTHS, 2, team, memory.address)
        busy = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None
            busy.stdout.readline()
            taken = sample(lambda reps: work.run(300 * reps), BUDGETS["smoke"], tids=team.tids)
        finally:
            busy.kill()
            busy.wait()
            if busy.stdout is not None:
                busy.stdout.close()
    assert taken.gated + taken.marked > 0
