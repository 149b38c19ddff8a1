"""Self-tests of known wrong-number traps (``kvbench doctor --traps``; docs/traps.md lists them).

A wrong number rarely looks wrong. Each trap drives the code that measures, not a copy of it, into a known way of being
wrong and compares two numbers that then part. Tests inject each fault and see the same trap fail. Traps of a GPU or of
several NUMA nodes are `not applicable` without them; what they conclude from their numbers is tested everywhere.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys

from kvbench.errors import KvbenchError


def run(*, json: bool = False) -> int:
    """Run every trap: progress on stderr, the list (or the ``kvbench.traps/1`` document) on stdout.

    Returns 0 when none fails and at least one passes, else 3. Takes about 15 s without a GPU, and memory of
    eight last-level caches. Raises KvbenchError when stdout cannot be written.
    """
    from kvbench.timing.traps.catalogue import TRAPS, examine, exit_code, render_text, to_document

    results = []
    for done, trap in enumerate(TRAPS, 1):
        results.append(examine(trap))
        if results[-1].verdict != "not applicable":
            _tell(f"trap {done}/{len(TRAPS)} {trap.id} {results[-1].verdict} ({results[-1].seconds:.1f} s)")
    _print(jsonlib.dumps(to_document(results), allow_nan=False, indent=1) if json else render_text(results))
    return exit_code(results)


def _tell(line: str) -> None:
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # nobody listens any more; the answer matters more


def _print(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # what is left in the buffer would be tried again, and fail again, when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise KvbenchError("the output could not be written", where="stdout", got=error.strerror or "") from error
