"""Every GPU kernel of kvbench's own movers: source, entry, block, arguments, what its machine code owes, its oracle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import UsageError
from kvbench.kernels.gpu import reference

FOLDER = Path(__file__).resolve().parent
KIB = 1024


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a launch, in order.

    ``kind`` is its type: ``pointer`` (device address or device alias of host memory), ``u64``, ``i64``, ``i32``,
    ``f64``, ``map`` (a tensor map, 128 bytes by value). ``align`` is what a pointer's address must be a multiple of: a
    wide access elsewhere is a sticky error.
    """

    name: str
    kind: Literal["pointer", "u64", "i64", "i32", "f64", "map"]
    meaning: str
    align: int = 1


@dataclass(frozen=True, slots=True)
class Demand:
    """What the gates ask of the machine code, beyond no spills and limits that every kernel keeps.

    ``loads``, ``stores``: the widest is at least 128 bits; ``in_flight``: bytes of wide loads one block of
    ``GpuKernel.block`` threads has issued before it waits for one; ``timed``: clocks enclose a dependent chain;
    ``every``: no global load is narrower than 128 bits;
    ``math``: what multiplies, ``ffma`` (scalar, no matrix instruction) or ``tensor`` (the architecture's own).
    """

    loads: bool = False
    stores: bool = False
    in_flight: int = 0
    timed: bool = False
    every: bool = False
    math: Literal["", "ffma", "tensor"] = ""


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """One kernel. ``block`` threads are the most it takes (CUDA C++) or exactly what it is compiled for (Triton).

    ``reference`` is the numpy function that says what it must leave behind. For Triton ``types`` gives each
    argument's type (``*i32``), ``constants`` the values compiled in (a dtype as its name), and every 16-byte aligned
    pointer is declared as such. For CUDA C++ the constants are macros in front of the text, and ``ENTRY`` is the entry.
    ``shared``: bytes of dynamic shared memory a CUDA C++ block asks for; ``archs``: those it is for, none named: all.
    """

    name: str
    form: Literal["cuda", "triton", "gluon"]
    source: Path
    entry: str
    block: int
    purpose: str
    arguments: tuple[Argument, ...]
    demand: Demand
    reference: Callable[..., Any] | None
    types: tuple[str, ...] = ()
    constants: tuple[tuple[str, int | str], ...] = ()
    registers: int = 0  # a thread may have, for Triton on NVIDIA; 0: as many as the assembler thinks good
    shared: int = 0
    archs: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the source text: of a ``.cu`` file what NVRTC or CuPy's RawModule compiles, without any header."""
        text = self.source.read_text(encoding="utf-8")
        if self.form != "cuda" or not self.constants:
            return text
        macros = (("ENTRY", self.entry), *self.constants)
        return "".join(f"#define {name} {value}\n" for name, value in macros) + text

    def digest(self) -> str:
        """Return 16 hex digits over source, entry, block and constants: what ``kernel`` of a row identifies."""
        limit = f" {self.registers}" if self.registers else ""
        said = f"{self.entry} {self.block} {self.types} {self.constants}{limit}\0{self.text()}"
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def check(self, *values: int | float) -> None:
        """Raise UsageError unless ``values`` fit the arguments: their number, null or unaligned addresses, ranges."""
        if len(values) != len(self.arguments):
            names = ", ".join(a.name for a in self.arguments)
            raise UsageError("wrong number of arguments", where=self.name, got=len(values), expected=f"({names})")
        least = {"u64": 0, "i64": -(2**63), "i32": -(2**31)}
        most = {"u64": 2**64 - 1, "i64": 2**63 - 1, "i32": 2**31 - 1}
        for argument, value in zip(self.arguments, values, strict=True):
            where = f"{self.name} {argument.name}"
            if argument.kind == "pointer" and (not value or value % argument.align):
                raise UsageError("not an address it can use", where=where, got=hex(int(value)),
                                 expected=f"a multiple of {argument.align}, not 0")  # fmt: skip
            if argument.kind in least and not least[argument.kind] <= value <= most[argument.kind]:
                raise UsageError("out of range", where=where, got=value, expected=argument.kind)


def _pointer(name: str, meaning: str, align: int = 16) -> Argument:
    return Argument(name, "pointer", meaning, align)


