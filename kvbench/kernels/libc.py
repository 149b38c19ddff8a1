"""Addresses of the C functions kernels call. They travel as arguments: a baked-in address would break cached code."""

from __future__ import annotations

import ctypes
import time
from functools import cache

CLOCK = int(time.CLOCK_MONOTONIC)  # the clock of time.perf_counter on Linux


@cache
def address_of(name: str) -> int:
    """Return the address of libc's ``name``. Raises AttributeError for a function libc does not have.

    For memcpy this is the implementation glibc selected for this CPU, the one every C program gets.
    """
    function = getattr(ctypes.CDLL(None), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0
