"""What a worker knows before its first case: budget, machine facts, kernel cache, and buffers shared between cases."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench, resolve_word
from kvbench.contract.case import Case

if TYPE_CHECKING:
    from kvbench.machine.physical import PhysicalCeiling
    from kvbench.machine.topology import Topology
    from kvbench.memory.host import HostBuffer
    from kvbench.memory.payload import Kind
    from kvbench.memory.region import Pages
    from kvbench.timing.budget import Budget

ARENA_SHARE = 0.4  # of the memory available at start: buffers kept beyond it are given back, oldest first
ARENA_LEAST = 1 << 20  # small buffers are made afresh: they cost nothing, and their place in the caches should vary

Key = tuple[str, int, str, int | None]


class Arena:
    """Host buffers reused between the cases of one run, because getting 256 MiB costs more than measuring them.

    A run is one set of allocations anyway: fresh pages are what a new run, in a new process, is for. Sources keep
    their payload and are only read; a buffer whose payload is another than asked is filled again.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Key, HostBuffer] = OrderedDict()
        self._payload: dict[Key, tuple[Kind, int] | None] = {}
        self._used: set[Key] = set()
        self._loose: list[HostBuffer] = []

    def get(self, role: str, nbytes: int, pages: Pages, node: int | None, kind: Kind | None, seed: int) -> HostBuffer:
        """Return the buffer of ``role``, made when there is none, holding seeded ``kind`` payload (None: anything)."""
        from kvbench.memory import payload
        from kvbench.memory.host import host_buffer

        if nbytes < ARENA_LEAST:
            buffer = host_buffer(nbytes, pages, node, kind=kind, seed=seed)
            self._loose.append(buffer)
            return buffer
        key = (role, nbytes, pages, node)
        wanted = None if kind is None else (kind, seed)
        self._used.add(key)
        if key in self._kept:
            self._kept.move_to_end(key)
            if kind is not None and self._payload[key] != wanted:
                payload.fill(self._kept[key].array(), seed, kind)
        else:
            self._shrink(self._limit - nbytes)
            self._kept[key] = host_buffer(nbytes, pages, node, kind=kind, seed=seed)
        self._payload[key] = wanted
        return self._kept[key]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers kept for later cases."""
        return sum(buffer.nbytes for buffer in self._kept.values())

    def end_case(self, failed: bool) -> None:
        """Give back what the case had for itself; after a failure everything, since nobody knows what it wrote."""
        for buffer in self._loose:
            buffer.close()
        self._loose.clear()
        self._used.clear()
        if failed:
            self._shrink(0)

    def _shrink(self, target: int) -> None:
        for key in list(self._kept):
            if sum(buffer.nbytes for buffer in self._kept.values()) <= target:
                return
            if key not in self._used:
                self._kept.pop(key).close()


@dataclass(frozen=True, slots=True)
class Context:
    """One per worker process (or pytest session). ``kernels`` is the digest of the kernel sources it runs."""

    profile: str
    scratch: Path | None
    seed: int
    budget: Budget
    topology: Topology
    kernels: str
    notes: tuple[str, ...]
    arena: Arena = field(default_factory=lambda: Arena(1 << 30))
    device_errors: list[str] = field(default_factory=list)

    @classmethod
    def create(cls, *, profile: str, scratch: str | Path | None, seed: int) -> Context:
        """Prepare this process for measuring: kernel cache directory first, numba only after it."""
        from kvbench.kernels import cache
        from kvbench.machine.topology import read_topology
        from kvbench.memory.limits import available_memory
        from kvbench.timing.budget import budget

        info = cache.prepare()
        available = available_memory().value
        limit = int(ARENA_SHARE * available.nbytes) if available is not None else 1 << 30
        return cls(
            profile, None if scratch is None else Path(scratch), seed, budget(profile), read_topology(), info.digest,
            (f"kernel cache: {info.reason}",) if info.reason else (), Arena(limit),
        )  # fmt: skip

    @property
    def poisoned(self) -> bool:
        """Whether a device error has made this process useless for further device work."""
        return bool(self.device_errors)

    def poison(self) -> None:
        """Note a device error that stays: this worker measures nothing more."""
        self.device_errors.append("sticky")

    @property
    def dram(self) -> PhysicalCeiling:
        """The physical ceiling of host memory, as far as this machine tells."""
        from kvbench.machine.physical import dram_ceiling

        return dram_ceiling()

    @property
    def cores(self) -> int:
        """Threads behind the word ``all``: one per physical core of the affinity mask."""
        return len(self.topology.measuring_cpus("all"))

    @property
    def llc(self) -> int:
        """Last-level cache bytes behind the word ``llc``."""
        return self.topology.llc().bytes

    def resolve(self, member: Bench, axes: dict[str, Value]) -> Case:
        """Return the case at ``axes`` with the numbers of this machine beside its words."""
        case = member.case(axes)
        resolved: dict[str, Value] = {}
        for name, value in case.axes.items():
            number = resolve_word(name, member.axes[name], value, self)
            if number is not None:
                resolved[name] = number
        return Case(case.suite, case.bench, case.version, case.axes, case.digest, resolved)
