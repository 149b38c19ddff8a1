"""The index copy users of a framework have: right on CPU tensors, and refused with a reason where there is no GPU."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest

from kvbench.errors import Unavailable
from kvbench.model.geometry import LAYOUTS
from kvbench.transport.paged import open_paged
from kvbench.transport.paged_set import granule, granules
from kvbench.transport.paged_torch import IndexCopy, require_torch, rows_of
from tests.needs import missing_module, require
from tests.transport.paged_rig import shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("element", [1, 2, 4])
def test_rows_arrive_where_the_moves_say(layout: str, fetch: bool, element: int) -> None:
    require("torch", missing_module("torch"))
    import torch

    asked = shape(layout, elements=element)
    moves = asked.moves("fetch" if fetch else "evict")
    pools = (asked.far, asked.near) if fetch else (asked.near, asked.far)
    src, dst = (np.random.default_rng(k).integers(0, 256, p.nbytes, np.uint8) for k, p in enumerate(pools))
    want = dst.copy()
    for frm, to, size in zip(moves.src_offset, moves.dst_offset, moves.bytes, strict=True):
        want[to : to + size] = src[frm : frm + size]
    piece = granule(moves)
    source, target = (rows_of(torch.from_numpy(array), piece, element) for array in (src, dst))
    assert source.element_size() == element
    IndexCopy(source, target, granules(moves, piece), torch.device("cpu"), fetch=fetch, pin=False).run()
    assert np.array_equal(dst, want)


def test_without_torch_the_case_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else found(name, *more)
    )
    with pytest.raises(Unavailable, match=r"torch is not installed; pip install 'kvbench\[torch\]'"):
        require_torch()


def test_without_a_gpu_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch", missing_module("torch"))
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a build with CUDA warns of the driver it does not find
        if torch.cuda.is_available():
            pytest.skip("torch sees a GPU here")
        asked, nothing = shape(), object()
        service: Any = nothing
        with pytest.raises(Unavailable, match="torch sees no GPU"):
            open_paged("torch", service, service, asked.moves("fetch"), "fetch", asked.near, asked.far, service, 1)
