"""What a shard remembers of the processes that died with it, and what a worker refused."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

COUNTS = (("shards", "deaths"), ("shards", "suspect_deaths"), ("workers", "refused_messages"))


def upgrade() -> None:
    for table, column in COUNTS:
        op.add_column(table, sa.Column(column, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("shards", sa.Column("suspect_first_row", sa.BigInteger(), nullable=True))
    op.add_column("shards", sa.Column("suspect_last_row", sa.BigInteger(), nullable=True))
    op.add_column("shards", sa.Column("suspect_attempt", sa.Integer(), nullable=True))


def downgrade() -> None:
    for table, column in COUNTS:
        op.drop_column(table, column)
    for column in ("suspect_first_row", "suspect_last_row", "suspect_attempt"):
        op.drop_column("shards", column)
