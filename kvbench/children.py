"""Starting a module of this kvbench in a process of its own, and ending with the one that started it.

``python -m`` puts the current folder before everything else: started from a checkout, a child would load that checkout
while its parent is an installed version, and the numbers of one would stand under the name of the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); name = sys.argv[2]; del sys.argv[1:3]; "
    "runpy.run_module(name, run_name='__main__', alter_sys=True)"
)


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs ``module`` with ``words``, its modules found where this process finds them."""
    paths = [os.path.abspath(path) for path in sys.path]  # '' is the current folder of now
    return [sys.executable, "-P", "-c", _BOOT, json.dumps(paths), module, *words]


def signal_with_parent(number: signal.Signals) -> None:
    """In a child: ask the kernel to send ``number`` when its parent ends; where there is no such call, nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
