"""alpha, beta and n-half of the same curve on two sides."""

from __future__ import annotations

import pytest

from kvbench.analysis.shapes import shapes
from kvbench.contract.result import Bytes, Result
from tests.analysis.sides import row, side

SIZES = [4096 << (2 * i) for i in range(8)]


def curve(alpha: float, beta: float) -> list[Result]:
    rows = []
    for size in SIZES:
        seconds = alpha + size / beta
        axes: dict[str, str | int | float | bool | None] = {"bytes": size, "op": "copy"}
        rows.append(
            row(
                0,
                size / seconds,
                axes=axes,
                seconds=seconds,
                rate_of="link",
                bytes=Bytes(link=size),
                digest=f"{size:064x}",
            )
        )
    return rows


def test_the_parameters_of_both_sides_and_their_ratio() -> None:
    found = shapes(side("a", [curve(3e-6, 50e9)] * 5), side("b", [curve(6e-6, 400e9)] * 5, hw_class="other"))
    by_name = {shape.parameter: shape for shape in found}
    assert by_name["alpha"].a == pytest.approx(3e-6, rel=0.02)
    assert by_name["beta"].b == pytest.approx(400e9, rel=0.02)
    half = by_name["n_half"].effect
    assert half is not None
    assert half.ratio == pytest.approx(16.0, rel=0.05)


def test_a_curve_no_law_fits_has_no_parameters_and_says_why() -> None:
    broken = curve(3e-6, 50e9)
    broken[4] = broken[4].with_(seconds=(broken[4].seconds or 0.0) * 20)
    found = shapes(side("a", [curve(3e-6, 50e9)]), side("b", [broken]))
    assert all(shape.b is None and shape.effect is None and shape.reason for shape in found)


def test_curves_of_one_side_only_are_left_out() -> None:
    assert shapes(side("a", [curve(3e-6, 50e9)]), side("b", [curve(3e-6, 50e9)[:2]])) == []
