"""Our records as table rows and back, exactly."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvbench.contract.result import Bytes, Ceiling, PlannedCase, Result, RunInfo
from kvbench.errors import StoreError
from kvbench.store.labels import storable
from kvbench.store.schema import SAMPLES_CODEC

_SAME = (
    "metric", "unit", "better", "status", "reason", "value", "low", "high", "n", "kept", "stop", "basis", "kernel",
    "transport", "fraction", "rate_of", "seconds",
)  # fmt: skip
_RUN_SAME = (
    "uuid", "label", "host", "boot_id", "pid", "pid_start", "started_at", "finished_at", "status", "resumed", "profile",
    "git", "kvbench_version",
)  # fmt: skip


def digest_of(*parts: Any) -> str:
    """Return sha256 of the canonical JSON of ``parts``."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def run_values(run: RunInfo) -> dict[str, Any]:
    """Return the columns of the runs table for ``run``, ids and times of commits left out."""
    values = {name: getattr(run, name) for name in _RUN_SAME}
    values |= {
        "group_uuid": run.group, "seed": str(run.seed), "flags": list(run.flags),
        "plan": [asdict(planned) for planned in run.plan],
    }  # fmt: skip
    clean: dict[str, Any] = storable(values)
    return clean


def run_from_row(row: Mapping[str, Any], status: str) -> RunInfo:
    """Rebuild a run from a row of runs joined with its machine and environment; ``status`` replaces the stored one."""
    fields = {name: row[name] for name in _RUN_SAME if name != "status"}
    return RunInfo(
        **fields, group=row["group_uuid"], seed=int(row["seed"]), flags=tuple(row["flags"]), status=status,  # type: ignore[arg-type]
        plan=tuple(PlannedCase(**planned) for planned in row["plan"]), hw_class=row["hw_class"],
        machine=row["machine_facts"], env_digest=row["env_digest"], env=row["env_facts"],
    )  # fmt: skip


def result_values(result: Result, case_axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of the results table for ``result``; its axes only where they differ from ``case_axes``."""
    axes = storable(result.axes)
    values = {name: getattr(result, name) for name in _SAME}
    values |= {
        "axes": None if axes == case_axes and _typed(axes) == _typed(case_axes) else axes,
        "resolved": result.resolved, "ceilings": [asdict(ceiling) for ceiling in result.ceilings],
        "bytes_unique": result.bytes.unique, "bytes_link": result.bytes.link,
        "bytes_demand": result.bytes.demand, "bytes_near": result.bytes.near,
        "flags": list(result.flags), "detail": result.detail,
    }  # fmt: skip
    clean: dict[str, Any] = storable(values)
    return clean


def _typed(axes: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((name, type(value).__name__) for name, value in axes.items())


def result_from_row(row: Mapping[str, Any]) -> Result:
    """Rebuild a Result from a row of results joined with its case and, if wanted, its samples."""
    return Result(
        **{name: row[name] for name in _SAME}, suite=row["suite"], bench=row["bench"],
        bench_version=row["bench_version"], axes=row["case_axes"] if row["axes"] is None else row["axes"],
        digest=row["digest"], resolved=row["resolved"], ceilings=tuple(Ceiling(**c) for c in row["ceilings"]),
        bytes=Bytes(row["bytes_unique"], row["bytes_link"], row["bytes_demand"], row["bytes_near"]),
        flags=tuple(row["flags"]), detail=row["detail"],
        samples=decode_samples(row["codec"], row["data"]) if row.get("codec") is not None else (),
    )  # fmt: skip


def encode_samples(samples: Sequence[float]) -> bytes:
    """Return ``samples`` as little-endian doubles, 8 bytes each (codec ``f64le``)."""
    return struct.pack(f"<{len(samples)}d", *samples)


def decode_samples(codec: str, data: bytes) -> tuple[float, ...]:
    """Return the samples in ``data``. Raises StoreError for a codec or length this version does not know."""
    if codec != SAMPLES_CODEC or len(data) % 8:
        raise StoreError(
            "samples cannot be read", got=f"codec {codec}, {len(data)} B", expected=f"{SAMPLES_CODEC}, 8 B each"
        )
    return struct.unpack(f"<{len(data) // 8}d", data)
