"""Entry point: the typer app, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from kvbench import __version__
from kvbench.cli import (
    commands_calibrate,
    commands_claims,
    commands_decide,
    commands_gate,
    commands_history,
    commands_replay,
    commands_report,
    commands_run,
    commands_store,
)
from kvbench.cli.output import emit, prepare_streams, say
from kvbench.errors import EXIT_NO_DATA, EXIT_SIGINT, EXIT_USAGE, KvbenchError, printable

app = typer.Typer(
    name="kvbench", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure what this machine's memory hierarchy delivers to a KV cache, and which way of offloading pays here.",
)  # fmt: skip
commands_run.register(app)
commands_store.register(app)
commands_decide.register(app)
commands_gate.register(app)
commands_calibrate.register(app)
commands_history.register(app)
commands_claims.register(app)
commands_replay.register(app)
commands_report.register(app)

# typer raises click's usage errors but has moved click inside itself; its own BadParameter leads to the base class.
_CLICK_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
COLLECT_AFTER = 50_000  # objects


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """What does the memory hierarchy of this machine really deliver to a KV cache, and which way of offloading pays?"""
    if version:
        emit(f"kvbench {__version__}")
        raise typer.Exit


def as_utf8(words: list[str]) -> list[str]:
    """Return ``words`` read as UTF-8 whatever the locale: in a plain C locale Python hands all non-ASCII bytes through
    as lone surrogates. Bytes that are not UTF-8 stay such: a path may hold them, a label is refused for them."""
    return [os.fsencode(word).decode("utf-8", "surrogateescape") if not word.isascii() else word for word in words]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; a user's mistake is one line on stderr, never a traceback."""
    prepare_streams()
    # Importing makes hundreds of thousands of objects that stay: looking for garbage among them every 700 was 13 % of a
    # short command. Workers, which measure, are processes of their own.
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    try:
        code = app(args=as_utf8(sys.argv[1:] if argv is None else argv), standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _CLICK_ERROR as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        say(f"kvbench: error: {printable(' '.join(text.split()), 500)} (kvbench --help, kvbench COMMAND --help)")
        return EXIT_USAGE
    except KvbenchError as error:
        say(f"kvbench: error: {error}")
        return error.exit_code
    except OSError as error:  # out of descriptors, a full disk under --help: the system refused, the user did not err
        say(f"kvbench: error: {printable(str(error), 300)}")
        return EXIT_NO_DATA
    except (KeyboardInterrupt, typer.Abort):
        say("kvbench: stopped")
        return EXIT_SIGINT


if __name__ == "__main__":
    sys.exit(main())
