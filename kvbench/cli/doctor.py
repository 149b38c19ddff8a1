"""``kvbench doctor``: what this machine is, what can run here and why not, and the command that mends each obstacle."""

from __future__ import annotations

import importlib.util
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbench.cli import doctor_gpu
from kvbench.cli.output import emit, emit_json, fitted, say
from kvbench.errors import EXIT_OK, KvbenchError, printable
from kvbench.machine import cgroup, obstacles, trial
from kvbench.machine.fingerprint import Disagreement, Fingerprint, fingerprint
from kvbench.machine.gpu import Gpus, read_gpus
from kvbench.machine.nvml_devices import read_devices
from kvbench.machine.nvml_obstacles import NOTHING_READ, GpuState, board_paths, gpu_settings
from kvbench.machine.nvml_state import GpuProbe
from kvbench.machine.obstacles import Obstacle, Unchecked
from kvbench.machine.physical import PhysicalCeiling, host_ceilings
from kvbench.machine.probe import ROOT, is_live, kilobytes, read_choice, read_fields
from kvbench.machine.topology import Topology, describe, read_topology, thp_bytes
from kvbench.machine.topology_pcie import PciePath
from kvbench.units import KiB, format_bytes, format_value

DOCTOR_SCHEMA = "kvbench.doctor/1"
_PROBE_BYTES = 256 * KiB
_EFFECTS = {"blocks": 0, "distorts": 1, "limits": 2}


@dataclass(frozen=True, slots=True)
class Capability:
    """Something kvbench can do on a machine: ``available`` is True, or False or None (unknown) with a ``reason``."""

    name: str
    available: bool | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything ``doctor`` found. ``unchecked`` are checks that could not be made: not a clean bill."""

    fingerprint: Fingerprint
    topology: Topology
    gpus: Gpus
    memory_bytes: int | None
    memory_limit_bytes: int | None
    tiers: tuple[Capability, ...]
    capabilities: tuple[Capability, ...]
    ceilings: tuple[PhysicalCeiling, ...]
    obstacles: tuple[Obstacle, ...]
    unchecked: tuple[Unchecked, ...]
    seconds: float
    thp_bytes: int | None = None
    gpu_state: GpuState = NOTHING_READ
    gpu_paths: Mapping[int, PciePath] = field(default_factory=dict)

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        return self.fingerprint.disagreements


def doctor_report(
    root: Path = ROOT, *, scratch: Path | None = None, gpus: Gpus | None = None, nvml: Any = None,
    watch_seconds: float = 0.2,
) -> DoctorReport:  # fmt: skip
    """Examine the machine under ``root`` (well below a second). Never raises for what a machine lacks.

    What must be tried out (binding, scratch file, cache directory, load now) is unchecked for a copied tree. ``gpus``
    stands in for what NVML says, ``nvml`` for the module that is asked.
    """
    began = time.perf_counter()
    topology = read_topology(root)
    live = is_live(root)
    ask_nvml = gpus is None and (live or nvml is not None)
    if gpus is None:
        gpus = (
            read_gpus(nvml) if ask_nvml else Gpus(None, reason="NVML answers for this machine, not for a copied tree")
        )
    state = read_state(nvml) if ask_nvml else NOTHING_READ
    findings: list[Obstacle | Unchecked] = []
    direct = Capability("file method=direct", None, "not tried")
    if live:
        findings += trial.watch(topology, watch_seconds)  # first: our own children would count as foreign load
        findings += [f for f in (trial.mbind(topology), _cache(), trial.c_compiler()) if f is not None]
        file_findings, direct = try_scratch(scratch)
        findings += file_findings
    else:
        findings.append(Unchecked("trials", "binding, scratch files and load can only be tried on the machine itself"))
    findings += obstacles.settings(root, topology, gpus)
    findings += gpu_settings(gpus, topology, root, read_devices(nvml) if ask_nvml and gpus.boards else None, state)
    limit = cgroup.memory_limit(root).value
    return DoctorReport(
        fingerprint=fingerprint(root, gpus),
        topology=topology,
        gpus=gpus,
        memory_bytes=kilobytes(read_fields(root, "/proc/meminfo").get("MemTotal")),
        memory_limit_bytes=int(limit.value) if limit is not None and limit.value is not None else None,
        tiers=_tiers(root, scratch, gpus) if live else (),
        capabilities=_capabilities(root, topology, gpus, direct, findings),
        ceilings=host_ceilings(root),
        obstacles=tuple(
            sorted((f for f in findings if isinstance(f, Obstacle)), key=lambda f: (_EFFECTS[f.effect], f.name))
        ),
        unchecked=tuple(f for f in findings if isinstance(f, Unchecked)),
        seconds=time.perf_counter() - began,
        thp_bytes=thp_bytes(root).value,
        gpu_state=state,
        gpu_paths=board_paths(gpus, root),
    )


def read_state(nvml: Any = None) -> GpuState:
    """Return every board's state now; ``nvml`` stands in for the module pynvml."""
    with GpuProbe(module=nvml) as probe:
        return GpuState(
            dict(zip(probe.indices, probe.snapshot(), strict=True)),
            dict(zip(probe.indices, probe.processes(), strict=True)),
        )


