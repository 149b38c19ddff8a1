"""The copy that takes near bandwidth: slices, proof, and the number of blocks for a rate."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvbench.errors import Unavailable, VerifyError
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.systems.directkv.gpu_near_copy import L2_MULTIPLE, MOST_SLICES, NearCopy, blocks_for
from tests.suites.gpu_rig import IMAGE, SMALL, device


@pytest.mark.parametrize("asked", [1, 1000, 1 << 16, 3 << 20])
def test_slices_hold_more_than_the_l2_and_are_proven_all(asked: int) -> None:
    with device() as (_, service), ExitStack() as stack:
        kernels = Kernels(service.device, lambda source, arch: IMAGE, stack)
        copy = NearCopy(service, kernels, stack.enter_context, asked, 3)
        assert copy.slice_bytes >= asked
        assert copy.slice_bytes % 16 == 0
        assert len(copy.slices) * copy.slice_bytes >= L2_MULTIPLE * SMALL["l2_bytes"]
        assert len(copy.slices) <= MOST_SLICES
        stream = stack.enter_context(Stream(service.device))
        copy.use(2)
        assert "2 x" in copy.slices[-1].kernel
        for each in copy.slices[1:]:
            each.submit(stream)
        stream.synchronize()
        with pytest.raises(VerifyError, match="did not arrive"):
            copy.check()
        copy.slices[0].submit(stream)
        stream.synchronize()
        copy.check()
        copy.spoil()
        with pytest.raises(VerifyError, match="did not arrive"):
            copy.check()


@pytest.mark.parametrize(("wanted", "blocks"), [(10.0, 1), (54.0, 5), (56.0, 6), (300.0, 30), (320.0, 30)])
def test_the_blocks_nearest_to_a_rate(wanted: float, blocks: int) -> None:
    """Ten a block until thirty of them fill the memory."""
    asked: list[int] = []

    def rate_of(count: int) -> float:
        asked.append(count)
        return 10.0 * min(30, count)

    found, rate = blocks_for(wanted, rate_of, 500)
    assert (found, rate) == (blocks, 10.0 * blocks)
    assert len(set(asked)) == len(asked) <= 13


@pytest.mark.parametrize(("wanted", "most"), [(2.0, 500), (400.0, 500), (300.0, 5), (2.0, 1)])
def test_a_rate_that_no_number_of_blocks_has_is_refused_with_the_nearest(wanted: float, most: int) -> None:
    with pytest.raises(Unavailable, match=r"no number of blocks copies at that rate.*another share"):
        blocks_for(wanted, lambda count: 10.0 * min(30, count), most)