_NBYTES = Argument("nbytes", "u64", "bytes of one array, any number")
_DST, _SRC = _pointer("dst", "destination"), _pointer("src", "source")
_SUMS = _pointer("out", "u64 [blocks]: each block's part of the sum of 64-bit words", 8)
_STREAM, _CHASE, _LAUNCH = FOLDER / "movers.cu", FOLDER / "chase.cu", FOLDER / "launch.cu"
_ARITHMETIC = FOLDER / "arithmetic.cu"


def _cuda(
    name: str,
    source: Path,
    block: int,
    purpose: str,
    arguments: tuple[Argument, ...],
    demand: Demand,
    oracle: Callable[..., Any] | None,
) -> GpuKernel:
    return GpuKernel(name, "cuda", source, "kvbench_" + name, block, purpose, arguments, demand, oracle)


_CUDA = (
    _cuda("read", _STREAM, 512, "device_bandwidth read", (_SUMS, _SRC, _NBYTES),
          Demand(loads=True, in_flight=32 * KIB), reference.read),
    _cuda("write", _STREAM, 512, "device_bandwidth write",
          (_DST, _NBYTES, Argument("first", "u64", "word 0"), Argument("step", "u64", "word k + 1 less word k, odd")),
          Demand(stores=True), reference.write),
    _cuda("copy", _STREAM, 512, "device_bandwidth copy", (_DST, _SRC, _NBYTES),
          Demand(loads=True, stores=True, in_flight=64 * KIB), reference.copy),
    # Two arrays are read, and ptxas may take the first sum out of their 8 loads early: 7 are asked for.
    _cuda("triad", _STREAM, 512, "device_bandwidth triad: a = b + scale * c",
          (_pointer("a", "f64, destination"), _pointer("b", "f64"), _pointer("c", "f64"),
           Argument("nbytes", "u64", "bytes of one array, a multiple of 8"),
           Argument("scale", "f64", "a power of two for bits that agree with the reference")),
          Demand(loads=True, stores=True, in_flight=56 * KIB), reference.triad),
    _cuda("link_copy", _STREAM, 1024, "link, transport sm: device memory and alias of host memory, either direction",
          (_DST, _SRC, _NBYTES), Demand(loads=True, stores=True, in_flight=64 * KIB), reference.copy),
    _cuda("link_read", _STREAM, 1024, "link, transport direct: read host memory in place", (_SUMS, _SRC, _NBYTES),
          Demand(loads=True, in_flight=64 * KIB), reference.read),
    _cuda("chase", _CHASE, 1, "device_latency: one thread, dependent loads, clocks in the kernel",
          (_pointer("out", "u64 [3]: last address, SM cycles, ns of globaltimer", 8),
           Argument("head", "pointer", "first node", 8), Argument("warm", "u64", "steps before the window"),
           Argument("loads", "u64", "steps in the window")),
          Demand(timed=True), reference.chase),
    _cuda("arithmetic", _ARITHMETIC, 512, "layer_overlap: FMA chains, no memory",
          (_pointer("out", "u64 [threads]: each thread's sum over its chains", 8),
           Argument("steps", "u64", "steps of 8 chains, below 2^24"), Argument("one", "f64", "1.0")),
          Demand(), reference.arithmetic),
    _cuda("empty", _LAUNCH, 1, "launch: what starting nothing costs", (), Demand(), None),
)  # fmt: skip

_TILE = 16384  # 32-bit words one program has in flight: 64 KiB, 8 loads of 16 bytes for each of 512 threads


