"""CPU quota, memory limit and throttling counters of the control group this process runs in, v1 and v2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.probe import ROOT, Fact, read_text, under

_MOUNT = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit or its known absence: ``value`` is None when nothing limits. ``source`` is the file that sets it."""

    value: float | None
    source: str = ""


def _directories(root: Path, controller: str) -> tuple[str, list[str]]:
    """Return ("v1" | "v2" | "", directories from this process's group up to the mount point, the own one first)."""
    entries = [line.split(":", 2) for line in (read_text(root, "/proc/self/cgroup").value or "").splitlines()]
    own = {names: path for _, names, path in (e for e in entries if len(e) == 3)}
    for names, path in own.items():
        if controller in names.split(","):
            # distributions mount v1 controllers singly or in pairs, with a link or without
            for folder in (names, controller, "cpu,cpuacct", "cpuacct,cpu"):
                if under(root, f"{_MOUNT}/{folder}").is_dir():
                    return "v1", _upwards(root, f"{_MOUNT}/{folder}", path)
    if "" in own:
        for mount in (_MOUNT, f"{_MOUNT}/unified"):
            if under(root, f"{mount}/cgroup.controllers").exists():
                return "v2", _upwards(root, mount, own[""])
    return "", []


def _upwards(root: Path, mount: str, path: str) -> list[str]:
    # a container may see its path as on the host while the mount already starts at its own group, or as /../..
    parts = [part for part in path.split("/") if part not in ("", "..")]
    candidates = ["/".join([mount, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return [directory for directory in candidates if under(root, directory).is_dir()]


def cpu_quota(root: Path = ROOT) -> Fact[Limit]:
    """Return the CPUs the group may use at once on average: the tightest limit on the way up to the mount."""
    version, directories = _directories(root, "cpu")
    found: list[Limit] = []
    readable = False
    for directory in directories:
        if version == "v2":
            path = f"{directory}/cpu.max"
            text = read_text(root, path).value
        else:
            path = f"{directory}/cpu.cfs_quota_us"
            quota, period = read_text(root, path).value, read_text(root, f"{directory}/cpu.cfs_period_us").value
            text = None if quota is None or period is None else f"{'max' if quota.startswith('-') else quota} {period}"
        # the root group of v2 has no cpu.max: the group above the mount is then unlimited as far as can be seen
        match = re.fullmatch(r"(max|\d{1,18}) (\d{1,18})", text or "")
        readable = readable or match is not None or (version == "v2" and text is None and directory == _MOUNT)
        if match and match[1] != "max" and int(match[2]) > 0:
            found.append(Limit(int(match[1]) / int(match[2]), path))
    if found:
        tightest = min(found, key=lambda limit: limit.value or 0.0)
        return Fact(tightest, source=tightest.source)
    if readable:
        return Fact(Limit(None), source=f"cgroup {version}")
    return Fact(None, "no readable CPU controller under /sys/fs/cgroup")


def memory_limit(root: Path = ROOT) -> Fact[Limit]:
    """Return the bytes the group may hold: the tightest limit on the way up to the mount."""
    version, directories = _directories(root, "memory")
    name = "memory.max" if version == "v2" else "memory.limit_in_bytes"
    found: list[Limit] = []
    readable = False
    for directory in directories:
        text = read_text(root, f"{directory}/{name}").value
        readable = readable or text is not None or (version == "v2" and directory == _MOUNT)
        # v1 writes "no limit" as the largest multiple of the page size, about 2**63
        if text and text.isascii() and text.isdigit() and int(text) < 2**62:
            found.append(Limit(float(int(text)), f"{directory}/{name}"))
    if found:
        tightest = min(found, key=lambda limit: limit.value or 0.0)
        return Fact(tightest, source=tightest.source)
    return Fact(Limit(None), source=f"cgroup {version}") if readable else Fact(None, "no readable memory controller")


def throttle_file(root: Path = ROOT) -> str | None:
    """Return the cpu.stat of the nearest group that counts throttling (nr_throttled), None where none does."""
    _, directories = _directories(root, "cpu")
    for directory in directories:
        path = f"{directory}/cpu.stat"
        if "nr_throttled" in (read_text(root, path).value or ""):
            return path
    return None


def container_signs(root: Path = ROOT) -> tuple[str, ...]:
    """Return what says that this is a container: marker files and group names. None of them proves the contrary."""
    signs = []
    if under(root, "/.dockerenv").exists():
        signs.append("dockerenv")
    if under(root, "/run/.containerenv").exists():
        signs.append("containerenv")
    groups = read_text(root, "/proc/self/cgroup").value or ""
    if match := re.search(r"docker|kubepods|libpod|containerd|lxc|garden|machine\.slice/.*\.scope", groups):
        signs.append(f"cgroup:{match[0].split('/')[0]}")
    return tuple(signs)
