"""Whether a run that says ``running`` can still be: only its own machine can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbench.contract.result import RunInfo, RunStatus

Alive = Callable[[str, int, str], bool]


@dataclass(frozen=True, slots=True)
class Here:
    """This machine. ``alive(boot_id, pid, pid_start)`` says whether a process recorded on ``host`` still runs."""

    host: str
    alive: Alive

    @classmethod
    def read(cls) -> Here:
        """Return the machine this process runs on."""
        from kvbench.machine import identity

        return cls(identity.host_name(), identity.process_alive)

    def effective_status(self, run: RunInfo) -> RunStatus:
        """Return ``interrupted`` for a ``running`` run of this host whose process is gone, else the run's status.

        A run of another machine stays ``running``: nothing here can see its process. So does one whose boot id is
        unknown.
        """
        if run.status != "running" or run.host != self.host or not run.boot_id:
            return run.status
        return "running" if self.alive(run.boot_id, run.pid, run.pid_start) else "interrupted"
