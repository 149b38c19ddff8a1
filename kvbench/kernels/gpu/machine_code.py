"""What compiled code says about itself: compiler logs, SASS (nvdisasm -c) and AMD assembly, read into facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WIDE = 16  # bytes a thread moves at once with a 128-bit access; wider ones (sm_100) count too
_LOADS, _STORES = ("LDG", "LD", "LDGSTS"), ("STG", "ST")
_LOCAL = ("LDL", "STL")
# HFMA2 is left out: NVIDIA's assembler moves constants with it.
_MATH = {
    "FFMA": "ffma", "FFMA2": "ffma", "HMMA": "mma", "OMMA": "mma", "QMMA": "mma", "HGMMA": "wgmma",
    "UTCHMMA": "tcgen05", "UTCQMMA": "tcgen05", "UTCOMMA": "tcgen05",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resources:
    """What the assembler reports of one kernel: registers a thread; spilled, stack and static shared bytes."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Accesses:
    """The memory accesses of one kernel's machine code.

    ``load_bits``, ``store_bits``: widest global access, 0 without one; ``wide_loads``, ``wide_stores``: how many are
    of 128 bits or more; ``local``: accesses to local memory (spills and arrays that did not fit into registers).
    ``in_flight``: bytes of wide loads one thread has issued when it first needs one of them (a store or an add that
    names its register; AMD: a wait), the least over the basic blocks that have wide loads. A copy that alternates
    load and store has 16, however large its tile. None without wide loads.
    ``timed``: the code reads the clock twice, each time behind the value of the load before, and between the two every
    load takes its address from the one before. None where nothing reads the clock.
    ``narrow_loads``: global loads of less than 128 bits.
    ``math``: what multiplies floating-point numbers: ``ffma`` and the names of :attr:`arch.Arch.matrix`.
    """

    load_bits: int
    store_bits: int
    wide_loads: int
    wide_stores: int
    local: int
    in_flight: int | None
    timed: bool | None
    math: frozenset[str] = frozenset()
    narrow_loads: int = 0


@dataclass(frozen=True, slots=True)
class _Instruction:
    mnemonic: str  # with modifiers: LDG.E.NA.128
    operands: str

    @property
    def name(self) -> str:
        return self.mnemonic.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Bytes a thread moves; an access without a size modifier moves 4."""
        found = re.search(r"\.(?:[US]?(8|16)|(64|128|256))(?=\.|$)", self.mnemonic)
        return int(found[1] or found[2]) // 8 if found else 4

    @property
    def registers(self) -> list[int]:
        """Every general register the text names, the first one is the destination of a load."""
        return [int(n) for n in re.findall(r"(?<![\w.])R(\d+)\b", self.operands)]


def ptxas_resources(log: str) -> dict[str, Resources]:
    """Return the resources of each kernel in the output of ``ptxas -v`` or of NVRTC with ``--ptxas-options=-v``."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        used = re.search(r"Used (\d+) registers", part)
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        if used and stack:
            spills = max(int(stack[2]), int(stack[3]))
            found[name] = Resources(int(used[1]), spills, int(stack[1]), int(shared[1]) if shared else 0)
    return found


def amd_resources(assembly: str) -> dict[str, Resources]:
    """Return the resources of each kernel in the metadata at the end of AMD assembly (gfx9 and later)."""
    found = {}
    for part in re.split(r"^amdhsa\.kernels:", assembly, flags=re.MULTILINE)[1:]:
        for kernel in re.split(r"^  - (?=\.)", part, flags=re.MULTILINE)[1:]:
            fields = dict(re.findall(r"^\s*\.(\w+):\s+(\S+)", kernel, re.MULTILINE))
            number = {key: int(value) for key, value in fields.items() if value.isdigit()}
            # Scalar registers spill into lanes of vector registers: without a private segment no byte is in memory.
            scalar = number["sgpr_spill_count"] if number["private_segment_fixed_size"] else 0
            # The kernel's own name is its last `.name`; its arguments have names too.
            found[fields["symbol"].removesuffix(".kd").strip("'\"")] = Resources(
                number["vgpr_count"],
                4 * (number["vgpr_spill_count"] + scalar),
                number["private_segment_fixed_size"],
                number["group_segment_fixed_size"],
            )
    return found


def sass_of(disassembly: str, entry: str) -> str | None:
    """Return the part of ``nvdisasm -c`` output that belongs to the kernel ``entry``, None when it is not there."""
    for section in re.split(r"^//-+ (?=\.)", disassembly, flags=re.MULTILINE):
        if re.match(rf"\.text\.{re.escape(entry)}\s", section):
            return section
    return None


