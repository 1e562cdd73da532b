"""How a batch went on out of memory, and which checkpoint answered it: in a routed job also why, and its weights."""

import sqlalchemy as sa
from alembic import op

from schemas.migrations.versions.v0001_first_tables import VIEWS
from schemas.tables import Id

revision = "0003"
down_revision = "0002"

COUNTS = ("memory_splits", "cpu_sequences")
ANSWERS = """
    SELECT r.job_id, j.name AS job_name, r.row_number, r.row_id, r.question, r.type,
           CASE r.type
               WHEN 'choice' THEN r.choice
               WHEN 'noul' THEN CASE WHEN r.noul >= 0.5 THEN 'true' ELSE 'false' END
               ELSE CAST(CAST(ROUND(r.score) AS INTEGER) AS TEXT)
           END AS answer,
           r.choice, r.score, r.noul, r.probabilities, r.confidence, r.answer_confidence, r.act_probability,
           r.state_tokens_dropped, r.batch_id, b.backend, b.device, b.dtype, b.checkpoint, r.language, r.route_reason,
           COALESCE(c.fingerprint, j.checkpoint_fingerprint) AS checkpoint_fingerprint,
           CASE WHEN c.fingerprint IS NULL THEN j.checkpoint_revision ELSE c.revision END AS checkpoint_revision,
           w.host, w.versions, b.bucket_length, b.sequences, b.read_ms, b.tokenise_ms, b.forward_ms, b.decode_ms,
           b.write_ms, b.created_at AS saved_at
    FROM results r
    JOIN jobs j ON j.id = r.job_id
    JOIN batches b ON b.id = r.batch_id
    JOIN workers w ON w.id = b.worker_id
    LEFT JOIN job_checkpoints c ON c.job_id = r.job_id AND c.checkpoint = b.checkpoint
"""


def upgrade() -> None:
    op.create_table(
        "job_checkpoints",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_checkpoints_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "checkpoint", name=op.f("pk_job_checkpoints")),
    )
    op.add_column("batches", sa.Column("checkpoint", sa.Text(), nullable=True))
    for name in COUNTS:
        op.add_column("batches", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("results", sa.Column("language", sa.Text(), nullable=True))
    op.add_column("results", sa.Column("route_reason", sa.Text(), nullable=True))
    op.execute("DROP VIEW answers")
    op.execute(f"CREATE VIEW answers AS {ANSWERS}")


def downgrade() -> None:
    op.execute("DROP VIEW answers")
    op.drop_column("results", "route_reason")
    op.drop_column("results", "language")
    for name in reversed(COUNTS):
        op.drop_column("batches", name)
    op.drop_column("batches", "checkpoint")
    op.drop_table("job_checkpoints")
    op.execute(f"CREATE VIEW answers AS {VIEWS['answers']}")