def _cache() -> obstacles.Finding:
    from kvbench.kernels.cache import user_cache_dir

    try:
        return trial.cache_directory(user_cache_dir() / "numba")
    except OSError as error:
        return Obstacle(
            "cache_directory", "limits", f"there is no cache directory: {error.strerror}",
            "every run compiles its kernels again, minutes on a small machine",
            "export XDG_CACHE_HOME=/a/writable/directory",
        )  # fmt: skip


def try_scratch(scratch: Path | None) -> tuple[list[Obstacle | Unchecked], Capability]:
    """Write a small scratch file and read it directly: return the findings and whether ``method=direct`` works."""
    from kvbench.memory.file import ScratchFile
    from kvbench.memory.readers import probe_counter

    name = "file method=direct"
    mend = "kvbench run --scratch DIR with a directory on a local disk (df -T DIR shows the file system)"
    try:
        file = ScratchFile(_PROBE_BYTES, scratch)
    except KvbenchError as error:
        found = Obstacle("scratch", "blocks", str(error), "cases of the file tier are skipped", mend)
        return [found], Capability(name, False, str(error))
    try:
        kind, works, reason = file.system.kind or "an unknown file system", file.direct.works, file.direct.reason
        if works is False:
            found = Obstacle(
                "scratch_direct", "blocks", f"{file.directory} is on {kind}: {reason}",
                "method=direct is skipped, and the other methods read memory where files are kept in memory", mend,
            )  # fmt: skip
            return [found], Capability(name, False, reason)
        if works is None:
            return [Unchecked("scratch_direct", reason)], Capability(name, None, reason)
        counter = probe_counter(file)
        if counter.value is None:
            return [Unchecked("read_bytes", counter.reason)], Capability(name, True)
        if counter.value:
            return [], Capability(name, True)
        found = Obstacle(
            "read_bytes", "limits", f"{counter.reason} (/proc/self/io, {kind})",
            "link bytes of file cases are unmeasured: what was asked for is not known to have crossed the link", mend,
        )  # fmt: skip
        return [found], Capability(name, True)
    except KvbenchError as error:
        return [Unchecked("scratch_direct", str(error))], Capability(name, None, str(error))
    finally:
        file.close()


def _tiers(root: Path, scratch: Path | None, gpus: Gpus) -> tuple[Capability, ...]:
    from kvbench.machine.probe import Fact
    from kvbench.memory.tiers import tiers

    present = Fact(gpus.present, gpus.reason)
    states = tiers(root, scratch=scratch, gpu=lambda: present)
    return tuple(Capability(str(state.tier), state.available, state.reason) for state in states)


