"""The Linux calls Python does not wrap: anonymous mappings at fixed addresses, residency, NUMA policy, statx, statfs.

Every function raises ``OSError`` with errno and the call's name; nothing here decides what a failure means.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

import numpy as np

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_HUGETLB = 0x1, 0x2, 0x10, 0x20, 0x4000, 0x40000
MADV_NORMAL, MADV_RANDOM, MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE = 0, 1, 4, 14, 15
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND = 0, 1, 2
STATX_DIOALIGN = 0x2000  # Linux 6.1
MAX_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.syscall.restype = ctypes.c_long

# mmap(2) hides these behind libnuma; numbers from the kernel's syscall tables (asm-generic covers aarch64, riscv64).
_GENERIC = {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239}
_SYSCALLS: dict[str, dict[str, int]] = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
    "ppc64le": {"mbind": 259, "get_mempolicy": 260, "set_mempolicy": 261, "move_pages": 301},
}


def _fail(call: str, code: int | None = None) -> OSError:
    code = ctypes.get_errno() if code is None else code
    return OSError(code, f"{call}: {os.strerror(code)}")


def base_page_bytes() -> int:
    """Return the size of a base page in bytes (4096 on x86, often 65536 on arm64 servers)."""
    return os.sysconf("SC_PAGE_SIZE")


def mmap(address: int, nbytes: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Return the address of a new mapping; ``address`` 0 lets the kernel choose."""
    got = _libc.mmap(address, nbytes, prot, flags, fd, offset)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise _fail("mmap")
    return int(got)


def munmap(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes) != 0:
        raise _fail("munmap")


def madvise(address: int, nbytes: int, advice: int) -> None:
    if _libc.madvise(address, nbytes, advice) != 0:
        raise _fail("madvise")


def resident_pages(address: int, nbytes: int) -> int:
    """Return how many base pages of a page-aligned range ``mincore`` reports.

    A private anonymous page that was only read counts too (the shared zero page); a file page counts when it is in the
    page cache. Raises ``OSError`` ENOMEM when part of the range is not mapped.
    """
    page = base_page_bytes()
    total, window = 0, 1 << 30
    for start in range(0, nbytes, window):
        length = min(window, nbytes - start)
        vector = np.zeros((length + page - 1) // page, np.uint8)
        if _libc.mincore(address + start, length, vector.ctypes.data) != 0:
            raise _fail("mincore")
        total += int(np.count_nonzero(vector & 1))
    return total


def _syscall(name: str, *args: int) -> int:
    number = _SYSCALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(38, f"{name}: no system call number known for {platform.machine()}")
    result = int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in args)))
    if result < 0:
        raise _fail(name)
    return result


def _mask(nodes: Sequence[int]) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = (ctypes.c_ulong * (MAX_NODES // bits))()
    for node in nodes:
        if not 0 <= node < MAX_NODES:
            raise OSError(22, f"node {node} is outside 0..{MAX_NODES - 1}")
        words[node // bits] |= 1 << (node % bits)
    return words


def mbind(address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> None:
    mask = _mask(nodes)
    _syscall("mbind", address, nbytes, mode, ctypes.addressof(mask), MAX_NODES + 1, 0)


def set_mempolicy(mode: int, nodes: Sequence[int]) -> None:
    mask = _mask(nodes)
    _syscall("set_mempolicy", mode, ctypes.addressof(mask) if nodes else 0, MAX_NODES + 1 if nodes else 0)


def get_mempolicy() -> tuple[int, tuple[int, ...]]:
    """Return this thread's policy as (mode, nodes)."""
    mode, mask = ctypes.c_int(0), _mask(())
    _syscall("get_mempolicy", ctypes.addressof(mode), ctypes.addressof(mask), MAX_NODES, 0, 0)
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    return mode.value, tuple(n for n in range(MAX_NODES) if mask[n // bits] >> (n % bits) & 1)


def page_nodes(addresses: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return, per page address, the node holding it; -errno where there is none (-2 not present, -14 zero page)."""
    pointers = np.ascontiguousarray(addresses, np.uint64)
    status = np.full(pointers.size, -2, np.int32)
    if pointers.size:
        _syscall("move_pages", 0, pointers.size, pointers.ctypes.data, 0, status.ctypes.data, 0)
    return status


def dio_alignment(fd: int) -> tuple[int, int] | None:
    """Return (memory, offset) alignment in bytes O_DIRECT needs on this file, (0, 0) where the file refuses it.

    None: the kernel (before 6.1), the C library or the file system does not say. Offsets: struct statx, linux/stat.h.
    """
    if not hasattr(_libc, "statx"):
        return None
    buffer = (ctypes.c_uint32 * 64)()
    if _libc.statx(fd, b"", 0x1000, STATX_DIOALIGN, ctypes.byref(buffer)) != 0 or not buffer[0] & STATX_DIOALIGN:
        return None
    return buffer[38], buffer[39]


def statfs_magic(path: str) -> int:
    """Return f_type of the file system holding ``path``."""
    buffer = (ctypes.c_long * 32)()
    if _libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        raise _fail("statfs")
    return int(buffer[0]) & 0xFFFFFFFF
