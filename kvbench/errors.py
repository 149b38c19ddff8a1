"""Errors that reach a user: one line (what, where, got, expected, how to mend) and an exit code."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_OK = 0
EXIT_REGRESSION = 1
EXIT_USAGE = 2
EXIT_NO_DATA = 3
EXIT_INCONCLUSIVE = 4
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


def printable(text: str, limit: int = 200) -> str:
    """Return ``text`` on one line with control characters escaped and at most ``limit`` characters.

    Messages carry what a user or a foreign file gave us: terminal escapes in it must not reach the terminal.
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return how to mend a word that is none of ``known``: the one it is nearest to, or ``otherwise``."""
    from difflib import get_close_matches  # only a mistake pays for it

    near = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else otherwise


class KvbenchError(Exception):
    """A failure the user can act on.

    ``what`` went wrong, ``where`` it was found, what was ``got``, what was ``expected`` and how to ``mend`` it;
    parts left out do not appear. ``str()`` is always a single line.
    """

    exit_code = EXIT_NO_DATA

    def __init__(self, what: str, *, where: str = "", got: object = None, expected: str = "", mend: str = "") -> None:
        self.what, self.where, self.got, self.expected, self.mend = what, where, got, expected, mend
        parts = [printable(f"{where}: {what}" if where else what, 400)]
        if got is not None:
            parts.append(f"got {printable(repr(got) if isinstance(got, str) else str(got))}")
        if expected:
            parts.append(f"expected {printable(expected, 400)}")
        line = ", ".join(parts)
        super().__init__(f"{line}; {printable(mend, 400)}" if mend else line)


class UsageError(KvbenchError):
    """The command line, a selector or the database it names cannot be used as given (exit 2)."""

    exit_code = EXIT_USAGE


class MissingExtra(UsageError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs the package {package}", mend=f"pip install 'kvbench[{extra}]'")


class NoData(KvbenchError):
    """Nothing was measured or nothing matched: never success (exit 3)."""

    exit_code = EXIT_NO_DATA


class Unavailable(KvbenchError):
    """This machine cannot do what a case asks (memory, tier, permission): the case becomes a ``skipped`` row."""


class StoreError(KvbenchError):
    """The database refused a write for a reason outside the request (disk full, I/O error)."""


class VerifyError(KvbenchError):
    """The payload check after the timed region failed: the case keeps no number (design 6.7)."""
