"""What a test may need and a machine may lack: a skip with the reason, or a failure where KVBENCH_REQUIRE names it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest


def required() -> frozenset[str]:
    """Return the names in ``KVBENCH_REQUIRE`` (comma list): what this machine is known to have."""
    return frozenset(filter(None, (word.strip() for word in os.environ.get("KVBENCH_REQUIRE", "").split(","))))


def require(name: str, reason: str | None) -> None:
    """Go on when ``reason`` is None; else skip the test with it, or fail when ``KVBENCH_REQUIRE`` names ``name``.

    A skip is how a check dies unseen: CI installs ``name`` and says so, and then its absence is a fault.
    """
    if reason is None:
        return
    if name in required():
        pytest.fail(f"KVBENCH_REQUIRE names {name}, but {reason}", pytrace=False)
    pytest.skip(reason)


def missing_gpu() -> str | None:
    """Return why no NVIDIA GPU can be used, None when driver and device are there."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1 does not load)"
    # Images built for GPUs carry libcuda on machines without one.
    if not any(re.fullmatch(r"nvidia[0-9]+|dxg", node.name) for node in Path("/dev").iterdir()):
        return "no NVIDIA device in /dev"
    return None


def missing_numa(nodes: Path = Path("/sys/devices/system/node")) -> str | None:
    """Return why nothing can be placed on another node, None with two nodes that have memory."""
    try:
        listed = (nodes / "has_memory").read_text(encoding="ascii").strip()
    except OSError as error:
        return f"NUMA nodes unknown: {error.strerror}"
    return None if re.search("[-,]", listed) else f"one NUMA node with memory ({listed or 'none'})"


def missing_hugepages(meminfo: Path = Path("/proc/meminfo")) -> str | None:
    """Return why no reserved huge page can be taken, None when one is free."""
    try:
        found = re.search(r"^HugePages_Free:\s+([0-9]+)", meminfo.read_text(encoding="ascii"), re.MULTILINE)
    except OSError as error:
        return f"huge pages unknown: {error.strerror}"
    free = int(found[1]) if found else 0
    return None if free else "no reserved huge page is free (sysctl vm.nr_hugepages=64)"


def missing_postgres() -> str | None:
    """Return why there is no PostgreSQL server to test on, None when ``KVBENCH_TEST_POSTGRES`` names one."""
    return None if os.environ.get("KVBENCH_TEST_POSTGRES") else "KVBENCH_TEST_POSTGRES names no server"


def missing_gcc() -> str | None:
    """Return why no C can be compiled, None when a compiler is on the PATH."""
    return None if any(map(shutil.which, ("gcc", "cc", "clang"))) else "no C compiler (gcc, cc, clang)"


def missing_module(name: str) -> str | None:
    """Return why module ``name`` cannot be imported, None when it is installed (it is not imported)."""
    return None if importlib.util.find_spec(name) else f"the package {name} is not installed"


MARKERS = {"gpu": missing_gpu, "numa": missing_numa, "hugepages": missing_hugepages, "postgres": missing_postgres}
