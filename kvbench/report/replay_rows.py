"""The rows of replays put together again: one record a case of routes/replay, with all of its metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.contract.result import Result, RunInfo

SCHEMA = "kvbench.replay/1"
BENCH = ("routes", "replay")
STALLS = ("stall_link_in", "stall_link_out", "stall_cpu", "stall_until", "stall_serial")
ATTAINED = 0.9  # of the requests: the goodput of a sweep is the highest rate that still has it (eLLM, section 4.1)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay: its first row, and the rows of all metrics by name."""

    run: str
    first: Result
    metrics: Mapping[str, Result]

    def value(self, metric: str) -> float | None:
        """Return the value of ``metric``, None where there is none."""
        row = self.metrics.get(metric)
        return None if row is None else row.value

    def axis(self, name: str) -> Any:
        """Return the value of an axis."""
        return self.first.axes.get(name)

    @property
    def rate(self) -> float | None:
        """Requests that arrive a second; None where the workload's own rate holds."""
        milli = self.axis("rate_milli")
        return milli / 1e3 if isinstance(milli, int) and milli > 0 else None

    @property
    def digest(self) -> str | None:
        """Digest of the event log; None where nothing was replayed."""
        found = self.first.detail.get("digest")
        return found if isinstance(found, str) else None

    @property
    def name(self) -> str:
        """The policy, with the parameters that are not its defaults."""
        params = self.axis("params")
        return f"{self.axis('policy')}" if params == "default" else f"{self.axis('policy')} {params}"


def replays(rows: Iterable[tuple[str, Result]]) -> list[Replayed]:
    """Return the replays among ``rows`` of (run uuid, row), in their order."""
    found: dict[tuple[str, str], list[Result]] = {}
    for run, row in rows:
        if (row.suite, row.bench) == BENCH:
            found.setdefault((run, row.digest), []).append(row)
    return [Replayed(run, own[0], {row.metric: row for row in own}) for (run, _), own in found.items()]


def digest_of(found: Sequence[Replayed]) -> str | None:
    """Return the digest of one replay, of several the sha256 of theirs, a line each; None where there is none."""
    if all(each.digest is None for each in found):
        return None
    if len(found) == 1:
        return found[0].digest
    return hashlib.sha256("".join(f"{each.digest or '-'}\n" for each in found).encode("ascii")).hexdigest()


def document(runs: Sequence[RunInfo], found: Sequence[Replayed]) -> dict[str, Any]:
    """Return the ``kvbench.replay/1`` document."""
    return {
        "schema": SCHEMA,
        "digest": digest_of(found),
        "runs": [run.to_json() for run in runs],
        "replays": [
            {
                "run": each.run,
                **{name: each.axis(name) for name in ("workload", "policy", "params", "machine", "model")},
                "rate": each.rate, "requests": each.axis("requests"), "seed": each.axis("seed"),
                "in_flight": each.axis("in_flight") or None, "slo_ttft": _objective(each, "slo_ttft_us"),
                "slo_tpot": _objective(each, "slo_tpot_us"), "status": each.first.status, "reason": each.first.reason,
                "flags": list(each.first.flags), "basis": "simulated", "digest": each.digest,
                "metrics": {
                    name: {"value": row.value, "unit": row.unit, "reason": row.reason}
                    for name, row in each.metrics.items()
                },
                "detail": {k: v for k, v in each.first.detail.items() if k not in ("digest", "case_wall_s")},
            } for each in found
        ],
        "goodput": [
            {"policy": policy, "params": params, "rate": rate} for (policy, params), rate in sustained(found).items()
        ],
    }  # fmt: skip


def sustained(found: Iterable[Replayed]) -> dict[tuple[str, str], float | None]:
    """Return, for each policy that was replayed at several rates under an objective, the highest rate at which ATTAINED
    of the requests met it; None where no rate did."""
    rates: dict[tuple[str, str], dict[float, float]] = {}
    for each in found:
        attained = each.value("attainment")
        if each.rate is not None and attained is not None and (each.axis("slo_ttft_us") or each.axis("slo_tpot_us")):
            rates.setdefault((str(each.axis("policy")), str(each.axis("params"))), {})[each.rate] = attained
    return {
        key: max((rate for rate, share in own.items() if share >= ATTAINED), default=None)
        for key, own in rates.items() if len(own) > 1
    }  # fmt: skip


def _objective(each: Replayed, name: str) -> float | None:
    found = each.axis(name)
    return found / 1e6 if isinstance(found, int) and found > 0 else None
