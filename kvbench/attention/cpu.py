"""Paged decode attention on host cores: one stable call, everything checked before memory is touched.

    with Team([0, 1]) as team:
        attention = DecodeAttention(Shape("bf16", 32, 8, 128, 16), team)
        out, lse = attention.decode(q, k_cache, v_cache, table, lengths, k_new=k, v_new=v)

Arrays (numpy, C-contiguous; bfloat16 as uint16 bits, see :mod:`kvbench.attention.shapes`):

- ``q`` [batch, q_heads, head_dim] of the dtype; query head i belongs to KV head i // group;
- ``k_cache``, ``v_cache``: packed, :meth:`Shape.k_shape` and :meth:`Shape.v_shape`, made by :meth:`Shape.pack`;
- ``table`` int32 [batch, pages]: blocks of each sequence in order; ``lengths`` int32 [batch]: tokens to attend to;
- ``k_new``, ``v_new`` [batch, kv_heads, head_dim]: keys and values of each sequence's last token, written into slot
  ``lengths - 1`` of the cache by the call itself;
- returns ``out`` float32 [batch, q_heads, head_dim] and ``lse`` float32 [batch, q_heads], the natural logarithm of the
  sum of exponentials of the scaled scores; zeros and -inf for a sequence without tokens.

No array that is written (``out``, ``lse``, the caches when a token is appended) may overlap another one, ``q`` among
them: members of the team read and write at the same time. For the same reason a block that is appended to may stand in
the used part of the table only once; blocks that are only read may be shared.

Scores, weights and sums are float32, and so are the sums a score is made of: beyond that (3e38 after scaling) nothing
is promised but that a head all of whose scores are lost gives NaN, never the zeros and -inf of an empty sequence.
With AVX512-BF16 weights are rounded to bfloat16 for the sum over values, and subnormal bfloat16 counts as 0; elsewhere
elements are converted once a load and reused by all heads of the group.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvbench.attention.shapes import Array, Floats, Shape
from kvbench.errors import UsageError
from kvbench.model.paged import check_array, check_batch, pages_of

if TYPE_CHECKING:
    from kvbench.kernels.team import Team

Isa = Literal["auto", "avx512bf16", "avx512", "portable"]
Split = Literal["pages", "sequences"]
REGISTERS = {"avx512bf16": 24, "avx512": 24, "portable": 6}  # accumulators that fit beside operands: 32 zmm, or 16 ymm
MOST_SCALE = float(np.finfo(np.float32).max)  # scores are powers of two in float32: scale x log2(e)


def host_isas() -> tuple[str, ...]:
    """Return the instruction sets this CPU has kernels for, the best first. ``portable`` is always among them."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    found = []
    if features.get("avx512bf16") and features.get("avx512vl") and features.get("avx512dq"):
        found.append("avx512bf16")
    if features.get("avx512f"):
        found.append("avx512")
    return (*found, "portable")


def choose_isa(shape: Shape, isa: Isa = "auto") -> str:
    """Return the instruction set for ``shape``. Raises UsageError for one unknown, missing here or not for it."""
    usable = [name for name in host_isas() if name != "avx512bf16" or shape.dtype == "bf16"]
    if isa == "auto":
        return usable[0]
    if isa not in usable:
        raise UsageError(
            "instruction set", where="attention.isa", got=isa, expected=f"auto or one of {', '.join(usable)}",
            mend="avx512bf16 serves bf16 only" if isa in host_isas() else "",
        )  # fmt: skip
    return isa


@dataclass(frozen=True, slots=True)
class _Array:
    name: str
    array: Array
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    written: bool = False

    def check(self) -> None:
        a = self.array
        where = f"attention.{self.name}"
        check_array(a, where, f"{self.dtype} {self.shape}")
        if a.dtype != self.dtype:
            raise UsageError("wrong dtype", where=where, got=str(a.dtype), expected=str(self.dtype))
        if a.shape != self.shape:
            raise UsageError("wrong shape", where=where, got=str(a.shape), expected=str(self.shape))
        if not a.flags.c_contiguous:
            raise UsageError(
                "not contiguous", where=where, got=f"strides {a.strides}", expected="C order",
                mend="np.ascontiguousarray",
            )  # fmt: skip
        if a.ctypes.data % 4:
            raise UsageError("not aligned", where=where, got=hex(a.ctypes.data), expected="a multiple of 4 bytes")
        if self.written and not a.flags.writeable:
            raise UsageError("read-only", where=where, got="writeable False", expected="an array to write to")


