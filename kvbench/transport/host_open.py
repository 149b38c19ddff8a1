"""The host transports by name, and which pair has which."""

from __future__ import annotations

from collections.abc import Callable

from kvbench.errors import UsageError
from kvbench.transport.host_batch import open_batch
from kvbench.transport.host_cpu import open_cpu
from kvbench.transport.host_direct import open_direct
from kvbench.transport.host_job import HostJob, HostTransport
from kvbench.transport.host_staged import open_staged

OPENERS: dict[str, Callable[[HostJob], dict[str, HostTransport]]] = {
    "cpu": open_cpu, "batch": open_batch, "staged": open_staged, "direct": open_direct,
}  # fmt: skip
# Memory has no batched call of its own, and what is read in place is not moved (host_gather measures that).
OF_MEMORY = ("cpu", "staged")
OF_FILE = tuple(OPENERS)


def open_host(transport: str, job: HostJob) -> dict[str, HostTransport]:
    """Return the ways ``transport`` can do ``job``, by name; the fastest of them is the transport.

    Raises UsageError for a transport this pair does not have, Unavailable where the system refuses what it needs.
    """
    if transport not in OPENERS:
        raise UsageError("unknown host transport", where="transport", got=transport, expected=", ".join(OPENERS))
    return OPENERS[transport](job)
