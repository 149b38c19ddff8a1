"""Where the files that travel with kvbench are: the copy inside an installed wheel, or the folders of a checkout."""

from __future__ import annotations

import contextlib
import os
import pwd
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


def user_home() -> Path | None:
    """Return the user's home directory: $HOME if it is absolute and exists, else the password database's, else None.

    A relative HOME would make folders wherever a command happens to run, a missing one a tree where nobody looks.
    """
    candidates = [os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError):  # a container's user often has no entry
        candidates.append(pwd.getpwuid(os.getuid()).pw_dir)
    return next((Path(home) for home in candidates if os.path.isabs(home) and os.path.isdir(home)), None)


def user_cache() -> Path | None:
    """Return kvbench's folder in the user's cache: $XDG_CACHE_HOME if absolute, else ~/.cache; None without a home."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(configured):  # the XDG specification says relative values are invalid
        return Path(configured) / "kvbench"
    home = user_home()
    return None if home is None else home / ".cache" / "kvbench"