def _blocks(sass: str) -> Iterator[list[_Instruction]]:
    """Yield the straight runs of instructions between labels."""
    block: list[_Instruction] = []
    for line in sass.splitlines():
        if re.match(r"\.L_\w+:", line):
            yield block
            block = []
        found = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line)
        if found:
            block.append(_Instruction(found[1], found[2]))
    yield block


def _in_flight(block: list[_Instruction]) -> int:
    """Return the most bytes of wide loads issued before something waits for one of them."""
    outstanding: list[tuple[range, int]] = []
    most = 0
    for instruction in block:
        named = set(instruction.registers)
        late = [k for k, (held, _) in enumerate(outstanding) if named & set(held)]
        if late:  # in order: what was issued before the one waited for counts as arrived
            outstanding = outstanding[max(late) + 1 :]
        if instruction.name in _LOADS and instruction.bytes >= WIDE and instruction.registers:
            first = instruction.registers[0]
            outstanding.append((range(first, first + instruction.bytes // 4), instruction.bytes))
            most = max(most, sum(size for _, size in outstanding))
    return most


def _timed(code: list[_Instruction]) -> bool | None:
    """Return whether the two clock readings enclose a chain of dependent loads and nothing else; None without any."""
    clocks = [k for k, i in enumerate(code) if "SR_CLOCK" in i.operands]
    if not clocks:
        return None
    if len(clocks) != 2:
        return False
    for clock in clocks:
        loads = [k for k in range(clock) if code[k].name in _LOADS]
        if not loads or not code[loads[-1]].registers:
            return False
        arrived = code[loads[-1]].registers[0]
        if not any(arrived in instruction.registers for instruction in code[loads[-1] + 1 : clock]):
            return False
    chain = [i.registers for i in code[clocks[0] : clocks[1]] if i.name in _LOADS]
    # Each address is the value loaded before; the head of each loop takes what entered the walk or its own last value.
    broken = [k for k in range(1, len(chain)) if chain[k][-1] != chain[k - 1][0]]
    return len(chain) > 1 and not broken


def sass_accesses(sass: str) -> Accesses:
    """Return the accesses in the SASS of one kernel."""
    blocks = list(_blocks(sass))
    code = [i for block in blocks for i in block]
    loads = [i for i in code if i.name in _LOADS]
    stores = [i for i in code if i.name in _STORES]
    flights = [_in_flight(b) for b in blocks if any(i.name in _LOADS and i.bytes >= WIDE for i in b)]
    return Accesses(
        max((8 * i.bytes for i in loads), default=0),
        max((8 * i.bytes for i in stores), default=0),
        sum(i.bytes >= WIDE for i in loads),
        sum(i.bytes >= WIDE for i in stores),
        sum(i.name in _LOCAL for i in code),
        min(flights, default=None),
        _timed(code),
        frozenset(_MATH[i.name] for i in code if i.name in _MATH),
        sum(i.bytes < WIDE for i in loads),
    )


_AMD_MATH = {"ffma": r"^\s+v_(?:pk_)?fma(?:c|ak|mk)?_f32", "mfma": r"^\s+v_mfma_"}
_AMD_BITS = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}


def amd_accesses(assembly: str) -> Accesses:
    """Return the accesses in AMD assembly of one kernel.

    Masks become branches there, so bytes in flight are counted along the text, up to the wait that a use needs:
    ``s_waitcnt vmcnt(n)`` holds until at most n loads and stores are under way (gfx9).
    """
    loads: list[int] = []
    stores: list[int] = []
    under_way: list[int] = []
    local = most = 0
    for line in assembly.splitlines():
        access = re.match(r"\s+(?:global|buffer|flat)_(load|store)_(?:lds_)?([a-z]+?)(?:x(\d))?(?:_d16\w*)?\s", line)
        wait = re.match(r"\s+s_waitcnt\b.*\bvmcnt\((\d+)\)", line)
        local += bool(re.match(r"\s+scratch_(load|store)", line))
        if access:
            bits = _AMD_BITS.get(access[2], 32) * int(access[3] or 1)
            (loads if access[1] == "load" else stores).append(bits)
            under_way.append(bits // 8 if access[1] == "load" and bits >= 8 * WIDE else 0)
            most = max(most, sum(under_way))
        elif wait:
            under_way = under_way[len(under_way) - int(wait[1]) :] if int(wait[1]) < len(under_way) else under_way
    return Accesses(
        max(loads, default=0),
        max(stores, default=0),
        sum(b >= 8 * WIDE for b in loads),
        sum(b >= 8 * WIDE for b in stores),
        local,
        most or None,
        None,
        frozenset(name for name, seen in _AMD_MATH.items() if re.search(seen, assembly, re.MULTILINE)),
        sum(b < 8 * WIDE for b in loads),
    )
