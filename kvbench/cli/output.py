"""Where words go: results on stdout, everything else on stderr, and neither may take a measurement down with it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from typing import Any, TextIO

from kvbench.errors import KvbenchError
from kvbench.report.text import unicode_ok


class OutputLost(KvbenchError):
    """stdout refused the result (full disk, I/O error). A reader that went away (``| head``) is not an error."""


def prepare_streams() -> None:
    """Make both streams survive any locale and being closed: what cannot be shown is escaped or dropped, no traceback.

    A closed descriptor 0, 1 or 2 is opened on the null device: the next pipe would get its number, and a child's
    messages would land in it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Write one line to stderr; a closed or full stderr is ignored, because the measurement matters more."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        _detach(sys.stderr)


def fitted(line: str, indent: str = "") -> list[str]:
    """Return ``line`` folded at the width of the terminal, what goes on below moved in by ``indent`` and its own.

    Off a terminal it stays whole: a file or a pager has no width.
    """
    if not sys.stdout.isatty():
        return [line]
    width = max(20, shutil.get_terminal_size().columns)
    own = line[: len(line) - len(line.lstrip())]
    below = own + indent
    folded = textwrap.wrap(
        line.strip(), width, initial_indent=own, subsequent_indent=below if len(below) < width // 2 else "",
        break_on_hyphens=False,
    )  # fmt: skip
    return folded or [""]


def emit(text: str) -> None:
    """Write a result to stdout, whole. Raises OutputLost when it cannot be written; a closed pipe ends it silently."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _detach(sys.stdout)
    except OSError as error:
        _detach(sys.stdout)
        raise OutputLost("the output could not be written", where="stdout", got=os.strerror(error.errno or 0)) from None


def emit_json(document: dict[str, Any]) -> None:
    """Write one strict JSON document to stdout."""
    emit(json.dumps(document, allow_nan=False, indent=1, ensure_ascii=not unicode_ok(sys.stdout)))


def _detach(stream: TextIO) -> None:
    """Point the stream's descriptor at the null device, so the interpreter's last flush cannot fail as well."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        return
