"""Which host, boot and process this is, and whether another recorded process of this host still lives."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.probe import ROOT, is_live, read_text, under

# PROC_PID_INIT_INO of include/linux/proc_ns.h: the pid namespace of the machine itself
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Identity:
    """Where a run comes from, as the store keeps it.

    ``pid_start`` is in clock ticks since boot, as text, empty where /proc does not tell; ``git`` is the label of
    :class:`GitState`, None outside a checkout.
    """

    host: str
    boot_id: str
    pid: int
    pid_start: str
    git: str | None


@dataclass(frozen=True, slots=True)
class GitState:
    """Revision of the checkout kvbench runs from; ``dirty`` when code or suites differ from it. None: unknown."""

    revision: str | None
    dirty: bool | None
    reason: str = ""

    @property
    def label(self) -> str | None:
        """``<revision>`` or ``<revision>-dirty``; None outside a checkout."""
        return None if self.revision is None else f"{self.revision}{'-dirty' if self.dirty else ''}"


def host_name(root: Path = ROOT) -> str:
    """Return the host's name plus six hex digits of its machine id: two boxes called ``localhost`` stay two hosts."""
    name = read_text(root, "/proc/sys/kernel/hostname").value or (socket.gethostname() if is_live(root) else "unknown")
    machine_id = read_text(root, "/etc/machine-id").value
    # hashed: machine-id(5) asks applications not to expose it as it is
    return f"{name}-{hashlib.sha256(machine_id.encode()).hexdigest()[:6]}" if machine_id else name


def boot_id(root: Path = ROOT) -> str:
    """Return the kernel's boot id, with the pid namespace behind it where that is not the machine's own.

    Containers of one host share the boot id but not the pids: without it a run in one would look dead from another.
    Empty where the kernel does not tell.
    """
    boot = read_text(root, "/proc/sys/kernel/random/boot_id").value or ""
    try:
        namespace = os.readlink(under(root, "/proc/self/ns/pid"))
    except OSError:
        return boot
    return boot if namespace == _INITIAL_PID_NAMESPACE else f"{boot}/{namespace}"


def _stat(root: Path, pid: int) -> tuple[str, str] | None:
    """Return (state, start time) of ``pid``; None when there is no such process."""
    text = read_text(root, f"/proc/{pid}/stat").value
    if not text:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and parentheses; fields go on behind it
    return (fields[0], fields[19]) if len(fields) > 19 else None


def process_start(pid: int | None = None, root: Path = ROOT) -> str:
    """Return field 22 of /proc/PID/stat (clock ticks since boot); empty when it cannot be read."""
    found = _stat(root, os.getpid() if pid is None else pid)
    return found[1] if found else ""


def identity(root: Path = ROOT) -> Identity:
    """Return the identity of the calling process and of the code it runs."""
    pid = os.getpid()
    return Identity(host_name(root), boot_id(root), pid, process_start(pid, root), git_state().label)


def process_alive(boot: str, pid: int, start: str, root: Path = ROOT) -> bool:
    """Return whether the process recorded on **this host** still runs.

    False only on evidence: another boot, no such pid, a zombie, or a pid that was given to somebody else since.
    A process of another pid namespace of this boot cannot be seen from here and counts as alive. Whether the record is
    of this host is the caller's question (:func:`host_name`).
    """
    here = boot_id(root)
    if boot != here:
        return bool(boot) and boot.split("/")[0] == here.split("/")[0]
    found = _stat(root, pid)
    if found is None:  # gone, or /proc is missing or mounted with hidepid
        return is_live(root) and _signalable(pid)
    state, started = found
    return state not in ("Z", "X", "x") and (not start or started == start)


def _signalable(pid: int) -> bool:
    """Whether a pid exists, where /proc does not show it."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def git_state(checkout: Path = _PACKAGE.parent) -> GitState:
    """Return revision and dirty flag of ``checkout``, which must itself be the top of a work tree.

    An installed kvbench may lie inside somebody else's repository (a .venv there): that revision is not ours. Read once
    per process; takes one or two ``git`` calls.
    """
    if not ((checkout / ".git").exists() and (checkout / "kvbench").is_dir()):
        return GitState(None, None, "not a checkout")
    revision = _git(checkout, "rev-parse", "HEAD")
    if revision is None:
        return GitState(None, None, "git is missing, refuses this checkout, or it has no commit")
    changes = _git(checkout, "status", "--porcelain", "--", "kvbench", "suites")
    return GitState(revision, None if changes is None else bool(changes))


def _git(checkout: Path, *arguments: str) -> str | None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    # no lock and no monitor: asking for the revision must not write into the checkout or start a daemon there
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
