"""Both sides together: passes, what their stages take alone, and the forecast made of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvbench.attention.shapes import Shape
from kvbench.errors import VerifyError
from kvbench.kernels.team import Team
from kvbench.memory.host import host_buffer
from kvbench.model.layers import LayerShape
from kvbench.systems.neo.far import FarSide, far_bytes
from kvbench.systems.neo.hide import plan
from kvbench.systems.neo.near import RATES
from kvbench.systems.neo.rig import PacedRig, Taken, medians
from kvbench.systems.neo.schedule import Batch, Timeline, timeline
from tests.systems.neo.rigs import Clocked

OF = LayerShape("test", 128, 2, 4, 2, 64, 192, True, "rms", 64, "none")
KV = Shape("bf16", OF.heads, OF.kv_heads, OF.head_dim, 16)
WORK, CONTEXT, LAYERS = Batch(prefill=5, gpu=3, cpu=4), 20, 2


@pytest.fixture
def rig() -> Iterator[PacedRig]:
    nbytes = far_bytes(KV, WORK.cpu, CONTEXT, LAYERS)
    with Team([min(os.sched_getaffinity(0))]) as team, host_buffer(nbytes, "4k", kind=None) as buffer:
        far = FarSide(KV, WORK.cpu, CONTEXT, LAYERS, team, buffer.address)
        made = PacedRig(OF, CONTEXT, far, Clocked, RATES["T4"], None)
        with made.paced:
            yield made


@pytest.mark.parametrize("mode", ["gpu_only", "simple", "symmetric", "asymmetric"])
def test_a_run_keeps_what_was_observed_and_what_was_told(rig: PacedRig, mode: str) -> None:
    rig.use(plan(mode, LAYERS, WORK, rig.cost))
    rig.prepare()
    assert (rig.launch > 0.0) == (mode != "gpu_only")
    seconds = rig.run(2)
    assert len(rig.taken) == 2
    assert seconds == sum(t.line.total for t in rig.taken)
    for taken in rig.taken:
        assert set(taken.line.spans) == {stage.name for stage in rig.order.stages}
        assert set(taken.alone) == {f"{stage.kind}{stage.batch}" for stage in rig.order.stages}
        assert taken.told.total > 0.0
        assert taken.line.total >= taken.lane_alone("near")
    near = medians(rig.taken, ["pr0", "po0"])
    assert near["pr0"] == pytest.approx(rig.cost("pr", rig.order.batches[0]), abs=2e-9)
    rig.verify()


def test_an_attention_that_does_nothing_fails_the_verification(rig: PacedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.use(plan("asymmetric", LAYERS, WORK, rig.cost))
    assert rig.far is not None
    rig.far.poison()
    monkeypatch.setattr(rig.far, "attend", lambda batch, layer: None)
    with pytest.raises(VerifyError, match=r"got .NaN"):
        rig.verify()


def test_overlap_is_the_share_of_the_shorter_side() -> None:
    def taken(total: float) -> Taken:
        line = timeline({"pr0[0]": (0.0, 4.0), "ca0[0]": (0.0, 2.0)})
        return Taken(Timeline(total, line.busy, line.spans), {"pr0": 4.0, "ca0": 2.0}, line, 0.0)

    assert [taken(total).overlap(total) for total in (4.0, 5.0, 6.0)] == [1.0, 0.5, 0.0]
