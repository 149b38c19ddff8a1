"""Checks that data is what our records say, field by field, before a row is stored or a foreign file believed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import types
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvbench.contract.axis import PROFILES
from kvbench.contract.result import Result, RunInfo, Scalar
from kvbench.errors import UsageError
from kvbench.store.consistent import check_consistent
from kvbench.store.labels import check_label

MAX_DEPTH = 32  # facts of a machine nest 3 deep; a bomb nests thousands
INT64 = 1 << 63
_BACKSLASH = "\\\\"  # as canonical JSON writes one
_DIGEST = re.compile(r"[0-9a-f]{64}")
# narrower than fromisoformat, which takes any character for the T: times are compared and printed as text
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?\+00:00")


def check_result(data: object) -> Result:
    """Return the Result that ``data`` (see ``Result.to_wire``) describes. Raises ValueError naming the field."""
    return Result.from_wire(_checked(data, Result, "result"))


def check_row(row: Result) -> None:
    """Check the fields of a row from this process. Raises ValueError naming the field."""
    data = {field.name: getattr(row, field.name) for field in dataclasses.fields(Result)}
    nested = {"ceilings": [dataclasses.asdict(c) for c in row.ceilings], "bytes": dataclasses.asdict(row.bytes)}
    _checked(data | nested, Result, "result")  # not to_wire: that copies every sample


def check_run(data: object) -> RunInfo:
    """Return the RunInfo that ``data`` (see ``RunInfo.to_wire``) describes. Raises ValueError naming the field."""
    run = RunInfo.from_wire(_checked(data, RunInfo, "run"))
    check_uuid(run.uuid, "run.uuid")
    check_uuid(run.group, "run.group")
    check_time(run.started_at, "run.started_at")
    if run.finished_at is not None:
        check_time(run.finished_at, "run.finished_at")
    if run.profile not in PROFILES:
        raise ValueError(f"run.profile is {_short(run.profile)}, expected one of {', '.join(PROFILES)}")
    return run


def check_foreign_run(run: RunInfo, now: datetime | None = None) -> None:
    """Check what only a run from elsewhere can get wrong: its label, its times against this clock, its plan, its keys.

    Raises ValueError. ``now`` is for tests.
    """
    if run.label is not None:
        try:
            check_label(run.label, "run.label")
        except UsageError as error:
            raise ValueError(str(error)) from None
    check_not_future(run.started_at, "run.started_at", now)
    if run.finished_at is not None:
        check_order(run.started_at, run.finished_at, "run.finished_at")
    digests = [case.digest for case in run.plan]
    if len(set(digests)) != len(digests):
        twice = next(digest for digest in digests if digests.count(digest) > 1)
        raise ValueError(f"run.plan names the case {twice[:12]} twice")
    _check_keys(run)


def _check_keys(run: RunInfo) -> None:
    """Check that ``hw_class`` and ``env_digest`` are those of the facts beside them: runs are matched by them.

    Left alone: another tool's run, whose keys follow from its file; a record without the fields of its key; facts with
    a backslash, because a database may have written a character it does not take as an escape.
    """
    from kvbench.machine.fingerprint import canonical, env_digest_of, hw_class_of

    key = run.machine.get("key")
    if not isinstance(key, dict) or run.hw_class.startswith("imported-"):
        return
    if _BACKSLASH not in canonical(key):
        try:
            made = hw_class_of(key)
        except (KeyError, TypeError):
            return
        if made != run.hw_class:
            raise ValueError(f"run.hw_class is {_short(run.hw_class)}, but that of run.machine.key is {_short(made)}")
    if not run.env_digest.startswith("imported-") and _BACKSLASH not in canonical(run.env):
        found = env_digest_of(run.env)
        if found != run.env_digest:
            raise ValueError(f"run.env_digest is {_short(run.env_digest)}, but that of run.env is {found}")


def check_not_future(text: str, path: str, now: datetime | None = None) -> None:
    """Raise ValueError for a time a day and more later than this machine's clock: clocks differ, days do not."""
    limit = (datetime.now(UTC) if now is None else now) + timedelta(days=1)
    if datetime.fromisoformat(text) > limit:
        raise ValueError(f"{path} is {text}, later than this machine's clock")


def check_order(started: str, finished: str, path: str) -> None:
    """Raise ValueError for a run that ends before it begins."""
    if datetime.fromisoformat(finished) < datetime.fromisoformat(started):
        raise ValueError(f"{path} is {finished}, before the run began at {started}")


def check_uuid(text: object, path: str) -> str:
    """Return ``text`` if it is a UUID as ``str(uuid.uuid4())`` writes it. Raises ValueError."""
    with_error = f"{path} is {_short(text)}, expected a UUID in lower case"
    if not isinstance(text, str):
        raise ValueError(with_error)
    try:
        parsed = uuid.UUID(text)
    except ValueError:
        raise ValueError(with_error) from None
    if str(parsed) != text:
        raise ValueError(with_error)
    return text


def check_time(text: object, path: str) -> str:
    """Return ``text`` if it is a UTC time in ISO 8601. Raises ValueError."""
    try:
        parsed = datetime.fromisoformat(text) if isinstance(text, str) and _TIME.fullmatch(text) else None
    except ValueError:
        parsed = None
    if parsed is None or parsed.utcoffset() != timedelta(0):
        raise ValueError(f"{path} is {_short(text)}, expected a UTC time in ISO 8601")
    assert isinstance(text, str)
    return text


