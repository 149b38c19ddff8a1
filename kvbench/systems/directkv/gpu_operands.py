"""The matrices of the product on a GPU: where each lies, how it is stored, and the proof of what was computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.gpu.gemm_kernels import ITEM, Compute, error_bound
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned, pointer_facts
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.shapes import ceil_div

Enter = Callable[[AbstractContextManager[Any]], Any]
Array = np.ndarray[Any, Any]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Place = Literal["near", "far"]
PROJECTIONS = 8  # vectors the product is compared on: a full float64 product of n = 10240 takes minutes
ROWS = 256  # made, rounded and stored at a time
POISON = 0xFF  # of C: not a number


def bf16_bits(values: Floats) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return float32 ``values`` rounded to the nearest bfloat16, ties to even, as its bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def bf16_values(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> Floats:
    """Return what bfloat16 ``bits`` stand for, float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tf32_values(values: Floats) -> Floats:
    """Return float32 ``values`` rounded to the nearest number of ten bits of mantissa, ties to even.

    Matrix instructions cut or round what they are given, by architecture; of these there is nothing to cut.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0xFFF + (bits >> np.uint64(13) & np.uint64(1))) & np.uint64(0xFFFFE000)
    return kept.astype(np.uint32).view(np.float32)


def padded(elements: int, compute: Compute) -> int:
    """Return the elements of a row in whole 16 bytes."""
    per = 16 // ITEM[compute]
    return ceil_div(elements, per) * per


@dataclass(frozen=True, slots=True)
class Slab:
    """Columns [first, first + width) of B in one piece: ``offset`` bytes from the start, rows of ``ld`` elements."""

    first: int
    width: int
    offset: int
    nbytes: int
    ld: int


def slabs_of(n: int, k: int, compute: Compute, columns: int) -> tuple[Slab, ...]:
    """Return B cut into slabs of ``columns`` columns (the last has fewer), one behind the other.

    For `simt` a slab is row-major with rows of its own, so that a copy of it is one piece; for the matrix instructions
    B is stored by columns and every slab is. Raises UsageError below one column.
    """
    if columns < 1:
        raise UsageError("a slab without columns", where="gemm staging", got=columns)
    made: list[Slab] = []
    offset = 0
    for first in range(0, n, columns):
        width = min(columns, n - first)
        ld = padded(width, compute) if compute == "simt" else padded(k, compute)
        nbytes = (k if compute == "simt" else width) * ld * ITEM[compute]
        made.append(Slab(first, width, offset, nbytes, ld))
        offset += nbytes
    return tuple(made)


def require_alias(device: Device, address: int | None, where: str = "far operand") -> int:
    """Return ``address`` if a kernel on ``device`` may read it in place: device memory, or the device's alias of
    page-locked memory.

    Raises UsageError for a host address that is not the alias: where the two differ a kernel would fault or, worse,
    read something else; and for memory the driver does not know.
    """
    if address is None:
        raise UsageError("a kernel cannot read pageable memory in place", where=where, expected="page-locked memory",
                         mend="pin it, or use swap")  # fmt: skip
    facts = pointer_facts(device, address)
    if facts.device_pointer is None:
        raise UsageError("the driver does not know this address", where=where, got=hex(address),
                         expected="device memory or page-locked host memory", mend="pin it, or use swap")  # fmt: skip
    if facts.device_pointer != address:
        raise UsageError("a host address, not the device's alias of it", where=where, got=hex(address),
                         expected=hex(facts.device_pointer), mend="pass the device address of the buffer")  # fmt: skip
    return address


class Operands:
    """A [m, k] and C [m, n] near, B [k, n] near or far, as ``compute`` wants them; random values of ``seed``.

    ``far``: B lies in page-locked host memory. ``slabs`` says how B is stored. Padding is zero. C is float32 with rows
    of ``ldc`` elements. Raises UsageError for dimensions below 1, Unavailable beyond 32 bits or without memory.
    """

    def __init__(
        self, service: Service, enter: Enter, m: int, n: int, k: int, compute: Compute, place: Place, columns: int,
        seed: int,
    ) -> None:  # fmt: skip
        for name, value in (("m", m), ("n", n), ("k", k)):
            if value < 1:
                raise UsageError("a product without elements", where=f"gemm {name}", got=value, expected="1 or more")
            if value >= 1 << 31:
                raise Unavailable("a dimension beyond 32 bits", where=f"gemm {name}", got=value,
                                  expected="at most 2147483647")  # fmt: skip
        self.m, self.n, self.k, self.compute, self.place = m, n, k, compute, place
        self._service, self._seed = service, seed
        self.lda, self.ldc = padded(k, compute), ceil_div(n, 4) * 4
        self.slabs = slabs_of(n, k, compute, columns)
        item = ITEM[compute]
        self.b_bytes = self.slabs[-1].offset + self.slabs[-1].nbytes
        self.a: GpuBuffer = enter(hbm(service, m * self.lda * item, seed=seed))
        self.c: GpuBuffer = enter(hbm(service, m * self.ldc * 4, seed=seed + 1))
        self.b: GpuBuffer = enter((pinned if place == "far" else hbm)(service, self.b_bytes, seed=seed + 2))
        self.flags = self.b.flags
        self._project = np.random.default_rng(seed + 3).standard_normal((n, PROJECTIONS))
        self._wanted = self._fill_a(self._fill_b())
        require_alias(service.device, self.b.device_address)

    @property
    def b_address(self) -> int:
        """Where a kernel reads B."""
        return require_alias(self._service.device, self.b.device_address)

    def _random(self, rows: int, columns: int, seed: tuple[int, int, int]) -> Floats:
        return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)

    def _stored(self, values: Floats, ld: int) -> tuple[Array, Floats]:
        """Return ``values`` as they are stored with rows of ``ld`` elements, and what the stored ones stand for."""
        kept = np.zeros((len(values), ld), np.uint16 if self.compute == "bf16" else np.float32)
        if self.compute == "bf16":
            bits = bf16_bits(values)
            kept[:, : values.shape[1]] = bits
            return kept, bf16_values(bits)
        if self.compute == "tf32":
            values = tf32_values(values)
        kept[:, : values.shape[1]] = values
        return kept, values

    def _write(self, buffer: GpuBuffer, offset: int, values: Array) -> None:
        if buffer.tier == "hbm":
            self._service.write(buffer.copy_address + offset, np.ascontiguousarray(values))
        else:
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            buffer.array()[offset : offset + raw.size] = raw

    def _fill_b(self) -> Array:
        """Store B slab by slab; return B times the projections, float64 [k, PROJECTIONS]."""
        product = np.zeros((self.k, PROJECTIONS))
        for number, slab in enumerate(self.slabs):
            part = self._project[slab.first : slab.first + slab.width]
            rows, columns = (self.k, slab.width) if self.compute == "simt" else (slab.width, self.k)
            for start in range(0, rows, ROWS):
                high = min(ROWS, rows - start)
                kept, values = self._stored(self._random(high, columns, (self._seed, 2 + number, start)), slab.ld)
                self._write(self.b, slab.offset + start * slab.ld * ITEM[self.compute], kept)
                if self.compute == "simt":
                    product[start : start + high] += values.astype(np.float64) @ part
                else:
                    product += values.astype(np.float64).T @ part[start : start + high]
        return product

    def _fill_a(self, product: Array) -> Array:
        """Store A; return A B times the projections, float64 [m, PROJECTIONS]."""
        wanted = np.empty((self.m, PROJECTIONS))
        for start in range(0, self.m, ROWS):
            high = min(ROWS, self.m - start)
            kept, values = self._stored(self._random(high, self.k, (self._seed, 1, start)), self.lda)
            self._write(self.a, start * self.lda * ITEM[self.compute], kept)
            wanted[start : start + high] = values.astype(np.float64) @ product
        return wanted

    def poison(self) -> None:
        """Make C something no product leaves, and wait for it."""
        self._service.stream.set_bytes(self.c.copy_address, POISON, self.c.nbytes)
        self._service.stream.synchronize()

    def error(self, c: GpuBuffer | None = None) -> float:
        """Return the Frobenius norm of C - ref over that of ref, estimated on ``PROJECTIONS`` random vectors.

        ``c``: another buffer of C's rows and pitch. ref is the float64 product of the inputs as they are stored. The
        expected square of the norm of a matrix times a standard normal vector is the square of its Frobenius norm, so
        the estimate is of the norm itself. Not a number where C holds one.
        """
        held, found = (c or self.c).copy_address, np.empty((self.m, PROJECTIONS))
        for start in range(0, self.m, ROWS):
            high = min(ROWS, self.m - start)
            raw = self._service.read(held + 4 * start * self.ldc, 4 * high * self.ldc)
            rows = raw.view(np.float32).reshape(high, self.ldc)[:, : self.n]
            with np.errstate(invalid="ignore", over="ignore"):
                found[start : start + high] = rows.astype(np.float64) @ self._project
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.linalg.norm(found - self._wanted) / np.linalg.norm(self._wanted))

    def check(self) -> float:
        """Return :meth:`error`. Raises VerifyError beyond the bound of the arithmetic, or where it is not a number."""
        error, bound = self.error(), error_bound(self.compute, self.k)
        if not error <= bound:
            raise VerifyError("the product is wrong", where=f"gemm {self.compute} {self.m} x {self.n} x {self.k}",
                              got=f"an error of {error:.2e}", expected=f"at most {bound:.2e}")  # fmt: skip
        return error
