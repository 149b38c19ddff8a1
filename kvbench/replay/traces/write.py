"""Writing traces: requests as kvbench lines, and a file of any format sorted by time, however large it is."""

from __future__ import annotations

import contextlib
import errno
import gzip
import heapq
import io
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from kvbench.errors import UsageError, printable
from kvbench.replay.request import Request
from kvbench.replay.traces.formats import Format, format_named
from kvbench.replay.traces.lines import lines
from kvbench.replay.traces.trace import format_of, rows

CHUNK_BYTES = 64 << 20  # text sorted in memory at once
MOST_PARTS = 200  # files merged at once: well below the usual limit of descriptors
Keyed = tuple[float, int, str]


@contextlib.contextmanager
def new_text(out: Path) -> Iterator[IO[str]]:
    """Open a new file for text, compressed where its name ends in .gz; it is removed if the block raises.

    Raises UsageError when it is there already, cannot be made, or its folder refuses what the block writes there.
    """
    try:
        file = out.open("xb")
    except FileExistsError:
        raise UsageError("the file is there already", where=printable(out.name), mend="name another one") from None
    except OSError as error:
        raise _refused(out, error) from None
    try:
        with file:
            if out.suffix == ".gz":
                # without a time and a name in it the same trace is the same file
                packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
                with packed, _text(packed) as text:
                    yield text
            else:
                with _text(file) as text:
                    yield text
    except OSError as error:
        out.unlink(missing_ok=True)
        raise _refused(out, error) from None
    except BaseException:
        out.unlink(missing_ok=True)
        raise


def _refused(out: Path, error: OSError) -> UsageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return UsageError(
        f"cannot be written ({error.strerror or error})",
        where=f"{printable(out.name, 80)} in {printable(str(out.absolute().parent), 200)}",
        mend="free space there, or name a file elsewhere" if full else "",
    )


@contextlib.contextmanager
def _text(raw: IO[bytes] | gzip.GzipFile) -> Iterator[IO[str]]:
    wrapped = io.TextIOWrapper(raw, encoding="utf-8", newline="\n", write_through=False)
    yield wrapped
    wrapped.flush()
    wrapped.detach()


def write_requests(out: Path, requests: Iterable[Request]) -> int:
    """Write ``requests`` as kvbench lines to the new file ``out``; return how many. They read back as they were."""
    written = 0
    with new_text(out) as file:
        for each in requests:
            file.write(line_of(each) + "\n")
            written += 1
    return written


def line_of(request: Request) -> str:
    """Return the kvbench line of ``request``; fields that are None are left out."""
    fields = {name: getattr(request, name) for name in Request.__slots__}
    return json.dumps({k: v for k, v in fields.items() if v is not None}, separators=(",", ":"), allow_nan=False)


def sorted_copy(path: Path, out: Path, format_name: str | None = None) -> int:
    """Write the rows of ``path`` to the new file ``out`` in the order of their times; return how many.

    Rows of one time keep their order, and every line stays as it is. Sorted in parts of CHUNK_BYTES beside ``out``, so
    the file may be larger than memory. Raises UsageError with the line of a row that cannot be read.
    """
    form = format_of(path) if format_name is None else format_named(format_name)
    header = next((text for _, text, _ in lines(path)), "") if form.header else ""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(new_text(out))
        parts: list[IO[str]] = []
        for chunk in _chunks(path, form):
            if len(parts) == MOST_PARTS:
                merged = _spill(stack, out, heapq.merge(*map(_read, parts)))
                for part in parts:
                    part.close()
                parts = [merged]
            parts.append(_spill(stack, out, iter(sorted(chunk))))
        if header:
            file.write(header + "\n")
        written = 0
        for _, _, text in heapq.merge(*map(_read, parts)):
            file.write(text + "\n")
            written += 1
    return written


def _chunks(path: Path, form: Format) -> Iterator[list[Keyed]]:
    texts = lines(path)
    if form.header:
        next(texts, None)
    chunk: list[Keyed] = []
    held = 0
    for (number, row), (_, text, _) in zip(rows(path, form), texts, strict=True):
        chunk.append((row.time, number, text))
        held += len(text) + 100
        if held > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _spill(stack: contextlib.ExitStack, out: Path, found: Iterator[Keyed]) -> IO[str]:
    # unlinked at once: an interrupted sort leaves nothing behind
    part = tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n", dir=out.parent)  # noqa: SIM115
    stack.enter_context(part)
    for time, number, text in found:
        part.write(f"{time!r} {number} {text}\n")
    part.seek(0)
    return part


def _read(part: IO[str]) -> Iterator[Keyed]:
    for line in part:
        time, number, text = line.rstrip("\n").split(" ", 2)
        yield float(time), int(number), text