def fragment_tile(fragment_bytes: int, both: bool) -> tuple[int, int]:
    """Return (ROWS, WORDS) of ``copy_fragments`` for fragments of ``fragment_bytes``: powers of two, 64 KiB a program.

    With K and V together each has half of it. Raises UsageError unless ``fragment_bytes`` is a multiple of 16.
    """
    if fragment_bytes <= 0 or fragment_bytes % 16:
        raise UsageError("not a fragment size", where="copy_fragments", got=fragment_bytes,
                         expected="a positive multiple of 16 bytes")  # fmt: skip
    words = _TILE // 2 if both else _TILE
    width = min(words, 1 << (fragment_bytes // 4 - 1).bit_length())
    return words // width, width


def fragments_kernel(fragment_bytes: int, both: bool, index: Literal["i32", "i64"] = "i64") -> GpuKernel:
    """Return ``copy_fragments`` compiled for fragments of ``fragment_bytes`` and indices of type ``index``."""
    rows, words = fragment_tile(fragment_bytes, both)
    arrays = [_pointer(n, f"int32 [slots, stride], {n[0].upper()}") for n in ("k_dst", "v_dst", "k_src", "v_src")]
    indices = [_pointer(n, f"{index} [count], negative: skip") for n in ("dst_index", "src_index")]
    numbers = [
        Argument("count", "i32", "pairs of slots"),
        Argument("size16", "i32", "bytes of a fragment / 16"),
        Argument("dst_stride16", "i64", "bytes from slot to slot / 16"),
        Argument("src_stride16", "i64", "bytes from slot to slot / 16"),
    ]
    size = f"{fragment_bytes // KIB}k" if fragment_bytes % KIB == 0 else f"{fragment_bytes}b"
    return GpuKernel(
        f"fragments_{'kv' if both else 'k'}_{size}_{index}",
        "triton",
        FOLDER / "fragments.py",
        "copy_fragments",
        512,
        f"copy of an index set, {'K and V' if both else 'one array'}, {size} fragments, {index} indices",
        (*arrays, *indices, *numbers),
        Demand(loads=True, stores=True, in_flight=64 * KIB),
        reference.copy_fragments,
        (*["*i32"] * 4, f"*{index}", f"*{index}", "i32", "i32", "i64", "i64"),
        (("ROWS", rows), ("WORDS", words), ("BOTH", int(both))),
    )


PAGE_THREADS = (256, 512, 1024)  # below, a thread would hold more of the 64 KiB than it has registers
_ACCESS = {16: ("i32", 4), 8: ("i64", 1), 4: ("i32", 1), 2: ("i16", 1), 1: ("i8", 1)}  # width: (element, elements)


def page_tile(row_bytes: int, both: bool, width: int = 16) -> tuple[int, int]:
    """Return (ROWS, WORDS) of ``copy_pages`` for rows of ``row_bytes`` by accesses of ``width`` bytes: powers of two.

    64 KiB a program by 16-byte accesses; narrower ones move as many elements as fit the same registers. K and V share
    it. Raises UsageError for a width there is no kernel for, or rows that are no multiple of it.
    """
    if width not in _ACCESS or row_bytes <= 0 or row_bytes % width:
        raise UsageError("not a row of whole accesses", where="copy_pages", got=f"{row_bytes} bytes by {width}",
                         expected=f"a multiple of the width, one of {', '.join(map(str, _ACCESS))}")  # fmt: skip
    elements = (_TILE if width == 16 else _TILE // 2) // (2 if both else 1)
    words = row_bytes // width * _ACCESS[width][1]
    across = min(elements, 1 << (words - 1).bit_length())
    return elements // across, across


def pages_kernel(
    row_bytes: int, both: bool, index: Literal["i32", "i64"] = "i64", threads: int = 1024, width: int = 16
) -> GpuKernel:
    """Return ``copy_pages`` compiled for rows of ``row_bytes`` by ``threads`` threads with accesses of ``width`` bytes.

    Rows of the same power of two share a kernel. Raises UsageError for another number of threads or what
    :func:`page_tile` refuses.
    """
    if threads not in PAGE_THREADS:
        raise UsageError("not a number of threads", where="copy_pages", got=threads,
                         expected=f"one of {', '.join(map(str, PAGE_THREADS))}")  # fmt: skip
    rows, words = page_tile(row_bytes, both, width)
    element, per = _ACCESS[width]
    pools = [_pointer(n, f"{element}, start of {n[0].upper()} in the pool", width)
             for n in ("k_dst", "v_dst", "k_src", "v_src")]  # fmt: skip
    tables = [_pointer(n, f"{index} [count], negative: skip", 4 if index == "i32" else 8)
              for n in ("dst_pages", "src_pages")]  # fmt: skip
    numbers = [
        Argument("count", "i32", "pairs of pages"),
        Argument("page_rows", "i32", "rows of a page and plane"),
        Argument("size", "i32", "accesses of a row"),
        Argument("inner", "i32", "rows of one outer step"),
        Argument("innermost", "i32", "rows of one middle step"),
    ]
    strides = [
        Argument(f"{side}_{step}", "i64", f"accesses from one {step} step to the next")
        for side in ("dst", "src") for step in ("page", "outer", "middle", "inner")
    ]  # fmt: skip
    size = f"{row_bytes // KIB}k" if row_bytes % KIB == 0 else f"{row_bytes}b"
    narrow = "" if width == 16 else f"_by{width}"
    wide = width == 16
    return GpuKernel(
        f"pages_{'kv' if both else 'k'}_{size}_{index}_{threads}{narrow}",
        "triton",
        FOLDER / "paged.py",
        "copy_pages",
        threads,
        f"pages between any two layouts, {'K and V' if both else 'one plane'}, {size} rows, {index} indices",
        (*pools, *tables, *numbers, *strides),
        Demand(loads=wide, stores=wide, in_flight=64 * KIB if wide else 0),
        reference.copy_pages,
        (*[f"*{element}"] * 4, f"*{index}", f"*{index}", *["i32"] * 5, *["i64"] * 8),
        (("ROWS", rows), ("WORDS", words), ("PER", per), ("BOTH", int(both))),
        # Left to itself ptxas spills at 80 registers for 256 threads, to fit a third block nobody starts.
        registers=min(255, 65536 // threads),
    )


def _read_sum(name: str, element: str, result: str, per16: int) -> GpuKernel:
    return GpuKernel(
        name,
        "triton",
        FOLDER / "fragments.py",
        "read_sum",
        512,
        f"read reduction over {element}",
        (_pointer("out", f"{result} [programs]"), _SRC, Argument("size16", "i64", "bytes / 16")),
        Demand(loads=True, in_flight=16 * KIB),
        reference.read_sum,
        (f"*{result}", f"*{element}", "i64"),
        (("ROWS", 8), ("COLS", 512 * per16), ("PER16", per16), ("ACC", "int32" if result == "i32" else "float32")),
    )


_TRITON = (
    fragments_kernel(64, True),
    fragments_kernel(4 * KIB, True),
    fragments_kernel(4 * KIB, True, "i32"),
    fragments_kernel(64 * KIB, True),
    fragments_kernel(64 * KIB, False),
    pages_kernel(256, True),
    pages_kernel(2 * KIB, True, "i32"),
    pages_kernel(2 * KIB, True, threads=256),
    pages_kernel(64 * KIB, True, threads=256),
    pages_kernel(64 * KIB, False),
    pages_kernel(24, True, width=8),
    _read_sum("read_sum_i32", "i32", "i32", 4),
    _read_sum("read_sum_bf16", "bf16", "fp32", 8),
)

KERNELS: dict[str, GpuKernel] = {k.name: k for k in (*_CUDA, *_TRITON)}


def service_kernels() -> dict[str, GpuKernel]:
    """Return the kernels of ``kvbench.kernels.cuda`` (blocker, flush, payload) for the gates every kernel keeps.

    They are held against blocks of 1024 threads, the most there can be; arguments and oracles are where they are used.
    """
    from kvbench.kernels.cuda.build import KERNELS as ENTRIES
    from kvbench.kernels.cuda.build import SERVICE

    return {e: GpuKernel(e, "cuda", SERVICE, e, 1024, "clock and buffers", (), Demand(), None) for e in ENTRIES}


def attention_kernels() -> dict[str, GpuKernel]:
    """Return the forms of attention and its projection that the gates look at; others are made by their own modules."""
    from kvbench.kernels.gpu import decode_kernels, prefill_kernels

    return {k.name: k for k in (*decode_kernels.GATED, *prefill_kernels.GATED)}


def gemm_kernels() -> dict[str, GpuKernel]:
    """Return the forms of the product with B far that the gates look at; any other is made by its own module."""
    from kvbench.kernels.gpu.gemm_kernels import GATED

    return {k.name: k for k in GATED}


def kernel(name: str) -> GpuKernel:
    """Return the kernel called ``name``. Raises UsageError for a name that is not in :data:`KERNELS`."""
    try:
        return KERNELS[name]
    except KeyError:
        raise UsageError("unknown GPU kernel", where="kernel", got=name, expected=", ".join(KERNELS)) from None
