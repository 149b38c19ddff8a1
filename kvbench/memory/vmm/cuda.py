"""The CUDA driver: cuMem* from compiled loops, every code checked, nothing unmapped under work that may read it.

Handles are multiples of what cuMemGetAllocationGranularity says (2 MiB on the discrete GPUs known so far). None of this
has run on a GPU yet: the sequences are tested on a fake driver built against the real header.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.memory.cuda.device import Device, Event, Stream
from kvbench.memory.cuda.driver import PoisonedDevice
from kvbench.memory.cuda.entries import CONSTANTS, MemAccessDesc, MemAllocationProp, MemLocation
from kvbench.memory.vmm.book import Claim
from kvbench.memory.vmm.driver import Driver, rows
from kvbench.memory.vmm.protocol import Chunk, Counters, Exhausted, Reservation, VmmError
from kvbench.memory.vmm.ranges import Ints

if TYPE_CHECKING:
    from kvbench.kernels.call_loop import Failure, Runner

PINNED, ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
NO_ACCESS, READ_WRITE = 0, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
POINTER_MAPPED = 13  # CU_POINTER_ATTRIBUTE_MAPPED
CALLS = {
    "create": "cuMemCreate", "release": "cuMemRelease", "map": "cuMemMap", "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap",
}  # fmt: skip


class EventFence:
    """What ``stream`` was given until now: an event recorded on it."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._event = Event(device)
        try:
            stream.record(self._event)
        except BaseException:
            self._event.close()
            raise

    def done(self) -> bool:
        """Return whether the stream has come to the event. Raises CudaError for what went wrong on it."""
        if self._event.handle is None:
            return True
        code = self._device.driver.code("cuEventQuery", self._event.handle)
        if code not in (0, CONSTANTS["CUDA_ERROR_NOT_READY"]):
            raise self._device.driver.error("cuEventQuery", code)
        return code == 0

    def wait(self) -> None:
        """Return once the stream has come to the event. Raises CudaError."""
        if self._event.handle is not None:
            self._event.synchronize()

    def close(self) -> None:
        """Destroy the event. Closing twice is fine."""
        self._event.close()


