"""The tables. ``doc`` of every column says its unit and what NULL means; ``schema_doc`` returns them all.

The dimension tables (machines, environments, cases) carry the JSON, so a filter on an axis scans hundreds of rows and
not every result; samples lie aside, so summaries scan narrow rows and samples can be pruned.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = "0001"  # the newest file in migrations/versions; a test compares them
VERSION_TABLE = "kvbench_schema"  # our own name: many programs have a table called alembic_version
SAMPLES_CODEC = "f64le"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _json() -> Any:
    # JSON, never JSONB: JSONB keeps numbers as numeric, so -0.0 comes back as 0.0 and 1e16 as an integer
    return JSON(none_as_null=True)


def _words() -> Any:
    # bytewise order as in SQLite whatever the server's locale, and LIKE 'prefix%' can use an index
    return Text().with_variant(Text(collation="C"), "postgresql")


def _big() -> Any:
    return BigInteger().with_variant(Integer, "sqlite")  # SQLite assigns ids to INTEGER PRIMARY KEY only


def _id() -> Column[int]:
    # identity, not serial: a user with INSERT on the table needs no rights on its sequence
    return Column(
        "id", _big(), Identity(), primary_key=True, doc="row number, local to this database: never in output or bundles"
    )


def _text(name: str, doc: str, null: str = "") -> Column[Any]:
    return Column(name, _words(), nullable=bool(null), doc=f"{doc}; NULL: {null}" if null else doc)


def _number(name: str, doc: str, null: str = "") -> Column[Any]:
    return Column(name, Float(53), nullable=bool(null), doc=f"{doc}; NULL: {null}" if null else doc)


def _integer(name: str, doc: str, null: str = "") -> Column[Any]:
    return Column(name, _big(), nullable=bool(null), doc=f"{doc}; NULL: {null}" if null else doc)


def _document(name: str, doc: str, null: str = "") -> Column[Any]:
    return Column(name, _json(), nullable=bool(null), doc=f"{doc}; NULL: {null}" if null else doc)


def _ref(name: str, table: str, doc: str, null: str = "") -> Column[Any]:
    text = f"{doc}; NULL: {null}" if null else doc
    return Column(name, _big(), ForeignKey(f"{table}.id"), nullable=bool(null), doc=text)


def _digest(doc: str) -> Column[Any]:
    return Column("digest", _words(), nullable=False, unique=True, doc=doc)


def _uuid() -> Column[Any]:
    return Column(
        "uuid", _words(), nullable=False, unique=True, doc="UUID made by the client, so that a retry is the same row"
    )


_TIME = "UTC, ISO 8601 with microseconds"

machines = Table(
    "machines", metadata, _id(),
    _digest("sha256 of hw_class and facts"),
    _text("hw_class", "key of the hardware model (design 7)"),
    _document("facts", "every hardware fact read, disagreeing sources side by side"),
    Index(None, "hw_class"),
)  # fmt: skip

environments = Table(
    "environments", metadata, _id(),
    _digest("sha256 of env_digest and facts"),
    _text("env_digest", "key of the software environment (design 7)"),
    _document("facts", "every environment fact read"),
)  # fmt: skip

runs = Table(
    "runs", metadata, _id(), _uuid(),
    _text("group_uuid", "UUID shared by the N runs of one command"),
    _text("label", "the user's name for it", "none given"),
    _ref("machine_id", "machines", "hardware of the run"),
    _ref("environment_id", "environments", "environment of the run"),
    _text("host", "host name, a place to look and never part of a key"),
    _text("boot_id", "the kernel's boot id on host; empty: unknown"),
    _integer("pid", "process id of the parent process"),
    _text("pid_start", "start time of that process as the kernel tells it, so that a reused pid is told apart"),
    _text("started_at", _TIME),
    _text("finished_at", _TIME, "running, or ended without saying so"),
    _text("last_commit_at", f"when the newest case was committed by its producer, {_TIME}", "no case yet"),
    _text("status", "running, ok, partial, interrupted or failed, as last written: a dead process leaves running"),
    Column("resumed", Boolean(create_constraint=False), nullable=False, doc="another process went on with it later"),
    _text("profile", "smoke, quick or full"),
    _text("seed", "seed of the case order, decimal digits: 64 unsigned bits do not fit BIGINT"),
    _text("git", "commit of the kvbench checkout", "not run from a checkout"),
    _text("kvbench_version", "version that measured"),
    _document("plan", "list of the planned cases (digest, suite, bench, bench_version, axes) in order"),
    _document("flags", "list of words about the whole run"),
    CheckConstraint("status IN ('running', 'ok', 'partial', 'interrupted', 'failed')", name="status"),
    Index(None, "group_uuid"), Index(None, "host", "started_at"), Index(None, "label"), Index(None, "machine_id"),
)  # fmt: skip

cases = Table(
    "cases", metadata, _id(),
    _digest("sha256 of suite, bench, version and axes (design 4)"),
    _text("suite", "folder of the bench; canary: a check of the machine, not a result"),
    _text("bench", "name of the measurement"),
    _integer("bench_version", "other versions are incomparable"),
    _document("axes", "axis values as asked: sizes in bytes, words stay words"),
    Index(None, "suite", "bench"),
)  # fmt: skip

results = Table(
    "results", metadata, _id(),
    _ref("run_id", "runs", "the run it belongs to"),
    _ref("case_id", "cases", "what was measured"),
    _text("metric", "name of the figure"),
    _integer("position", "place of the case in the order of the run, from 0"),
    _integer("ordinal", "place of the row in its case, 0 is the primary metric"),
    _document("axes", "axis values of this row", "the same as those of its case"),
    _text("unit", "SI unit of value, low and high: s, B/s, FLOP/s, B, 1"),
    _text("better", "higher or lower"),
    _text("status", "ok, suspect, invalid, tainted, skipped or failed"),
    _text("reason", "why it is not ok; empty: nothing to say"),
    _number("value", "the figure, in unit", "the case has no value, see status"),
    _number("low", "lower bound of the 95 % interval within the run, in unit", "too few samples"),
    _number("high", "upper bound of the 95 % interval within the run, in unit", "too few samples"),
    _integer("n", "samples taken"),
    _integer("kept", "samples kept"),
    _text("stop", "why sampling ended: converged, stabilised_noisy, timeout or no_samples", "not sampled"),
    _text("basis", "measured, modelled, emulated or simulated"),
    _text("kernel", "code that ran", "not said"),
    _text("transport", "how the bytes moved", "nothing moved"),
    _document("resolved", "numbers behind the words among the axes"),
    _document("ceilings", "list of {name, value (in unit), kind, source}"),
    _number("fraction", "value over the first ceiling, 1", "no ceiling with a value"),
    _integer("bytes_unique", "bytes of one operation needed once", "not counted"),
    _integer("bytes_link", "bytes of one operation that crossed the link", "not counted"),
    _integer("bytes_demand", "bytes of one operation the cores asked for", "not counted"),
    _integer("bytes_near", "bytes of one operation in the near tier", "not counted"),
    _text("rate_of", "which bytes a rate counts", "not a rate"),
    _number("seconds", "median time of one operation, s", "not timed"),
    _document("flags", "list of words"),
    _document("detail", "scalars the bench defines"),
    _text("committed_at", f"when its producer committed it, {_TIME}"),
    UniqueConstraint("run_id", "case_id", "metric"),
    CheckConstraint("status IN ('ok', 'suspect', 'invalid', 'tainted', 'skipped', 'failed')", name="status"),
    CheckConstraint("basis IN ('measured', 'modelled', 'emulated', 'simulated')", name="basis"),
    CheckConstraint("better IN ('higher', 'lower')", name="better"),
    CheckConstraint("status NOT IN ('skipped', 'failed') OR value IS NULL", name="no_value"),
    Index(None, "case_id", "run_id"),
)  # fmt: skip

samples = Table(
    "samples", metadata,
    Column(
        "result_id", _big(), ForeignKey("results.id", ondelete="CASCADE"), primary_key=True, autoincrement=False,
        doc="the row they belong to; a row without samples has no entry",
    ),
    _text("codec", f"how data is written; {SAMPLES_CODEC}: little-endian IEEE 754 doubles, nothing between"),
    Column("data", LargeBinary, nullable=False, doc="seconds of one operation each, in the order they were kept"),
)  # fmt: skip

baselines = Table(
    "baselines", metadata, _id(), _uuid(),
    Column("name", _words(), nullable=False, unique=True, doc="the name it is asked by"),
    _text("hw_class", "hardware it holds for"),
    _document("run_uuids", "list of the runs it consists of"),
    _text("created_at", _TIME),
    _text("note", "why it was set; empty: nothing to say"),
)  # fmt: skip

notes = Table(
    "annotations", metadata, _id(), _uuid(),
    _text("created_at", _TIME),
    _text("hw_class", "hardware it is about", "all"),
    _text("run_uuid", "run it is about", "no single run"),
    _text("case_digest", "case it is about", "all"),
    _text("text", "what happened"),
    Index(None, "run_uuid"),
)  # fmt: skip

calibrations = Table(
    "calibrations", metadata, _id(), _uuid(),
    _text("created_at", _TIME),
    _text("hw_class", "hardware it was taken on"),
    _text("env_digest", "environment it was taken in"),
    _ref("case_id", "cases", "case it is about"),
    _text("metric", "metric it is about"),
    _integer("runs", "A/A runs behind it"),
    _number("run_sd", "relative standard deviation of the run medians, 1"),
    _number("margin", "smallest relative effect the gate may flag, 1"),
    Index(None, "case_id", "hw_class"),
)  # fmt: skip

claim_checks = Table(
    "claim_checks", metadata, _id(), _uuid(),
    _text("claim", "id of the claim in results/claims"),
    _text("checked_at", _TIME),
    _text("group_uuid", "runs it was judged on", "none could be"),
    _text("verdict", "what the check found"),
    _text("basis", "basis of the rows behind it", "no row"),
    _number("value", "the number measured here, in unit", "no number"),
    _number("low", "lower bound, in unit", "unknown"),
    _number("high", "upper bound, in unit", "unknown"),
    _text("unit", "SI unit of value", "no number"),
    _document("detail", "the paper's number and conditions, and mine"),
    _text("kvbench_version", "version that judged"),
    Index(None, "claim", "checked_at"),
)  # fmt: skip


def schema_doc() -> dict[str, dict[str, str]]:
    """Return table -> column -> what it holds, its unit and the meaning of NULL."""
    return {table.name: {c.name: c.doc or "" for c in table.columns} for table in metadata.sorted_tables}
