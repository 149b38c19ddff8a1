"""The first schema. Frozen: what changes later is a migration of its own beside this file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
DOCUMENT = sa.JSON(none_as_null=True)
WORDS = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "annotations",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("uuid", WORDS, nullable=False),
        sa.Column("created_at", WORDS, nullable=False),
        sa.Column("hw_class", WORDS, nullable=True),
        sa.Column("run_uuid", WORDS, nullable=True),
        sa.Column("case_digest", WORDS, nullable=True),
        sa.Column("text", WORDS, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_annotations")),
        sa.UniqueConstraint("uuid", name=op.f("uq_annotations_uuid")),
    )
    op.create_index(op.f("ix_annotations_run_uuid"), "annotations", ["run_uuid"], unique=False)
    op.create_table(
        "baselines",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("uuid", WORDS, nullable=False),
        sa.Column("name", WORDS, nullable=False),
        sa.Column("hw_class", WORDS, nullable=False),
        sa.Column("run_uuids", DOCUMENT, nullable=False),
        sa.Column("created_at", WORDS, nullable=False),
        sa.Column("note", WORDS, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_baselines")),
        sa.UniqueConstraint("name", name=op.f("uq_baselines_name")),
        sa.UniqueConstraint("uuid", name=op.f("uq_baselines_uuid")),
    )
    op.create_table(
        "cases",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("suite", WORDS, nullable=False),
        sa.Column("bench", WORDS, nullable=False),
        sa.Column("bench_version", BIG, nullable=False),
        sa.Column("axes", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cases")),
        sa.UniqueConstraint("digest", name=op.f("uq_cases_digest")),
    )
    op.create_index(op.f("ix_cases_suite_bench"), "cases", ["suite", "bench"], unique=False)
    op.create_table(
        "claim_checks",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("uuid", WORDS, nullable=False),
        sa.Column("claim", WORDS, nullable=False),
        sa.Column("checked_at", WORDS, nullable=False),
        sa.Column("group_uuid", WORDS, nullable=True),
        sa.Column("verdict", WORDS, nullable=False),
        sa.Column("basis", WORDS, nullable=True),
        sa.Column("value", sa.Float(53), nullable=True),
        sa.Column("low", sa.Float(53), nullable=True),
        sa.Column("high", sa.Float(53), nullable=True),
        sa.Column("unit", WORDS, nullable=True),
        sa.Column("detail", DOCUMENT, nullable=False),
        sa.Column("kvbench_version", WORDS, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_claim_checks")),
        sa.UniqueConstraint("uuid", name=op.f("uq_claim_checks_uuid")),
    )
    op.create_index(op.f("ix_claim_checks_claim_checked_at"), "claim_checks", ["claim", "checked_at"], unique=False)
    op.create_table(
        "environments",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("env_digest", WORDS, nullable=False),
        sa.Column("facts", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
        sa.UniqueConstraint("digest", name=op.f("uq_environments_digest")),
    )
    op.create_table(
        "machines",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("digest", WORDS, nullable=False),
        sa.Column("hw_class", WORDS, nullable=False),
        sa.Column("facts", DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_machines")),
        sa.UniqueConstraint("digest", name=op.f("uq_machines_digest")),
    )
    op.create_index(op.f("ix_machines_hw_class"), "machines", ["hw_class"], unique=False)
    op.create_table(
        "calibrations",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("uuid", WORDS, nullable=False),
        sa.Column("created_at", WORDS, nullable=False),
        sa.Column("hw_class", WORDS, nullable=False),
        sa.Column("env_digest", WORDS, nullable=False),
        sa.Column("case_id", BIG, nullable=False),
        sa.Column("metric", WORDS, nullable=False),
        sa.Column("runs", BIG, nullable=False),
        sa.Column("run_sd", sa.Float(53), nullable=False),
        sa.Column("margin", sa.Float(53), nullable=False),
        sa.ForeignKeyConstraint(["case_id"], ["cases.id"], name=op.f("fk_calibrations_case_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calibrations")),
        sa.UniqueConstraint("uuid", name=op.f("uq_calibrations_uuid")),
    )
    op.create_index(op.f("ix_calibrations_case_id_hw_class"), "calibrations", ["case_id", "hw_class"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("uuid", WORDS, nullable=False),
        sa.Column("group_uuid", WORDS, nullable=False),
        sa.Column("label", WORDS, nullable=True),
        sa.Column("machine_id", BIG, nullable=False),
        sa.Column("environment_id", BIG, nullable=False),
        sa.Column("host", WORDS, nullable=False),
        sa.Column("boot_id", WORDS, nullable=False),
        sa.Column("pid", BIG, nullable=False),
        sa.Column("pid_start", WORDS, nullable=False),
        sa.Column("started_at", WORDS, nullable=False),
        sa.Column("finished_at", WORDS, nullable=True),
        sa.Column("last_commit_at", WORDS, nullable=True),
        sa.Column("status", WORDS, nullable=False),
        sa.Column("resumed", sa.Boolean(), nullable=False),
        sa.Column("profile", WORDS, nullable=False),
        sa.Column("seed", WORDS, nullable=False),
        sa.Column("git", WORDS, nullable=True),
        sa.Column("kvbench_version", WORDS, nullable=False),
        sa.Column("plan", DOCUMENT, nullable=False),
        sa.Column("flags", DOCUMENT, nullable=False),
        sa.CheckConstraint(
            "status IN ('running', 'ok', 'partial', 'interrupted', 'failed')", name=op.f("ck_runs_status")
        ),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name=op.f("fk_runs_environment_id")),
        sa.ForeignKeyConstraint(["machine_id"], ["machines.id"], name=op.f("fk_runs_machine_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("uuid", name=op.f("uq_runs_uuid")),
    )
    op.create_index(op.f("ix_runs_group_uuid"), "runs", ["group_uuid"], unique=False)
    op.create_index(op.f("ix_runs_host_started_at"), "runs", ["host", "started_at"], unique=False)
    op.create_index(op.f("ix_runs_label"), "runs", ["label"], unique=False)
    op.create_index(op.f("ix_runs_machine_id"), "runs", ["machine_id"], unique=False)
    op.create_table(
        "results",
        sa.Column("id", BIG, sa.Identity(), nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("case_id", BIG, nullable=False),
        sa.Column("metric", WORDS, nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("ordinal", BIG, nullable=False),
        sa.Column("axes", DOCUMENT, nullable=True),
        sa.Column("unit", WORDS, nullable=False),
        sa.Column("better", WORDS, nullable=False),
        sa.Column("status", WORDS, nullable=False),
        sa.Column("reason", WORDS, nullable=False),
        sa.Column("value", sa.Float(53), nullable=True),
        sa.Column("low", sa.Float(53), nullable=True),
        sa.Column("high", sa.Float(53), nullable=True),
        sa.Column("n", BIG, nullable=False),
        sa.Column("kept", BIG, nullable=False),
        sa.Column("stop", WORDS, nullable=True),
        sa.Column("basis", WORDS, nullable=False),
        sa.Column("kernel", WORDS, nullable=True),
        sa.Column("transport", WORDS, nullable=True),
        sa.Column("resolved", DOCUMENT, nullable=False),
        sa.Column("ceilings", DOCUMENT, nullable=False),
        sa.Column("fraction", sa.Float(53), nullable=True),
        sa.Column("bytes_unique", BIG, nullable=True),
        sa.Column("bytes_link", BIG, nullable=True),
        sa.Column("bytes_demand", BIG, nullable=True),
        sa.Column("bytes_near", BIG, nullable=True),
        sa.Column("rate_of", WORDS, nullable=True),
        sa.Column("seconds", sa.Float(53), nullable=True),
        sa.Column("flags", DOCUMENT, nullable=False),
        sa.Column("detail", DOCUMENT, nullable=False),
        sa.Column("committed_at", WORDS, nullable=False),
        sa.CheckConstraint("basis IN ('measured', 'modelled', 'emulated', 'simulated')", name=op.f("ck_results_basis")),
        sa.CheckConstraint("better IN ('higher', 'lower')", name=op.f("ck_results_better")),
        sa.CheckConstraint(
            "status IN ('ok', 'suspect', 'invalid', 'tainted', 'skipped', 'failed')", name=op.f("ck_results_status")
        ),
        sa.CheckConstraint("status NOT IN ('skipped', 'failed') OR value IS NULL", name=op.f("ck_results_no_value")),
        sa.ForeignKeyConstraint(["case_id"], ["cases.id"], name=op.f("fk_results_case_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_results_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_results")),
        sa.UniqueConstraint("run_id", "case_id", "metric", name=op.f("uq_results_run_id_case_id_metric")),
    )
    op.create_index(op.f("ix_results_case_id_run_id"), "results", ["case_id", "run_id"], unique=False)
    op.create_table(
        "samples",
        sa.Column("result_id", BIG, autoincrement=False, nullable=False),
        sa.Column("codec", WORDS, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["result_id"], ["results.id"], name=op.f("fk_samples_result_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("result_id", name=op.f("pk_samples")),
    )


def downgrade() -> None:
    # the order in which nothing is dropped that another table still points at
    for name in (
        "samples", "results", "runs", "calibrations", "machines", "environments", "claim_checks", "cases", "baselines",
        "annotations",
    ):  # fmt: skip
        op.drop_table(name)
