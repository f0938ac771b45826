"""Run by alembic: migrates on the connection that `Schema.configuration` was given, in its transaction."""

from alembic import context

from penstock.gateway.store.tables import GATEWAY, Base

connection = context.config.attributes["connection"]
# SQLite changes little in place: alembic copies the table instead.
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=True,
    version_table=GATEWAY.version_table,
)
with context.begin_transaction():
    context.run_migrations()