def _capabilities(
    root: Path, topology: Topology, gpus: Gpus, direct: Capability, findings: list[Obstacle | Unchecked]
) -> tuple[Capability, ...]:
    def installed(name: str, module: str, package: str) -> Capability:
        there = importlib.util.find_spec(module) is not None
        return Capability(name, there, "" if there else f"{module} is not installed: pip install '{package}'")

    def either(name: str, there: bool | None, reason: str) -> Capability:
        return Capability(name, there, "" if there else reason)

    thp = read_choice(root, "/sys/kernel/mm/transparent_hugepage/enabled")
    free = read_fields(root, "/proc/meminfo").get("HugePages_Free", "")
    dram = [node for node in topology.nodes if not node.cpuless and node.memory_bytes]
    no_compiler = next((f for f in findings if isinstance(f, Obstacle) and f.name == "c_compiler"), None)
    one_node = f"{len(dram)} NUMA node(s) with CPUs and memory" if topology.nodes else "NUMA nodes are unknown"
    huge = "no huge page is free" if free.isdigit() else "no HugePages_Free in /proc/meminfo"
    compiler = no_compiler.found if no_compiler else "not tried"
    return (
        installed("host suites", "numba", "kvbench"),
        either("pages=thp", None if thp.value is None else thp.value != "never", thp.reason or f"mode {thp.value}"),
        either("pages=huge", int(free) > 0 if free.isdigit() else None, huge),
        either("numa matrix", len(dram) > 1 if topology.nodes else None, one_node),
        direct,
        either("GPU suites", gpus.present, gpus.reason),
        installed("GPU compile gates", "triton", "kvbench[compile]"),
        either("scripts/crosscheck", no_compiler is None if is_live(root) else None, compiler),
    )


def to_document(report: DoctorReport) -> dict[str, Any]:
    """Return the ``kvbench.doctor/1`` document. Values are SI; null is unknown."""
    finger, llc = report.fingerprint, report.topology.llc()
    env = finger.env
    machine = {
        "hw_class": finger.hw_class,
        "env": finger.env_digest,
        "cpu": _cpu_name(finger),
        "sockets": report.topology.sockets,
        "numa_nodes": sum(not node.cpuless for node in report.topology.nodes) or None,
        "cores": report.topology.cores,
        "cpus": len(report.topology.cpus),
        "affinity": list(report.topology.affinity),
        "llc_bytes": llc.bytes,
        "llc_unknown": llc.unknown,
        "page_bytes": report.topology.page_bytes.value,
        "memory_bytes": report.memory_bytes,
        "memory_limit_bytes": report.memory_limit_bytes,
        "kernel": env["kernel"],
        "virtualisation": env["virtualisation"],
        "container": env["container"],
        "driver": report.gpus.driver,
        "cuda": report.gpus.cuda,
        "gpus": [board.name for board in report.gpus.boards],
    }
    return {
        "schema": DOCTOR_SCHEMA,
        "machine": machine,
        "tiers": [asdict(tier) for tier in report.tiers],
        "capabilities": [asdict(capability) for capability in report.capabilities],
        "ceilings": [{**asdict(c), "kind": "physical"} for c in report.ceilings],
        "disagreements": [asdict(d) for d in report.disagreements],
        "gpus": doctor_gpu.rows(report.gpus, report.gpu_state, report.gpu_paths),
        "obstacles": [asdict(o) for o in report.obstacles],
        "unchecked": [asdict(u) for u in report.unchecked],
        "gaps": [{"name": name, "reason": reason} for name, reason in finger.gaps],
        "seconds": report.seconds,
    }


def _cpu_name(finger: Fingerprint) -> str | None:
    facts = finger.machine["facts"]
    name = facts.get("cpu_name") if isinstance(facts, dict) else None
    return name if isinstance(name, str) else None


