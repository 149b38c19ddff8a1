"""The places bytes can live, by name: parsing ``dram@1`` and ``hbm:pinned``, and which of them this machine has.

Imports only the standard library at load: suite files and the command line parse pairs before anything is measured.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.errors import Unavailable, UsageError, nearest
from kvbench.machine.probe import ROOT, Fact

Probe = Callable[[], Fact[bool]]
GPU_TIERS = ("hbm", "pinned", "pageable", "managed")
MAX_NODE = 1023


@dataclass(frozen=True, slots=True)
class Tier:
    """A place bytes can live. ``node`` is the NUMA node of ``dram@N``; None leaves it to the kernel."""

    name: str
    node: int | None = None
    description: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.name if self.node is None else f"{self.name}@{self.node}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A near and a far tier: ``fetch`` moves bytes from far to near, ``evict`` from near to far."""

    near: Tier
    far: Tier

    def __str__(self) -> str:
        return f"{self.near}:{self.far}"


@dataclass(frozen=True, slots=True)
class TierState:
    """Whether this machine has a tier: True, False or None (unknown), the last two with the reason."""

    tier: Tier
    available: bool | None
    reason: str = ""


_DESCRIPTIONS = {
    "hbm": "GPU memory",
    "pinned": "page-locked host memory a GPU reads directly",
    "pageable": "ordinary host memory as a GPU sees it",
    "managed": "unified memory that migrates between host and GPU",
    "dram": "host memory",
    "file": "a scratch file, read with O_DIRECT, pread or mmap",
}
_registered: dict[str, tuple[str, Probe]] = {}


def register_tier(name: str, description: str, probe: Probe) -> None:
    """Add a tier of a third party. ``probe`` returns ``Fact(True)``, or False or None with the reason.

    Registering the same name again replaces it. Raises UsageError for a built-in name or one not ``[a-z][a-z0-9_]*``.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in _DESCRIPTIONS:
        raise UsageError("cannot register this tier", where="register_tier", got=name,
                         expected="a new name of lower-case letters, digits and _")  # fmt: skip
    _registered[name] = (description, probe)


def tier_names() -> tuple[str, ...]:
    """Return every legal tier name, built-in ones first."""
    return (*_DESCRIPTIONS, *sorted(_registered))


def _description(name: str) -> str:
    return _DESCRIPTIONS[name] if name in _DESCRIPTIONS else _registered[name][0]


def parse_tier(text: str, where: str = "tier") -> Tier:
    """Return the tier ``text`` names, ``dram@1`` being memory of NUMA node 1; else UsageError with what is legal."""
    name, at, number = text.partition("@")
    if name not in tier_names():
        raise UsageError("unknown tier", where=where, got=text,
                         expected=f"one of {', '.join(tier_names())}, or dram@NODE",
                         mend=nearest(name, tier_names()))  # fmt: skip
    if not at:
        return Tier(name, None, _description(name))
    if name != "dram" or not re.fullmatch(r"[0-9]{1,4}", number) or int(number) > MAX_NODE:
        raise UsageError(
            "unknown tier", where=where, got=text, expected="@NODE only after dram, NODE a number such as dram@1"
        )
    return Tier(name, int(number), f"{_description(name)} of NUMA node {int(number)}")


def parse_pair(text: str, where: str = "pair") -> Pair:
    """Return the pair ``near:far`` names. Raises UsageError listing what is legal."""
    parts = text.split(":")
    if len(parts) != 2:
        raise UsageError("not a pair of tiers", where=where, got=text,
                         expected=f"NEAR:FAR such as dram:file, each one of {', '.join(tier_names())} or dram@NODE"
                         )  # fmt: skip
    near, far = (parse_tier(part, where) for part in parts)
    if near.name == "file":
        raise UsageError(
            "a file cannot be the near tier",
            where=where,
            got=text,
            expected=f"{far}:file" if far.name != "file" else "dram:file",
        )
    return Pair(near, far)


def gpu_present() -> Fact[bool]:
    """Return whether an NVIDIA GPU can be used, without creating a CUDA context (a later fork would inherit it)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Fact(False, "no NVIDIA driver found (libcuda.so.1 does not load)")
    try:
        import pynvml
    except ImportError:
        return Fact(None, "nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return Fact(None, f"NVML: {error}")
    return Fact(True) if count else Fact(False, "the NVIDIA driver lists no GPU")


def _dram(node: int, root: Path) -> Fact[bool]:
    from kvbench.memory import numa

    listed = numa.nodes(root)
    if listed.value is None:
        return Fact(None, f"NUMA nodes are unknown: {listed.reason}")
    for found in listed.value:
        if found.number == node and found.is_dram:
            return Fact(True)
        if found.number == node:
            what = "has no CPUs (GPU or expansion memory)" if not found.cpus else "has no memory"
            return Fact(False, f"node {node} {what}: it is not dram")
    return Fact(False, f"no NUMA node {node}; this machine has {', '.join(str(n.number) for n in listed.value)}")


def _file(scratch: Path | None) -> Fact[bool]:
    from kvbench.memory.file import scratch_dir

    try:
        scratch_dir(scratch)
    except UsageError as error:
        return Fact(False, str(error))
    return Fact(True)


def tier_state(
    tier: Tier, root: Path = ROOT, *, scratch: Path | None = None, gpu: Callable[[], Fact[bool]] = gpu_present
) -> TierState:
    """Return whether this machine has ``tier``. Never raises: a failing third-party probe reads as unknown."""
    if tier.name in GPU_TIERS:
        found = gpu()
    elif tier.name == "dram":
        found = Fact(True) if tier.node is None else _dram(tier.node, root)
    elif tier.name == "file":
        found = _file(scratch)
    elif tier.name in _registered:
        try:
            found = _registered[tier.name][1]()
        except Exception as error:  # a plug-in's fault must not end discovery; it is reported as the reason
            found = Fact(None, f"its probe failed: {type(error).__name__}: {error}")
    else:
        found = Fact(False, "no such tier is registered")
    return TierState(tier, found.value, found.reason)


def require_tier(tier: Tier, root: Path = ROOT) -> None:
    """Raise Unavailable with the reason unless this machine has ``tier``; unknown passes, the buffer will tell."""
    state = tier_state(tier, root)
    if state.available is False:
        raise Unavailable("this machine does not have the tier", where=str(tier), got=state.reason)


def tiers(
    root: Path = ROOT, *, scratch: Path | None = None, gpu: Callable[[], Fact[bool]] = gpu_present
) -> tuple[TierState, ...]:
    """Return the state of every tier, ``dram`` also once per NUMA node of the machine."""
    from kvbench.memory import numa

    present = gpu()  # asked once: loading a driver library four times is not free
    states = []
    for name in tier_names():
        states.append(tier_state(parse_tier(name), root, scratch=scratch, gpu=lambda: present))
        if name == "dram":
            for node in numa.nodes(root).value or ():
                states.append(tier_state(parse_tier(f"dram@{node.number}"), root))
    return tuple(states)
