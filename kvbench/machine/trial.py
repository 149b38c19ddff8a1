"""Obstacles that only show when something is tried: binding a page, writing the cache, finding a compiler, watching.

All of them need this machine; nothing here can be asked of a copied tree.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvbench.machine import state
from kvbench.machine.obstacles import Finding, Obstacle, Unchecked
from kvbench.machine.probe import ROOT, read_text
from kvbench.machine.topology import Topology

WATCH_SECONDS = 0.2  # 20 ticks a CPU: a tenth of a CPU shows
SIBLING_BUSY = 0.2  # of a CPU; below that it is timers and daemons
FOREIGN_BUSY = 0.25  # CPUs; more than the marks of a window, because a passing daemon is no obstacle

# Under a seccomp filter that kills instead of refusing, the caller dies: so a child tries it, on one page.
_MBIND = """
import ctypes, mmap, os, sys
number = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259}.get(os.uname().machine)
if number is None:
    sys.exit("no mbind system call number known for " + os.uname().machine)
page = mmap.mmap(-1, mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
node = int(sys.argv[1])
mask = (ctypes.c_ulong * 16)()
mask[node // 64] = 1 << node % 64
libc = ctypes.CDLL(None, use_errno=True)
bind = 2
arguments = (ctypes.c_void_p(address), ctypes.c_ulong(mmap.PAGESIZE), ctypes.c_int(bind), mask, ctypes.c_ulong(1024),
             ctypes.c_uint(0))
if libc.syscall(ctypes.c_long(number), *arguments) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""


def mbind(topology: Topology, python: str = sys.executable) -> Finding:
    """Try to bind one page to the first node with CPUs and memory, in a child process."""
    node = next((n.id for n in topology.nodes if not n.cpuless), 0)
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _MBIND, str(node)], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unchecked("mbind", f"the child that tries it did not run: {error}")
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        why = f"the process that tried was killed by {signal.Signals(-done.returncode).name}"
    else:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1][:120]
    if why.startswith("no mbind"):
        return Unchecked("mbind", why)
    return Obstacle(
        "mbind", "limits", f"binding memory to node {node} is refused: {why}",
        "dram@N cannot be placed: pages come from where the kernel likes and cases are flagged or skipped",
        "docker run --cap-add SYS_NICE (its default filter refuses mbind), or run outside the container",
    )  # fmt: skip


def cache_directory(directory: Path) -> Finding:
    """``directory``: where compiled kernels are kept. It is made if it is missing, as a run would."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:  # on a full or read-only file system this is what fails
            file.write(b"kvbench")
            file.flush()
    except OSError as error:
        return Obstacle(
            "cache_directory", "limits", f"{directory} cannot be written: {error.strerror or error}",
            "every run compiles its kernels again, minutes on a small machine",
            "export XDG_CACHE_HOME=/a/writable/directory",
        )  # fmt: skip
    return None


def c_compiler() -> Finding:
    try:
        wanted = shlex.split(os.environ.get("CC", ""))[:1]
    except ValueError:
        wanted = []
    if any(shutil.which(name) for name in (*wanted, "cc", "gcc", "clang")):
        return None
    return Obstacle(
        "c_compiler", "limits", "no C compiler (cc, gcc, clang, $CC)",
        "scripts/crosscheck cannot run and Triton cannot build its launcher; the host suites need none",
        "sudo apt-get install gcc libc6-dev (Fedora: sudo dnf install gcc)",
    )  # fmt: skip


def busy_fractions(before: str, after: str, seconds: float) -> dict[int, float]:
    """Return how busy each CPU was between two texts of /proc/stat, 0 to about 1."""

    def busy(text: str) -> dict[int, int]:
        found = {}
        for line in text.splitlines():
            name, *fields = line.split() or [""]
            if name.startswith("cpu") and name[3:].isdigit() and len(fields) >= 7 and all(f.isdigit() for f in fields):
                numbers = [int(field) for field in fields]
                found[int(name[3:])] = numbers[0] + numbers[1] + numbers[2] + numbers[5] + numbers[6]
        return found

    first, last = busy(before), busy(after)
    ticks = os.sysconf("SC_CLK_TCK")
    return {cpu: (last[cpu] - first[cpu]) / ticks / seconds for cpu in first if cpu in last}


def busy_siblings(topology: Topology, busy: dict[int, float]) -> Finding:
    """Name CPUs outside the measuring ones that share a core with one of them and are at work."""
    if topology.threads_per_core < 2:
        return None
    measuring = set(topology.measuring_cpus("all"))
    hit = sorted(
        sibling
        for cpu in topology.cpus
        if cpu.id in measuring
        for sibling in cpu.siblings
        if sibling not in measuring and busy.get(sibling, 0.0) > SIBLING_BUSY
    )
    if not hit:
        return None
    return Obstacle(
        "smt_siblings", "distorts", f"CPU {', '.join(map(str, hit[:8]))}, sibling of a measuring CPU, is busy",
        "a core's caches and load ports are shared with it: one thread reads as half a core",
        "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head, and stop or move (taskset) what is there",
    )  # fmt: skip


def foreign_load(delta: state.StateDelta) -> Finding:
    if delta.foreign_cpus is None:
        return Unchecked("foreign_load", "no per-CPU times in /proc/stat")
    if delta.foreign_cpus <= FOREIGN_BUSY and "steal" not in delta.marks:
        return None
    stolen = f", the hypervisor takes {100 * delta.steal:.0f} %" if delta.steal and "steal" in delta.marks else ""
    return Obstacle(
        "foreign_load", "distorts", f"other processes keep {delta.foreign_cpus:.1f} CPUs busy now{stolen}",
        "samples are rejected or marked, and cases end tainted",
        "ps -eo pid,pcpu,comm --sort=-pcpu | head, and stop what is there (steal: ask for dedicated CPUs)",
    )  # fmt: skip


def watch(topology: Topology, seconds: float = WATCH_SECONDS, root: Path = ROOT) -> list[Obstacle | Unchecked]:
    """Stay idle for ``seconds`` and return what other processes did meanwhile."""
    with state.StateProbe(root, topology.affinity) as probe:
        before, text = probe.snapshot(), read_text(root, "/proc/stat").value or ""
        time.sleep(seconds)
        after, later = probe.snapshot(), read_text(root, "/proc/stat").value or ""
    delta = state.delta(before, after)
    findings = (foreign_load(delta), busy_siblings(topology, busy_fractions(text, later, delta.wall)))
    return [finding for finding in findings if finding is not None]