class CudaVmm(Driver):
    """Device memory of ``device`` in handles, mapped into reserved device addresses.

    ``granularity``: what sizes are multiples of, at least the driver's own and the default. ``runner`` makes the calls
    (default: a compiled loop in the calling thread). Raises Unavailable where the driver lacks cuMem*, UsageError for
    a granularity off the driver's.
    """

    name = "cuda"

    def __init__(self, device: Device, *, granularity: int | None = None, runner: Runner | None = None) -> None:
        self.device = device
        self._prop = MemAllocationProp(type=PINNED, location=MemLocation(ON_DEVICE, device.ordinal))
        self._open, self._shut = (
            MemAccessDesc(MemLocation(ON_DEVICE, device.ordinal), flags) for flags in (READ_WRITE, NO_ACCESS)
        )
        least = self._least()
        grain = least if granularity is None else granularity
        if grain < least or grain % least:
            raise UsageError(
                "granularity off the driver's", where="vmm cuda", got=f"{grain} bytes",
                expected=f"a multiple of {least} bytes",
            )  # fmt: skip
        super().__init__(grain, runner)
        self._bound = threading.local()
        self._bind_team()

    def _least(self) -> int:
        found = ctypes.c_size_t()
        self.device.driver.address("cuMemGetAllocationGranularity")
        self.device.call(
            "cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.addressof(self._prop), MINIMUM
        )  # fmt: skip
        if not found.value:
            raise Unavailable("the driver names no granularity", where="vmm cuda", got=0)
        return found.value

    def _bind_team(self) -> None:
        """Make the context current in every thread of a team runner: it is a property of a thread."""
        team = getattr(self.runner, "team", None)
        if team is None:
            return
        context = ctypes.c_void_p()
        self.device.bind()
        self.device.call("cuCtxGetCurrent", ctypes.byref(context))
        driver = self.device.driver
        failure = self.runner(driver.address("cuCtxSetCurrent"), rows(len(team), context.value or 0), errno=False)
        if failure is not None:
            raise driver.error("cuCtxSetCurrent", failure.code)

    def _loop(self, call: str, table: Ints) -> Failure | None:
        """Make one call of ``call`` a row. Raises PoisonedDevice, without a call, once a device error is known."""
        driver = self.device.driver
        if driver.poisoned is not None:
            raise driver.poisoned
        self._bind()
        return self.runner(driver.address(call), table, errno=False)

    def _code(self, call: str, *arguments: object) -> int:
        self._bind()
        return self.device.driver.code(call, *arguments)

    def _bind(self) -> None:
        if not getattr(self._bound, "done", False):
            self.device.bind()
            self._bound.done = True

    # -- addresses -----------------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int) -> int:
        if nbytes > sys.maxsize:  # ctypes would cut it to 64 bits and reserve what is left
            raise Exhausted(
                f"no {nbytes} bytes of addresses", call="cuMemAddressReserve", index=0,
                code=CONSTANTS["CUDA_ERROR_OUT_OF_MEMORY"], where="vmm cuda", mend="ask for fewer addresses",
            )  # fmt: skip
        address = ctypes.c_uint64()
        code = self._code("cuMemAddressReserve", ctypes.byref(address), nbytes, 0, 0, 0)
        if code:
            raise self.refused("cuMemAddressReserve", 0, code, "ask for fewer addresses")
        return address.value

    def _free(self, reservation: Reservation) -> None:
        code = self._code("cuMemAddressFree", reservation.address, reservation.nbytes)
        if code:
            raise self.refused("cuMemAddressFree", 0, code, "")

    # -- chunks --------------------------------------------------------------------------------------------------

    def _create(self, nbytes: int, count: int) -> list[int]:
        handles = np.zeros(count, np.int64)
        places = handles.ctypes.data + 8 * np.arange(count, dtype=np.int64)
        failure = self._loop("cuMemCreate", rows(count, places, nbytes, ctypes.addressof(self._prop), 0))
        if failure is None:
            return [int(handle) for handle in handles]
        made = np.flatnonzero(failure.made)
        error = self._error("create", failure)
        if len(made) and not isinstance(error, PoisonedDevice):
            stays = self._loop("cuMemRelease", rows(len(made), handles[made]))
            self.book.lost += 0 if stays is None else int((~stays.made).sum())
        raise error

    def _release(self, chunks: Sequence[Chunk]) -> tuple[Failure, bool] | None:
        handles = np.fromiter((c.handle for c in chunks), np.int64, len(chunks))
        failure = self._loop("cuMemRelease", rows(len(chunks), handles))
        # A call that gives something back may report an error of earlier work and have done it all the same; asking
        # again could then take a handle that is somebody else's by now.
        return None if failure is None else (failure, True)

    # -- mappings ------------------------------------------------------------------------------------------------

    def _map(self, claim: Claim) -> tuple[Failure, list[int]] | None:
        table = rows(len(claim.low), claim.address, claim.nbytes, 0, claim.handle, 0)
        failure = self._loop("cuMemMap", table)
        if failure is None:
            return None
        made = np.flatnonzero(failure.made)[::-1]
        stuck: list[int] = []
        if len(made) and not isinstance(self._error("map", failure), PoisonedDevice):
            for index in made.tolist():
                undo = self._loop("cuMemUnmap", rows(1, claim.address[index], claim.nbytes[index]))
                if undo is not None and self.is_mapped(int(claim.address[index])) is not False:
                    stuck.append(index)
        return failure, stuck

    def _access(self, claim: Claim) -> Failure | None:
        failure = self._set(claim.address, claim.nbytes, self._open)
        if failure is None:
            return None
        if not isinstance(self._error("set_access", failure), PoisonedDevice):
            for index in np.flatnonzero(failure.made).tolist():
                closed = np.asarray(self.book.without_access(claim.part(index, index + 1)), np.int64).reshape(-1, 2)
                if len(closed):
                    self._set(closed[:, 0], closed[:, 1], self._shut)
        return failure

    def _set(self, address: Ints, nbytes: Ints, what: MemAccessDesc) -> Failure | None:
        return self._loop("cuMemSetAccess", rows(len(address), address, nbytes, ctypes.addressof(what), 1))

    def _unmap(self, claim: Claim) -> tuple[Failure, list[bool | None]] | None:
        failure = self._loop("cuMemUnmap", rows(len(claim.low), claim.address, claim.nbytes))
        if failure is None:
            return None
        gone: list[bool | None] = list(failure.made.tolist())
        if not isinstance(self._error("unmap", failure), PoisonedDevice):
            part = claim.part(failure.index, failure.index + 1)
            start = claim.space.reservation.address
            held = {self.is_mapped(start + offset) for offset, _ in self.book.mappings(part)}
            gone[failure.index] = (not held.pop()) if len(held) == 1 and None not in held else None
        return failure, gone

    def is_mapped(self, address: int) -> bool | None:
        """Return whether a handle is mapped at ``address``; None where the driver does not say."""
        which, found = ctypes.c_int(POINTER_MAPPED), ctypes.c_uint(0)
        where = ctypes.c_void_p(ctypes.addressof(found))
        code = self._code("cuPointerGetAttributes", 1, ctypes.byref(which), ctypes.byref(where), address)
        return None if code else bool(found.value)

    # -- errors --------------------------------------------------------------------------------------------------

    def _error(self, call: str, failure: Failure) -> KvbenchError:
        return self.refused(CALLS[call], failure.index, failure.code, "choose smaller sizes or end other programs")

    def refused(self, call: str, index: int, code: int, mend: str = "") -> KvbenchError:
        """Return the exception for ``code`` of call ``index`` of ``call``: PoisonedDevice, Exhausted or VmmError."""
        error = self.device.driver.error(call, code)
        if isinstance(error, PoisonedDevice):
            return error
        text = f"{error.name} ({code})"
        if code in (CONSTANTS["CUDA_ERROR_OUT_OF_MEMORY"], CONSTANTS["CUDA_ERROR_NOT_SUPPORTED"]):
            return Exhausted(text, call=call, index=index, code=code, where="vmm cuda", mend=mend)
        return VmmError(text, call=call, index=index, code=code, where="vmm cuda")

    def _fds(self) -> int:
        return 0

    def destroy(self) -> Counters:
        """Do as any driver; after a device error nothing can be given back, and the process ends anyway."""
        if self.device.driver.poisoned is None:
            return super().destroy()
        self._closed = True
        return self.counters()

    def _end(self) -> None:
        """Handles and addresses are all the driver holds; they are gone by now."""
