"""Alembic's entry: runs the migrations on the connection and in the transaction ``kvbench db upgrade`` hands over."""

from __future__ import annotations

from alembic import context

from kvbench.store.schema import VERSION_TABLE, metadata

connection = context.config.attributes["connection"]
# transactional_ddl: Alembic takes SQLite's DDL for non-transactional, but under our explicit BEGIN IMMEDIATE it is, and
# a failing migration leaves nothing behind. render_as_batch: SQLite cannot alter most columns in place.
context.configure(
    connection=connection,
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
