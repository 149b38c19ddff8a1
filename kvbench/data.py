"""Where the files that travel with kvbench are: the copy inside an installed wheel, or the folders of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvbench.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def root(name: Literal["suites", "results"]) -> Path:
    """Return the folder ``name``. Raises UsageError when this installation carries neither copy.

    The wheel's copy comes first: next to an installed package a folder called ``suites`` may belong to anybody.
    """
    if name not in ("suites", "results"):
        raise ValueError(f"no data folder is called {name!r}, expected suites or results")
    shipped, checkout = _PACKAGE / "_data" / name, _PACKAGE.parent / name
    if shipped.is_dir():
        return shipped
    # site-packages/suites is not ours: a checkout is told by its pyproject.toml beside the package
    if checkout.is_dir() and (_PACKAGE.parent / "pyproject.toml").is_file():
        return checkout
    raise UsageError(
        f"the {name} folder is missing",
        where=str(_PACKAGE),
        expected=f"{shipped} (wheel) or {checkout} (checkout)",
        mend="reinstall kvbench, or restore the folder in the checkout",
    )