class DecodeAttention:
    """Decode attention of ``shape`` on ``team``.

    ``isa``: ``auto`` takes the best of :func:`host_isas`. ``split``: ``pages`` cuts the pages of the whole batch into
    equal parts, so that one long sequence keeps all members busy; ``sequences`` gives each member whole sequences, as
    engines that thread over requests do. Raises UsageError for what does not exist here.
    """

    def __init__(self, shape: Shape, team: Team, *, isa: Isa = "auto", split: Split = "pages") -> None:
        from kvbench.kernels import attention as kernels
        from kvbench.kernels.attention_emit import BF16, FP16, FP32, Form

        if split not in ("pages", "sequences"):
            raise UsageError("unknown split", where="attention.split", got=split, expected="pages or sequences")
        self.shape, self.team, self.split = shape, team, split
        self.isa = choose_isa(shape, isa)
        code = {"fp32": FP32, "fp16": FP16, "bf16": BF16}[shape.dtype]
        form = Form(
            code, shape.group, shape.head_dim, shape.lanes, self.isa == "avx512bf16",
            REGISTERS[self.isa],
        )  # fmt: skip
        self.kernel = f"numba paged decode {shape.dtype} {self.isa} split by {split}"
        weigh, gather = kernels.compiled(form)
        self._kernels = kernels
        self._scratch_bytes = kernels.scratch_bytes(shape.kv_heads, form)
        self._scratch = _aligned(self._scratch_bytes * len(team), np.dtype(np.uint8))
        head_bytes = shape.page_bytes // shape.kv_heads
        ahead, again = kernels.prefetch_distances(head_bytes, shape.page_tokens > shape.lanes)
        self._fixed = {
            kernels.SCRATCH: self._scratch.ctypes.data, kernels.SCRATCH_BYTES: self._scratch_bytes,
            kernels.KV_HEADS: shape.kv_heads, kernels.GROUP: shape.group, kernels.HEAD_DIM: shape.head_dim,
            kernels.PAGE_TOKENS: shape.page_tokens, kernels.DTYPE: form.dtype, kernels.DOT: int(form.dot),
            kernels.LANES: form.lanes, kernels.STATE_BYTES: form.state_bytes,
            kernels.WEIGHTS_OFFSET: form.weights_offset, kernels.MAXIMA_OFFSET: form.maxima_offset,
            kernels.WEIGH: weigh.address, kernels.GATHER: gather.address,
            kernels.BY_SEQUENCE: int(split == "sequences"), kernels.AHEAD: ahead, kernels.AGAIN: again,
            kernels.HEAD_BYTES: head_bytes,
        }  # fmt: skip

    def decode(
        self, q: Array, k_cache: Array, v_cache: Array, table: Array, lengths: Array, *, k_new: Array | None = None,
        v_new: Array | None = None, scale: float | None = None, out: Floats | None = None, lse: Floats | None = None,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """Do one decode step and return ``out`` and ``lse``, the given arrays or new ones; see the module.

        ``scale`` multiplies the scores, 1 / sqrt(head_dim) by default. Raises UsageError, before memory is touched, for
        types, shapes, dtypes, strides, lengths or table entries that do not fit together, arrays that overlap where one
        is written, and a scale that is no float32.
        """
        step = self.prepare(
            q, k_cache, v_cache, table, lengths, k_new=k_new, v_new=v_new, scale=scale, out=out, lse=lse
        )  # fmt: skip
        step.run()
        return step.out, step.lse

    def prepare(
        self, q: Array, k_cache: Array, v_cache: Array, table: Array, lengths: Array, *, k_new: Array | None = None,
        v_new: Array | None = None, scale: float | None = None, out: Floats | None = None, lse: Floats | None = None,
    ) -> Step:  # fmt: skip
        """Check one decode step, as :meth:`decode` does, and return it ready to run any number of times."""
        shape = self.shape
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            check_array(cache, f"attention.{name}", f"a packed cache of {shape.array_dtype}, made by Shape.pack")
        if k_cache.ndim != 6 or v_cache.ndim != 5 or len(k_cache) != len(v_cache) or len(k_cache) == 0:
            raise UsageError(
                "caches", where="attention.k_cache", got=f"{k_cache.shape} and {v_cache.shape}",
                expected="Shape.k_shape(blocks) and Shape.v_shape(blocks)", mend="Shape.pack makes both",
            )  # fmt: skip
        blocks = len(k_cache)
        scale = self._checked_scale(scale)
        check_batch(table, lengths, shape.page_tokens, blocks)
        batch = len(lengths)
        heads = (batch, shape.q_heads)
        if out is None:
            out = np.empty((*heads, shape.head_dim), np.float32)
        if lse is None:
            lse = np.empty(heads, np.float32)
        dtype, floats = shape.array_dtype, np.dtype(np.float32)
        wanted = [
            _Array("q", q, (*heads, shape.head_dim), dtype),
            _Array("k_cache", k_cache, shape.k_shape(blocks), dtype, k_new is not None),
            _Array("v_cache", v_cache, shape.v_shape(blocks), dtype, v_new is not None),
            _Array("out", out, (*heads, shape.head_dim), floats, True),
            _Array("lse", lse, heads, floats, True),
        ]
        if (k_new is None) != (v_new is None):
            raise UsageError("k_new and v_new go together", where="attention.k_new", expected="both or none")
        for name, new in (("k_new", k_new), ("v_new", v_new)):
            if new is not None:
                wanted.append(_Array(name, new, (batch, shape.kv_heads, shape.head_dim), dtype))
        for each in wanted:
            each.check()
        _check_apart(wanted, {"table": table, "lengths": lengths})
        if k_new is not None:
            _check_appended(table, lengths, shape.page_tokens)
        return Step(self, q, k_cache, v_cache, table, lengths, k_new, v_new, scale, out, lse)

    def _checked_scale(self, scale: float | None) -> float:
        if scale is None:
            return 1.0 / math.sqrt(self.shape.head_dim)
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise UsageError(
                "scale is not a number", where="attention.scale", got=f"{type(scale).__name__} {scale!r}",
                expected="a float",
            )  # fmt: skip
        try:
            value = float(scale)
        except OverflowError:
            value = math.inf
        if not abs(self._kernels.log2_scale(value)) <= MOST_SCALE:
            raise UsageError(
                "scale", where="attention.scale", got=scale,
                expected="a finite number whose product with log2(e) is a float32",
            )  # fmt: skip
        return value


def _check_apart(arrays: list[_Array], read: dict[str, Array]) -> None:
    """Raise UsageError where an array that is written overlaps any other one."""
    every = {each.name: each.array for each in arrays} | read
    for each in arrays:
        for name, other in every.items():
            # all are contiguous, so that bounds that meet are bytes that meet
            if each.written and name != each.name and np.may_share_memory(each.array, other):
                raise UsageError(
                    "arrays overlap", where=f"attention.{each.name}", got=f"memory of {name}",
                    expected="memory of its own, as it is written",
                )  # fmt: skip


def _check_appended(table: Array, lengths: Array, page_tokens: int) -> None:
    """Raise UsageError where a token cannot be appended: an empty sequence, or a block that is in the table twice."""
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise UsageError(
            "lengths include the new token", where=f"attention.lengths[{empty[0]}]", got=0, expected="1 or more"
        )
    pages = pages_of(lengths, page_tokens)
    last = table[np.arange(len(table)), pages - 1]
    if len(np.unique(last)) != len(last):
        raise UsageError(
            "two sequences would append to one block", where="attention.table", got=np.sort(last).tolist()[:8],
            expected="different last blocks",
        )  # fmt: skip
    # Another member may read the block before or after the token is in it: the result would depend on who is first.
    earlier = np.arange(table.shape[1]) < pages[:, None] - 1
    again = np.isin(table, last) & earlier
    if again.any():
        b, i = np.argwhere(again)[0].tolist()
        raise UsageError(
            "a block that is appended to is an earlier page too", where=f"attention.table[{b}, {i}]",
            got=int(table[b, i]), expected="a block that is no sequence's last", mend="copy the block before appending",
        )  # fmt: skip


def _aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """Return a zeroed array of ``count`` items that begins at a multiple of 64 bytes."""
    raw = np.zeros(count * dtype.itemsize + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + count * dtype.itemsize].view(dtype)


class Step:
    """A checked decode step. It holds its arrays; ``out`` and ``lse`` are what the latest run left."""

    def __init__(
        self, attention: DecodeAttention, q: Array, k_cache: Array, v_cache: Array, table: Array, lengths: Array,
        k_new: Array | None, v_new: Array | None, scale: float, out: Floats, lse: Floats,
    ) -> None:  # fmt: skip
        shape, kernels = attention.shape, attention._kernels
        self.attention, self.out, self.lse = attention, out, lse
        pages = int(pages_of(lengths, shape.page_tokens).sum())
        self.work_items = pages if attention.split == "pages" else int(np.count_nonzero(lengths))
        tokens = int(lengths.sum(dtype=np.int64))
        self.kv_bytes = tokens * shape.token_bytes
        self.flops = 4 * tokens * shape.q_heads * shape.head_dim
        self._flat = np.zeros(pages + 1, np.int64)
        self._arrived = _aligned(8, np.dtype(np.int64))
        self._words = _aligned(kernels.WORDS, np.dtype(np.int64))
        self._held = (q, k_cache, v_cache, table, lengths, k_new, v_new)
        numbers = {
            **attention._fixed, kernels.Q: q.ctypes.data, kernels.K_CACHE: k_cache.ctypes.data,
            kernels.V_CACHE: v_cache.ctypes.data, kernels.TABLE: table.ctypes.data, kernels.TABLE_ROW: table.shape[1],
            kernels.LENGTHS: lengths.ctypes.data, kernels.OUT: out.ctypes.data, kernels.LSE: lse.ctypes.data,
            kernels.FLAT: self._flat.ctypes.data, kernels.BATCH: len(q), kernels.ARRIVED: self._arrived.ctypes.data,
            kernels.K_NEW: 0 if k_new is None else k_new.ctypes.data,
            kernels.V_NEW: 0 if v_new is None else v_new.ctypes.data,
        }  # fmt: skip
        for place, number in numbers.items():
            self._words[place] = number
        self._words.view(np.float64)[kernels.SCALE] = kernels.log2_scale(scale)

    def run(self) -> float:
        """Do the step and return the seconds from the release of the team to its last arrival.

        The table and the lengths are read again: their contents must still be what was checked.
        """
        self._arrived[0] = 0
        return self.attention.team.run(self.attention._kernels.attend, int(self._words.ctypes.data))
