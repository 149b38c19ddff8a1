"""The shape of a decode step and how its keys and values lie in memory; pack and unpack, both public."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.model.paged import check_array

Dtype = Literal["fp32", "fp16", "bf16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
HEAD_DIMS = (64, 80, 96, 128, 256)
MOST_GROUP = 16
LEAST_PAGE, MOST_PAGE = 8, 256
# numpy has no bfloat16: its bits travel as uint16
ARRAYS: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16),
}  # fmt: skip

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return the bits of ``values`` rounded to bfloat16, to nearest and even; NaN stays NaN."""
    floats = np.asarray(values, np.float32, order="C")
    bits = floats.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(floats), np.uint16(0x7FC0), rounded)


def from_bf16(bits: Array) -> Floats:
    """Return the float32 values of bfloat16 ``bits`` (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True, slots=True)
class Shape:
    """``q_heads`` query heads share ``kv_heads`` KV heads of ``head_dim``; pages of ``page_tokens``.

    Raises UsageError for what the kernels do not serve: dtype fp32 | fp16 | bf16, 1 to 16 query heads a KV head,
    head_dim 64, 80, 96, 128 or 256, pages of 8 to 256 tokens in steps of 8.
    """

    dtype: Dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise UsageError("unknown dtype", where="attention.dtype", got=self.dtype, expected=" ".join(DTYPES))
        for name in ("q_heads", "kv_heads", "head_dim", "page_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise UsageError(
                    "not a whole number", where=f"attention.{name}", got=f"{type(value).__name__} {value!r}",
                    expected="an int",
                )  # fmt: skip
            object.__setattr__(self, name, int(value))  # sizes made of a narrow numpy integer would overflow
        if self.kv_heads < 1 or self.q_heads < 1 or self.q_heads % self.kv_heads:
            raise UsageError(
                "query heads do not divide by KV heads", where="attention.q_heads",
                got=f"{self.q_heads} and {self.kv_heads}", expected="a multiple of kv_heads, both at least 1",
            )  # fmt: skip
        if self.group > MOST_GROUP:
            raise UsageError(
                "too many query heads a KV head", where="attention.q_heads", got=self.group, expected="1..16"
            )
        if self.head_dim not in HEAD_DIMS:
            raise UsageError(
                "head_dim", where="attention.head_dim", got=self.head_dim, expected=", ".join(map(str, HEAD_DIMS))
            )
        if not LEAST_PAGE <= self.page_tokens <= MOST_PAGE or self.page_tokens % 8:
            raise UsageError(
                "page size", where="attention.page_tokens", got=self.page_tokens, expected="8..256 tokens, steps of 8"
            )

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """The numpy type of an element; bfloat16 travels as uint16."""
        return ARRAYS[self.dtype]

    @property
    def pair(self) -> int:
        """Elements that lie side by side: 2 for bf16 (the dot product takes pairs), else 1."""
        return 2 if self.dtype == "bf16" else 1

    @property
    def lanes(self) -> int:
        """Tokens whose keys lie side by side."""
        return 16 if self.page_tokens % 16 == 0 else 8

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, all KV heads."""
        return 2 * self.kv_heads * self.head_dim * self.array_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys, or of values, over all KV heads: the fragment a step reads."""
        return self.token_bytes * self.page_tokens // 2

    def k_shape(self, blocks: int) -> tuple[int, ...]:
        """Return the packed shape of keys: [block, kv_head, token / lanes, dim / pair, lanes, pair]."""
        lanes, pair = self.lanes, self.pair
        return (blocks, self.kv_heads, self.page_tokens // lanes, self.head_dim // pair, lanes, pair)

    def v_shape(self, blocks: int) -> tuple[int, ...]:
        """Return the packed shape of values: [block, kv_head, token / pair, dim, pair]."""
        return (blocks, self.kv_heads, self.page_tokens // self.pair, self.head_dim, self.pair)

    def plain_shape(self, blocks: int) -> tuple[int, int, int, int]:
        """Return the plain shape: [block, kv_head, token, dim]."""
        return (blocks, self.kv_heads, self.page_tokens, self.head_dim)

    def array(self, values: npt.ArrayLike) -> Array:
        """Return ``values`` (numbers) rounded to the dtype."""
        return to_bf16(values) if self.dtype == "bf16" else np.asarray(values).astype(self.array_dtype)

    def floats(self, array: Array) -> Floats:
        """Return the float32 values of an array of the dtype; exact."""
        return from_bf16(array) if self.dtype == "bf16" else array.astype(np.float32)

    def pack(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return plain keys and values [block, kv_head, token, dim] in the packed layout, as copies.

        Raises UsageError for another shape or dtype, and for keys and values of different numbers of blocks.
        """
        for name, array in (("k", k), ("v", v)):
            check_array(array, f"pack.{name}", f"{self.array_dtype} [block, kv_head, token, dim]")
            if array.ndim != 4 or array.shape != self.plain_shape(len(array)) or array.dtype != self.array_dtype:
                raise UsageError(
                    "plain cache", where=f"pack.{name}", got=f"{array.dtype} {array.shape}",
                    expected=f"{self.array_dtype} [block, {self.kv_heads}, {self.page_tokens}, {self.head_dim}]",
                )  # fmt: skip
        _check_pair("pack", k, v)
        n, heads, tokens, dim = k.shape
        split = k.reshape(n, heads, tokens // self.lanes, self.lanes, dim // self.pair, self.pair)
        pairs = v.reshape(len(v), heads, tokens // self.pair, self.pair, dim)
        return np.ascontiguousarray(split.transpose(0, 1, 2, 4, 3, 5)), np.ascontiguousarray(pairs.swapaxes(3, 4))

    def unpack(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return packed keys and values as plain [block, kv_head, token, dim], as copies. Inverse of :meth:`pack`.

        Also takes some of the KV heads, or some of the blocks, the same of both. Raises UsageError for another layout
        or dtype, and for keys and values of different numbers of blocks or heads.
        """
        for name, array, wanted in (("k", k, self.k_shape(1)), ("v", v, self.v_shape(1))):
            check_array(array, f"unpack.{name}", f"{self.array_dtype}, packed")
            if array.ndim != len(wanted) or array.shape[2:] != wanted[2:] or array.dtype != self.array_dtype:
                raise UsageError(
                    "packed cache", where=f"unpack.{name}", got=f"{array.dtype} {array.shape}",
                    expected=f"{self.array_dtype} [block, kv_head, {', '.join(map(str, wanted[2:]))}]",
                )  # fmt: skip
        _check_pair("unpack", k, v)
        dims = (self.page_tokens, self.head_dim)
        plain_k = np.ascontiguousarray(k.transpose(0, 1, 2, 4, 3, 5)).reshape(*k.shape[:2], *dims)
        plain_v = np.ascontiguousarray(v.swapaxes(3, 4)).reshape(*v.shape[:2], *dims)
        return plain_k, plain_v


def _check_pair(where: str, k: Array, v: Array) -> None:
    if k.shape[:2] != v.shape[:2]:
        raise UsageError(
            "keys and values differ in blocks or heads", where=where,
            got=f"{k.shape[0]} x {k.shape[1]} and {v.shape[0]} x {v.shape[1]}", expected="the same number of both",
        )  # fmt: skip