def check_digest(row: Result) -> None:
    """Check that a row's digest belongs to its suite, bench, version and axes. Raises ValueError.

    An axis with ``since`` is left out at its default (design 4), which only the suite knows: the digest may be that
    of the axes without any of them, but of no other case. A file cannot put its number under another case's name.
    """
    if _DIGEST.fullmatch(row.digest):
        names = sorted(row.axes)
        for left_out in itertools.chain.from_iterable(itertools.combinations(names, k) for k in range(len(names) + 1)):
            axes = {name: value for name, value in row.axes.items() if name not in left_out}
            if _digest(row.suite, row.bench, row.bench_version, axes) == row.digest:
                return
            if len(left_out) > 3:  # 12 axes give 299 combinations; nobody adds four axes to a bench with a history
                break
    raise ValueError(f"digest {_short(row.digest)} does not belong to {row.suite}/{row.bench} and its axes")


def _digest(suite: str, bench: str, version: int, axes: dict[str, Scalar]) -> str:
    # written out again rather than imported: the file format must not move when the contract's code does
    text = json.dumps(
        {"suite": suite, "bench": bench, "version": version, "axes": axes},
        sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False,
    )  # fmt: skip
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def check_case(results: Sequence[Result]) -> None:
    """Check that ``results`` are the rows of one case, one per metric, and consistent. Raises ValueError.

    The types of their fields must have been checked before, where they come from outside.
    """
    if not results:
        raise ValueError("a case without rows: nothing measured is never stored as success")
    first = results[0]
    for row in results[1:]:
        if (row.digest, row.suite, row.bench, row.bench_version, row.axes) != (
            first.digest, first.suite, first.bench, first.bench_version, first.axes
        ):  # fmt: skip
            raise ValueError(f"rows of two cases in one commit: {row.suite}/{row.bench} {row.digest}, {first.digest}")
    metrics = [row.metric for row in results]
    if len(set(metrics)) != len(metrics):
        raise ValueError(f"two rows of {first.suite}/{first.bench} have the same metric: {metrics}")
    for row in results:
        check_consistent(row)
    if first.basis == "measured" and first.value is not None and first.n == 0:
        # rows after the first may be worked out of it; the case's own number is of samples
        raise ValueError(f"result.n is 0 in a measured row with the value {first.value}")


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _checked(value: Any, expected: Any, path: str) -> Any:
    """Return ``value`` if it has the type ``expected`` (an int is taken where a float is). Raises ValueError."""
    if expected is Any:
        return _json_value(value, path, 0)
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(expected), path)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(expected):
            raise ValueError(f"{path} is {_short(value)}, expected one of {', '.join(get_args(expected))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path} is {_short(value)}, expected a list")
        item = get_args(expected)[0]
        if item is float and all(type(entry) is float for entry in value) and all(map(math.isfinite, value)):
            return tuple(value)  # samples, by the thousand
        return tuple(_checked(entry, item, f"{path}[{index}]") for index, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{path} is {_short(value)}, expected an object")
        item = get_args(expected)[1]
        return {key: _checked(entry, item, f"{path}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(expected) and isinstance(expected, type):
        return _record(value, expected, path)
    return _leaf(value, expected, path)


def _record(value: Any, record: type, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path} is {_short(value)}, expected an object")
    hints = _hints(record)
    fields = {field.name: field for field in dataclasses.fields(record)}
    unknown = [key for key in value if key not in fields]
    if unknown:
        raise ValueError(f"{path} has the unknown field {_short(unknown[0])}")
    out = {}
    for name, field in fields.items():
        if name in value:
            out[name] = _checked(value[name], hints[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{path} lacks the field {name!r}")
    return out


def _one_of(value: Any, members: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in members:
        return None
    if type(value) in members:  # exact: True is not the number 1, and 1 in an axis is not 1.0
        return _leaf(value, type(value), path)
    for member in members:
        if member is float and type(value) is int:
            return _leaf(value, float, path)
        if get_origin(member) is Literal and value in get_args(member):
            return value
    for base in (bool, int, float, str):  # numpy's scalars are subclasses of these
        if base in members and isinstance(value, base) and not isinstance(value, bool):
            return _leaf(base(value), base, path)
    names = " or ".join(getattr(m, "__name__", str(m)) for m in members)
    raise ValueError(f"{path} is {_short(value)}, expected {names}")


def _leaf(value: Any, expected: Any, path: str) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{path} is {_short(value)}, expected a finite number") from None
    if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
        raise ValueError(f"{path} is {_short(value)}, expected {expected.__name__}")
    if expected is float and not abs(value) < float("inf"):
        raise ValueError(f"{path} is {value}, expected a finite number: no value is null")
    if expected is int and not -INT64 <= value < (2 * INT64 if path.endswith(".seed") else INT64):
        raise ValueError(f"{path} is {_short(value)}, expected a 64-bit integer")
    return value


def _json_value(value: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:60]} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{path} has a key that is not a string")
        return {key: _json_value(entry, f"{path}.{key}", depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(entry, path, depth + 1) for entry in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return _leaf(value, float, path)
