"""A replay as the values of a case: words and whole numbers that name everything it depends on.

A trace file is named by its name and sha256, never by a path; a machine that is measured by the digest of its numbers.
What such a name stands for has to be made known to this process first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvbench.errors import Unavailable, UsageError, printable
from kvbench.replay.generate.presets import PRESETS, preset
from kvbench.replay.request import Request

if TYPE_CHECKING:
    from kvbench.replay.costs import Costs
    from kvbench.replay.engine import Outcome
    from kvbench.replay.metrics import Slo
    from kvbench.replay.traces.trace import Trace

DEFAULT = "default"  # the parameters of a policy as its class has them
SHOWN = 12  # hexadecimal digits of a digest in a name
MOST_PARAMS = 200  # characters
Progress = Callable[[int], None]
Maker = Callable[[str], "Costs"]

_traces: dict[str, Trace] = {}
_machines: dict[str, Maker] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """One replay. ``rate_milli``: requests in 1000 s, 0 for what the workload has; ``requests``: 0 for all of a trace;
    ``in_flight``: requests inside at once, 0 for no limit; objectives in microseconds, 0 for none."""

    workload: str
    policy: str
    params: str
    machine: str
    model: str
    rate_milli: int
    requests: int
    seed: int
    in_flight: int
    slo_ttft_us: int
    slo_tpot_us: int

    @property
    def rate(self) -> float | None:
        """Requests a second; None for what the workload has."""
        return self.rate_milli / 1e3 if self.rate_milli else None

    def axes(self) -> dict[str, str | int]:
        """Return the axes of the case."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, axes: Mapping[str, Any]) -> Job:
        """Return the job of a case's axes."""
        return cls(**{field.name: axes[field.name] for field in fields(cls)})


def know_trace(trace: Trace) -> str:
    """Make ``trace`` known to this process; return its name as a workload."""
    name = f"{printable(trace.path.name, 40)}@{trace.facts.sha256[:SHOWN]}"
    _traces[name] = trace
    return name


def know_machine(name: str, numbers: str, maker: Maker) -> str:
    """Make a measured machine known to this process; return its name with the digest of ``numbers``, the text of all
    its costs rest on. ``maker`` gives its costs of a model."""
    known = f"{name}@{hashlib.sha256(numbers.encode()).hexdigest()[:SHOWN]}"
    _machines[known] = maker
    return known


def trace_of(workload: str) -> Trace | None:
    """Return the trace file behind ``workload``; None for a preset. Raises Unavailable for a file not known here."""
    found = _traces.get(workload)  # first: a file may be called like an option of a preset
    if found is None and workload.partition(":")[0] in PRESETS:
        return None
    if found is None and "@" in workload:
        raise Unavailable(
            "this process does not know the trace file", where=workload, mend="kvbench replay FILE replays a file"
        )
    if found is None:
        preset(workload)  # says which there are
    return found


def requests_of(job: Job) -> Iterator[Request]:
    """Return the requests of ``job``; raises UsageError for values out of range, Unavailable as :func:`trace_of`."""
    trace = trace_of(job.workload)
    if trace is not None:
        return trace.requests(job.requests or None, job.rate)
    chosen = preset(job.workload)
    return chosen.requests(job.requests or chosen.preset.requests, job.rate, job.seed)


def costs_of(job: Job) -> Costs:
    """Return what the model costs on the machine of ``job``; Unavailable for a measured machine not known here."""
    if "@" in job.machine or job.machine == "this":
        maker = _machines.get(job.machine)
        if maker is None:
            raise Unavailable(
                "this process does not know the numbers of this machine", where=job.machine,
                mend="kvbench replay --machine this reads them from the database",
            )  # fmt: skip
        return maker(job.model)
    from kvbench.replay.costs import costs
    from kvbench.replay.machine import preset as machine

    return costs(machine(job.machine), job.model)


def slo_of(job: Job) -> Slo:
    """Return the objectives of ``job``."""
    from kvbench.replay.metrics import Slo

    return Slo(job.slo_ttft_us / 1e6 or None, job.slo_tpot_us / 1e6 or None)


def params_of(policy: str, text: str) -> Any:
    """Return the parameters ``text`` gives the policy; raises UsageError as :func:`parse_params`."""
    from kvbench.replay.policies import parse_params

    return parse_params(policy, () if text == DEFAULT else text.split(","))


def params_text(policy: str, words: list[str]) -> str:
    """Return the one text for ``words`` of NAME=VALUE: what differs from the defaults, in the order of the class."""
    from kvbench.replay.policies import parse_params

    chosen, plain = parse_params(policy, words), parse_params(policy, ())
    changed = [
        f"{field.name}={getattr(chosen, field.name)}" for field in fields(chosen)
        if getattr(chosen, field.name) != getattr(plain, field.name)
    ]  # fmt: skip
    text = ",".join(changed) or DEFAULT
    if len(text) > MOST_PARAMS:
        raise UsageError("parameters", where=f"policy {policy}", got=text, expected=f"at most {MOST_PARAMS} characters")
    return text


def toggles(policy: str) -> list[str]:
    """Return the parameters of ``policy`` that are switches, in the order of its class."""
    from kvbench.replay.policies import parse_params

    plain = parse_params(policy, ())
    return [field.name for field in fields(plain) if isinstance(getattr(plain, field.name), bool)]


def check(job: Job) -> None:
    """Raise what is wrong with ``job`` whatever its policy: unknown names, values out of range."""
    costs_of(job)
    slo_of(job)
    requests_of(job)
    if job.in_flight < 0:
        raise UsageError("requests in flight", got=job.in_flight, expected="1 or more, 0 for no limit")


def check_policy(job: Job) -> None:
    """Raise what the policy of ``job`` has against its parameters, machine and model."""
    from kvbench.replay.policies import make

    make(job.policy, costs_of(job), params_of(job.policy, job.params))


def run(job: Job, progress: Progress | None = None) -> tuple[Outcome, Costs]:
    """Replay ``job``; ``progress`` is told how many requests have been read, and may raise to stop it."""
    from kvbench.replay.engine import replay
    from kvbench.replay.policies import make

    costs = costs_of(job)
    policy = make(job.policy, costs, params_of(job.policy, job.params))
    requests = requests_of(job)
    if progress is not None:
        requests = _told(requests, progress)
    return replay(
        requests, policy, costs, in_flight=job.in_flight or None,
        progress=None if progress is None else lambda done, at: progress(-1),
    ), costs  # fmt: skip


def _told(requests: Iterator[Request], progress: Progress) -> Iterator[Request]:
    for number, request in enumerate(requests):
        if number % 64 == 0:
            progress(number)
        yield request
