"""The process of trap T41: it breaks its GPU context on purpose and says what the clock made of it.

``python -m kvbench.timing.traps.gpu_poison LIBRARY [IMAGE]`` prints ``raised`` or ``number`` for the phase with the
broken kernel and for the one after it. A device error ends a process, so this is never done in one that measures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.memory.cuda.device import Device, Stream
from kvbench.memory.cuda.driver import Driver, PoisonedDevice
from kvbench.memory.cuda.service import Service
from kvbench.timing.events import EventClock
from kvbench.timing.traps.gpu_bed import reader

NOWHERE = 1 << 12  # no allocation of a driver begins in the first page


def main(library: str, image: str | None = None) -> int:
    """Print two words and end without giving anything back: nothing can be, after the error."""
    device = Device(Driver(library))
    service = Service(device, Path(image).read_bytes() if image else None)
    clock = EventClock(service)
    broken = reader(service, NOWHERE, 1 << 20)

    def fine(stream: Stream) -> None:
        stream.record(clock._events(1)[0][0])

    for submit in (broken, fine):
        try:
            print(f"number {clock.hot(submit)(1)}", flush=True)
        except PoisonedDevice:
            print("raised", flush=True)
        except KvbenchError as error:
            print(f"other {type(error).__name__}", flush=True)
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