def render_text(report: DoctorReport) -> str:
    """Return the report for reading."""
    from kvbench.report.table import plain_table

    finger, llc = report.fingerprint, report.topology.llc()
    env, page = finger.env, report.topology.page_bytes
    memory = "unknown" if report.memory_bytes is None else format_value(report.memory_bytes, "B")
    if beside := sum(node.memory_bytes or 0 for node in report.topology.nodes if node.cpuless):
        memory += f", {format_value(beside, 'B')} of it on nodes without CPUs (GPU or CXL memory: never dram)"
    if report.memory_limit_bytes is not None:
        memory += f" (this process's group may hold {format_value(report.memory_limit_bytes, 'B')})"
    page_text = page.reason if page.value is None else format_bytes(page.value)
    llc_text = f"{format_bytes(llc.bytes)} in {llc.instances} instance(s)"
    if llc.unknown:
        llc_text = f"unknown ({llc.reason}); {format_bytes(llc.bytes)} is assumed"
    containers = env["container"] if isinstance(env["container"], list) else []
    lines = [
        ("hardware", f"{finger.hw_class}  {_cpu_name(finger) or ''}".strip()),
        ("environment", finger.env_digest),
        ("topology", describe(report.topology)),
        ("last-level cache", llc_text),
        ("memory", f"{memory}, pages of {page_text}{_thp_text(report.thp_bytes)}"),
        ("system", f"kernel {env['kernel'] or 'unknown'}, virtualisation {env['virtualisation'] or 'unknown'}"),
        ("container", ", ".join(map(str, containers)) or "no sign of one"),
        ("GPUs", _gpu_text(report.gpus)),
    ]  # fmt: skip
    word = {True: "yes", False: "no", None: "unknown"}
    parts = [
        plain_table(("machine", ""), lines),
        *(plain_table(doctor_gpu.HEAD, table) for table in [doctor_gpu.lines(report.gpus, report.gpu_state)] if table),
        plain_table(("what can run", "", "why"),
                    [(c.name, word[c.available], c.reason) for c in (*report.tiers, *report.capabilities)]),
        plain_table(("physical ceiling", "value", "from"),
                    [(c.name, "unknown" if c.value is None else format_value(c.value, c.unit), c.reason or c.source)
                     for c in report.ceilings]),
    ]  # fmt: skip
    if report.disagreements:
        parts += fitted("Sources that disagree (all are kept; none is used as if it were the truth):")
        for d in report.disagreements:
            told = ", ".join(f"{name} {_reading(value, d.unit)}" for name, value in d.sources.items())
            parts += fitted(printable(f"  {d.fact}: {told}", 500), "    ")
    parts.append("")
    parts.append(f"{len(report.obstacles)} obstacle(s):" if report.obstacles else "No obstacle was found.")
    for o in report.obstacles:
        rows = ((f"  {o.name} ({o.effect})", o.found), ("      costs", o.costs), ("      mend", o.mend))
        for label, text in rows:
            parts += fitted(printable(f"{label}: {text}", 500), "  ")
    if report.unchecked:
        parts.append("Could not be checked:")
        for u in report.unchecked:
            parts += fitted(printable(f"  {u.name}: {u.reason}", 300), "  ")
    return "\n".join(parts)


def _thp_text(size: int | None) -> str:
    return "" if size is None else f", transparent huge pages of {format_bytes(size)}"


def _reading(value: float, unit: str) -> str:
    return f"{value:.0f} {unit}" if unit == "MHz" else format_value(value, unit)


def _gpu_text(gpus: Gpus) -> str:
    if not gpus.boards:
        return f"none ({gpus.reason})" if gpus.present is False else f"unknown ({gpus.reason})"
    kinds = Counter(
        f"{board.name}, {format_value(board.memory_bytes, 'B') if board.memory_bytes else 'memory unknown'}"
        for board in gpus.boards
    )
    names = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{names}; driver {gpus.driver or 'unknown'}, CUDA {gpus.cuda or 'unknown'}"


def run(*, traps: bool = False, json: bool = False, scratch: Path | None = None) -> int:
    """Print the report, or with ``traps`` run the self-tests of known wrong-number traps; return the exit code."""
    if traps:
        from kvbench.locks import acquire, machine_resources
        from kvbench.timing.traps import run as run_traps

        with acquire(machine_resources(), notify=say):  # the self-tests measure
            return run_traps(json=json)
    report = doctor_report(scratch=scratch)
    if json:
        emit_json(to_document(report))
    else:
        emit(render_text(report))
    return EXIT_OK
