"""One product in a process of its own, for a profiler to look at: ``python -m kvbench.systems.directkv.gpu_once JSON``.

The JSON is what :func:`words` makes: the fields of ``gpu_gemm.Asked``, the device and the seed. Exit code 0 when the
product was made and is right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from kvbench import children
from kvbench.errors import KvbenchError
from kvbench.systems.directkv.gpu_gemm import Asked, GpuGemm


def words(asked: Asked, device: int, seed: int) -> list[str]:
    """Return the command of the child."""
    return [*children.python(__name__), json.dumps({"asked": asdict(asked), "device": device, "seed": seed})]


def main(arguments: Sequence[str]) -> int:
    """Make the product once and check it."""
    from kvbench.memory.cuda.device import Device, Stream
    from kvbench.memory.cuda.driver import Driver
    from kvbench.memory.cuda.service import Service

    try:
        document = json.loads(arguments[0])
        with ExitStack() as stack:
            device = stack.enter_context(Device(Driver(), document["device"]))
            service = stack.enter_context(Service(device))
            work = GpuGemm(service, stack.enter_context, Asked(**document["asked"]), document["seed"])
            stream = stack.enter_context(Stream(device))
            work.submit(stream)
            stream.synchronize()
            work.check()
    except KvbenchError as error:
        print(f"gpu_once: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
