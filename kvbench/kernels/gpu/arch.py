"""The architectures every kernel is compiled for, and the limits its machine code is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UsageError

_CCCL = "NVIDIA/cccl cudax/include/cuda/experimental/__device/arch_traits.cuh (max_shared_memory_per_block_optin)"
_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
_CDNA3 = "AMD Instinct MI300 (CDNA3) ISA reference, LDS 64 KiB a workgroup, 512 VGPRs a lane of each of 4 SIMDs"


@dataclass(frozen=True, slots=True)
class Arch:
    """One target: ``name`` as compilers and tables spell it, ``number`` as Triton wants it (90 stands for sm_90a).

    ``shared_limit``: bytes of shared memory one block can have (static and dynamic, after opting in);
    ``static_limit``: bytes it can have without opting in; ``register_limit``: 32-bit registers of one block;
    ``source`` says where the limits come from.
    """

    name: str
    backend: Literal["cuda", "hip"]
    number: int | str
    warp: int
    shared_limit: int
    static_limit: int
    register_limit: int
    source: str

    @property
    def matrix(self) -> str:
        """``mma`` (a warp's), ``wgmma`` (a warp group's, Hopper), ``tcgen05`` (data-centre Blackwell) or ``mfma``."""
        return {90: "wgmma", 100: "tcgen05"}.get(self.number, "mma") if isinstance(self.number, int) else "mfma"


def _nvidia(name: str, number: int, shared_kib: int, source: str) -> Arch:
    return Arch(name, "cuda", number, 32, shared_kib << 10, 48 << 10, 65536, source)


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        _nvidia("sm_75", 75, 64, _CCCL),
        _nvidia("sm_80", 80, 163, _CCCL),
        _nvidia("sm_86", 86, 99, _CCCL),
        _nvidia("sm_89", 89, 99, _CCCL),
        _nvidia("sm_90a", 90, 227, _CCCL),
        _nvidia("sm_100a", 100, 227, _GUIDE),
        _nvidia("sm_120a", 120, 99, _GUIDE),
        Arch("gfx942", "hip", "gfx942", 64, 64 << 10, 64 << 10, 4 * 512 * 64, _CDNA3),
    )
}


def arch(name: str) -> Arch:
    """Return the architecture called ``name``. Raises UsageError for a name that is not in :data:`ARCHS`."""
    try:
        return ARCHS[name]
    except KeyError:
        raise UsageError("unknown architecture", where="arch", got=name, expected=", ".join(ARCHS)) from None
