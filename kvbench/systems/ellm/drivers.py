"""The driver under a pool: host memory, or the GPU of an open service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvbench.errors import Unavailable
from kvbench.memory.cuda.service import Service
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import Driver
from kvbench.memory.vmm.host import HostVmm
from kvbench.memory.vmm.touch import CudaTouch, HostTouch, Touch
from kvbench.systems.ellm.backing import Policy, Sizes
from kvbench.systems.ellm.pool import ElasticPool


def open_driver(
    enter: Callable[[AbstractContextManager[Any]], Any], total: int, chunk_bytes: int, service: Service | None
) -> tuple[Driver, Touch]:
    """Return a driver with room for ``total`` bytes, and who touches what it maps; ``enter`` keeps it open.

    ``service``: of the GPU that has the memory, None for host memory. Raises Unavailable without that much memory, and
    where chunks of ``chunk_bytes`` cannot be had.
    """
    if service is None:
        host: Driver = enter(HostVmm(total))
        touch: Touch = HostTouch()
        _check(host, chunk_bytes)
        return host, touch
    cuda = CudaVmm(service.device)
    _check(cuda, chunk_bytes)
    free, _ = service.device.memory()
    if total > free:
        raise Unavailable("not enough GPU memory", where="vmm cuda", got=f"{free} bytes free", expected=f"{total}")
    enter(cuda)
    return cuda, CudaTouch(cuda, service)


@contextmanager
def case_pool(vmm: Driver, sizes: Sizes, policy: Policy | None = None) -> Iterator[ElasticPool]:
    """A pool for one case, which closes it when all went well; what is left of it otherwise goes with the block."""
    pool = ElasticPool(vmm, sizes, policy)
    try:
        yield pool
    finally:
        pool.discard()


def _check(driver: Driver, chunk_bytes: int) -> None:
    grain = driver.granularity()
    if chunk_bytes % grain:
        raise Unavailable(
            "chunks off the granularity", where=f"vmm {driver.name}", got=f"{chunk_bytes} bytes",
            expected=f"a multiple of {grain}",
        )  # fmt: skip
