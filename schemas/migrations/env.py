"""Runs the migrations inside the transaction that the program opened; no configuration file is needed."""

from alembic import context

from schemas.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=connection.dialect.name == "sqlite")
context.run_migrations()
