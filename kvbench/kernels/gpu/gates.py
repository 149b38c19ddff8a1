"""The compile gates: one row a kernel and architecture, what its machine code is, and whether that will do.

Nothing here ran on a GPU: a row that passes says that the code can reach what it should, never that it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvbench.errors import KvbenchError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.arch import Arch
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.kernels.gpu.machine_code import (
    Accesses,
    Resources,
    amd_accesses,
    amd_resources,
    ptxas_resources,
    sass_accesses,
    sass_of,
)

SCHEMA = "kvbench.gates/1"
GATES = ("spills", "limits", "wide", "in_flight", "timed", "math")


@dataclass(frozen=True, slots=True)
class Gate:
    """One verdict: ``ok`` is None where the machine code cannot be read, ``said`` the figures it rests on."""

    name: str
    ok: bool | None
    said: str


@dataclass(frozen=True, slots=True)
class Row:
    """The gates of one kernel on one architecture.

    ``status``: ``pass`` (every gate), ``fail`` (at least one, or the compiler refused), ``unknown`` (not compiled or
    not readable here, ``reason`` says why). ``registers`` a thread; ``spill_bytes``, ``static_shared``,
    ``dynamic_shared`` and ``in_flight`` a block, in bytes; ``load_bits``, ``store_bits`` the widest global accesses.
    None: not known.
    """

    kernel: str
    form: str
    arch: str
    block: int
    status: Literal["pass", "fail", "unknown"]
    reason: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    static_shared: int | None = None
    dynamic_shared: int | None = None
    shared_limit: int | None = None
    load_bits: int | None = None
    store_bits: int | None = None
    wide_loads: int | None = None
    wide_stores: int | None = None
    in_flight: int | None = None
    in_flight_demand: int = 0
    compiler: str = ""
    gates: tuple[Gate, ...] = ()


def check(kernel: GpuKernel, arch: Arch, built: build.Built) -> Row:
    """Return the row of ``kernel`` compiled as ``built`` for ``arch``. A refusing compiler is a failed row."""
    if built.reason is not None:
        return _row(kernel, arch, "fail", built.reason, built)
    if arch.backend == "hip":
        assembly = built.assembly or ""
        resources = amd_resources(assembly).get(kernel.entry)
        accesses: Accesses | None = amd_accesses(assembly)
    else:
        resources = ptxas_resources(built.log).get(kernel.entry)
        sass = sass_of(built.sass, kernel.entry) if built.sass is not None else None
        if built.sass is not None and sass is None:
            return _row(kernel, arch, "fail", f"no code of {kernel.entry} in the binary", built)
        accesses = sass_accesses(sass) if sass is not None else None
    if resources is None:
        return _row(kernel, arch, "fail", f"the compiler's log says nothing of {kernel.entry}", built)
    gates = tuple(_gates(kernel, arch, built, resources, accesses))
    failed = [f"{g.name}: {g.said}" for g in gates if g.ok is False]
    status: Literal["pass", "fail", "unknown"] = (
        "fail" if failed else "unknown" if any(g.ok is None for g in gates) else "pass"
    )
    reason = "; ".join(failed) if failed else built.sass_reason if status == "unknown" else None
    return _row(kernel, arch, status, reason, built, resources, accesses, gates)


def _row(
    kernel: GpuKernel,
    arch: Arch,
    status: Literal["pass", "fail", "unknown"],
    reason: str | None,
    built: build.Built | None = None,
    resources: Resources | None = None,
    accesses: Accesses | None = None,
    gates: tuple[Gate, ...] = (),
) -> Row:
    flight = accesses.in_flight if accesses else None
    return Row(
        kernel=kernel.name,
        form=kernel.form,
        arch=arch.name,
        block=kernel.block,
        status=status,
        reason=reason,
        registers=resources.registers if resources else None,
        spill_bytes=resources.spill_bytes if resources else None,
        static_shared=resources.shared_bytes if resources else None,
        dynamic_shared=built.dynamic_shared + kernel.shared if built and resources else None,
        shared_limit=arch.shared_limit,
        load_bits=accesses.load_bits if accesses else None,
        store_bits=accesses.store_bits if accesses else None,
        wide_loads=accesses.wide_loads if accesses else None,
        wide_stores=accesses.wide_stores if accesses else None,
        in_flight=flight * kernel.block if flight is not None else None,
        in_flight_demand=kernel.demand.in_flight,
        compiler=built.compiler if built else "",
        gates=gates,
    )


def _gates(
    kernel: GpuKernel, arch: Arch, built: build.Built, resources: Resources, accesses: Accesses | None
) -> Iterable[Gate]:
    """Yield the gates this kernel has; the limits are those beyond which a launch fails."""
    local = accesses.local if accesses else 0
    spilled = resources.spill_bytes or resources.stack_bytes or local
    yield Gate(
        "spills",
        not spilled,
        f"{resources.spill_bytes} B spilled, {resources.stack_bytes} B stack, {local} local accesses",
    )
    shared = resources.shared_bytes + built.dynamic_shared + kernel.shared
    registers = -(-resources.registers // 8) * 8 * kernel.block  # handed out in units of 8 a thread
    # The static part cannot be opted into: beyond 48 KiB it has to be dynamic.
    fits = shared <= arch.shared_limit and resources.shared_bytes <= arch.static_limit
    yield Gate(
        "limits",
        fits and registers <= arch.register_limit,
        f"{shared} of {arch.shared_limit} B shared ({resources.shared_bytes} static), "
        f"{registers} of {arch.register_limit} registers",
    )
    demand = kernel.demand
    if demand.loads or demand.stores:
        ok, said = None, "machine code not readable"
        if accesses:
            ok = accesses.load_bits >= 128 * demand.loads and accesses.store_bits >= 128 * demand.stores
            said = f"widest load {accesses.load_bits} bit, widest store {accesses.store_bits} bit"
            if demand.every:
                ok = ok and not accesses.narrow_loads
                said += f", {accesses.narrow_loads} loads below 128 bit"
        yield Gate("wide", ok, said)
    if demand.in_flight:
        ok, said = None, "machine code not readable"
        if accesses:
            flight = (accesses.in_flight or 0) * kernel.block
            ok, said = flight >= demand.in_flight, f"{flight} B a block in flight, {demand.in_flight} asked for"
        yield Gate("in_flight", ok, said)
    if demand.timed:
        ok = accesses.timed is True if accesses else None
        yield Gate("timed", ok, "clocks around a chain of dependent loads" if ok else "clocks and loads not in order")
    if demand.math:
        ok, said = None, "machine code not readable"
        if accesses:
            wanted = {"ffma"} if demand.math == "ffma" else {arch.matrix}
            ok, said = accesses.math == wanted, f"multiplies by {' '.join(sorted(accesses.math)) or 'nothing'}"
            if demand.math == "tensor":  # scalar multiply-adds may scale a result beside it
                ok = accesses.math - {"ffma"} == wanted
            said += f", {' '.join(wanted)} asked for"
        yield Gate("math", ok, said)


def table(kernels: Sequence[GpuKernel], archs: Sequence[Arch]) -> list[Row]:
    """Compile ``kernels`` for ``archs`` and return a row each, CUDA C++ for NVIDIA alone.

    Where a compiler is not installed its rows are ``unknown`` with the reason. Raises KvbenchError when there is no
    pair to compile at all: a table without rows must not look like one without failures.
    """
    pairs = [
        (k, a)
        for k in kernels
        for a in archs
        if (k.form != "cuda" or a.backend == "cuda") and (not k.archs or a.name in k.archs)
    ]
    if not pairs:
        raise KvbenchError("no kernel can be compiled for these architectures", where="gates",
                           got=", ".join(a.name for a in archs) or "none")  # fmt: skip
    built: dict[tuple[str, str], build.Built] = {}
    lacking: dict[str, str] = {}
    if any(k.form == "cuda" for k, _ in pairs):
        why = build.missing_nvrtc()
        if why:
            lacking["cuda"] = why
        else:
            # One compilation serves every kernel of a text.
            sources = {k.name: k.text() for k, _ in pairs if k.form == "cuda"}
            texts = {(sources[k.name], a.name): (sources[k.name], a) for k, a in pairs if k.form == "cuda"}
            made = dict(zip(texts, build.cuda(list(texts.values()), 60.0 + 10.0 * len(texts)), strict=True))
            built |= {(k.name, a.name): made[sources[k.name], a.name] for k, a in pairs if k.form == "cuda"}
    portable = [(k, a) for k, a in pairs if k.form != "cuda"]
    if portable:
        why = build.missing_triton()
        if why:
            lacking |= dict.fromkeys(("triton", "gluon"), why)
        else:
            results = build.triton(portable, timeout=60.0 + 10.0 * len(portable))
            built |= {(k.name, a.name): b for (k, a), b in zip(portable, results, strict=True)}
    return [
        check(k, a, built[k.name, a.name])
        if (k.name, a.name) in built
        else _row(k, a, "unknown", lacking.get(k.form, "not compiled"))
        for k, a in pairs
    ]


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the ``--json`` document of ``scripts/gates``: schema, the limits' sources, one object a row."""
    from kvbench.kernels.gpu.arch import ARCHS

    named = sorted({r.arch for r in rows}, key=list(ARCHS).index)
    return {
        "schema": SCHEMA,
        "basis": "compiled only",
        "archs": [asdict(ARCHS[name]) for name in named],
        "gates": [asdict(r) for r in rows],
    }


def failed(rows: Sequence[Row]) -> bool:
    """Return whether a gate failed or could not be read: what was not checked has not passed."""
    return not rows or any(r.status != "pass" for r in rows)
