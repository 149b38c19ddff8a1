"""Which samples are stored: at most 1,000, each with the same chance, the same ones for the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEEP_LIMIT = 1_000


def keep(values: NDArray[np.float64], seed: int = 0, limit: int = KEEP_LIMIT) -> NDArray[np.float64]:
    """Return at most ``limit`` of ``values``, drawn without replacement, in order of taking.

    Distributed like a streaming reservoir; drawing at the end keeps random numbers out of the sampling loop, whose
    values (20,000 float64 at most) are in memory anyway.
    """
    if len(values) <= limit:
        return values.copy()
    chosen = np.random.default_rng(seed).choice(len(values), size=limit, replace=False, shuffle=False)
    chosen.sort()
    return values[chosen]
