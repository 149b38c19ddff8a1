"""Optional, tri-state readings of /proc and /sys: a value, or None with the reason.

Every reader takes ``root`` so that a test (or a copied /proc and /sys of another box) can stand in for this machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
ROOT = Path("/")
MAX_CPU = 1 << 16  # a mask beyond this is a broken file: Linux stops at 8,192
_LIST_ITEM = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """One reading from ``source``: ``value`` is None when it could not be had, and then ``reason`` says why."""

    value: T | None
    reason: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not self.reason:
            raise ValueError("a fact without a value needs a reason")


def is_live(root: Path) -> bool:
    """Return whether ``root`` is this machine: system calls may answer only then, never for a copied tree."""
    return root == ROOT


def under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def read_text(root: Path, path: str) -> Fact[str]:
    """Return the stripped content of ``path`` under ``root``; an empty file is a reading too."""
    try:
        # sysfs answers some reads with EINVAL, EIO or ENODEV: all are OSError, none is an accident
        return Fact(under(root, path).read_bytes().decode("utf-8", "replace").strip("\n \0"), source=path)
    except FileNotFoundError:
        return Fact(None, f"no {path}", path)
    except PermissionError:
        return Fact(None, f"{path} is not readable for this user", path)
    except OSError as error:
        return Fact(None, f"{path}: {error.strerror or error}", path)


def read_int(root: Path, path: str) -> Fact[int]:
    text = read_text(root, path)
    if text.value is None:
        return Fact(None, text.reason, path)
    try:
        return Fact(int(text.value, 0), source=path)
    except ValueError:
        return Fact(None, f"{path} holds {text.value[:40]!r}, not a number", path)


def read_flag(root: Path, path: str) -> Fact[bool]:
    """Return a 0/1 switch file as a bool (numa_balancing also knows 2: on)."""
    number = read_int(root, path)
    return Fact(None, number.reason, path) if number.value is None else Fact(number.value != 0, source=path)


def read_choice(root: Path, path: str) -> Fact[str]:
    """Return the bracketed word of files such as ``always [madvise] never``."""
    text = read_text(root, path)
    if text.value is None:
        return text
    match = re.search(r"\[([^\]]+)\]", text.value)
    return Fact(match[1], source=path) if match else Fact(None, f"{path} marks no choice: {text.value[:60]!r}", path)


def read_size(root: Path, path: str) -> Fact[int]:
    """Return a sysfs cache size (``32768K``, ``1M``) in bytes: there K is 1024."""
    text = read_text(root, path)
    if text.value is None:
        return Fact(None, text.reason, path)
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)B?", text.value)
    if not match or int(match[1]) == 0:  # some hypervisors report 0K: not a cache of no bytes but no answer
        return Fact(None, f"{path} holds {text.value[:40]!r}, not a size", path)
    return Fact(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]], source=path)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the sorted numbers of a kernel list (``0-3,8``). Raises ValueError on anything else."""
    numbers: set[int] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = _LIST_ITEM.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_CPU:
            raise ValueError(f"{item[:40]!r} is not a CPU or node list")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: tuple[int, ...]) -> str:
    """Return sorted ``numbers`` as the kernel writes them: ``0-3,8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read_cpu_list(root: Path, path: str) -> Fact[tuple[int, ...]]:
    text = read_text(root, path)
    if text.value is None:
        return Fact(None, text.reason, path)
    try:
        return Fact(parse_cpu_list(text.value), source=path)
    except ValueError as error:
        return Fact(None, f"{path}: {error}", path)


def read_fields(root: Path, path: str) -> dict[str, str]:
    """Return the ``Name: value`` lines of a file such as /proc/self/status; empty when there is none."""
    text = read_text(root, path).value or ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def kilobytes(text: str | None) -> int | None:
    """Return bytes of ``24684084 kB`` as /proc writes it (kB there is 1024), None for anything else."""
    match = re.fullmatch(r"([0-9]{1,15}) kB", text or "")
    return int(match[1]) * 1024 if match else None
