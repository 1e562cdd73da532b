"""The first tables and views."""

import sqlalchemy as sa
from alembic import op

from schemas.tables import Id, UtcTime

revision = "v1"
down_revision = None

# What people ask for most, without having to know how the tables hang together. The same text serves both databases.
VIEWS = {
    "answers": """
        SELECT r.job_id, j.name AS job_name, r.row_number, r.row_id, r.question, r.type,
               CASE r.type
                   WHEN 'choice' THEN r.choice
                   WHEN 'noul' THEN CASE WHEN r.noul >= 0.5 THEN 'true' ELSE 'false' END
                   ELSE l.text
               END AS answer, l.level,
               r.choice, r.score, r.noul, r.probabilities, r.confidence, r.answer_confidence, r.act_probability,
               r.state_tokens_dropped, r.options_cut, r.batch_id, b.backend, b.device, b.dtype, b.checkpoint,
               r.language, r.route_reason,
               COALESCE(c.fingerprint, j.checkpoint_fingerprint) AS checkpoint_fingerprint,
               CASE WHEN c.fingerprint IS NULL THEN j.checkpoint_revision ELSE c.revision END AS checkpoint_revision,
               w.host, w.versions, b.bucket_length, b.sequences, b.read_ms, b.tokenise_ms, b.forward_ms, b.decode_ms,
               b.write_ms, b.created_at AS saved_at
        FROM results r
        JOIN jobs j ON j.id = r.job_id
        JOIN batches b ON b.id = r.batch_id
        JOIN workers w ON w.id = b.worker_id
        LEFT JOIN job_checkpoints c ON c.job_id = r.job_id AND c.checkpoint = b.checkpoint
        LEFT JOIN levels l ON l.job_id = r.job_id AND l.question = r.question
               AND l.level = CAST(ROUND(CAST(r.score AS NUMERIC)) AS INTEGER)
    """,
    "job_progress": """
        SELECT j.id AS job_id, j.name, j.status, j.rows, j.shards, j.questions,
               CAST(COALESCE(SUM(CASE WHEN s.status = 'done' THEN 1 ELSE 0 END), 0) AS INTEGER) AS shards_done,
               CAST(COALESCE(SUM(s.answers), 0) AS BIGINT) AS answers,
               CAST(COALESCE(SUM(s.unanswered), 0) AS BIGINT) AS unanswered,
               CAST(COALESCE(SUM(s.row_errors), 0) AS BIGINT) AS row_errors,
               CASE WHEN j.rows = 0 THEN 100.0
                    ELSE 100.0 * COALESCE(SUM(s.answers + s.unanswered), 0) / (j.rows * j.questions)
               END AS percent_done,
               j.created_at, j.started_at, j.finished_at, j.error
        FROM jobs j
        LEFT JOIN shards s ON s.job_id = j.id
        GROUP BY j.id
    """,
    "backend_throughput": """
        SELECT b.job_id, b.backend, b.device, b.dtype,
               CAST(COUNT(*) AS INTEGER) AS batches,
               CAST(SUM(b.sequences) AS BIGINT) AS sequences,
               CAST(SUM(b.tokens) AS BIGINT) AS tokens,
               CAST(SUM(b.padded_tokens) AS BIGINT) AS padded_tokens,
               SUM(b.read_ms) AS read_ms, SUM(b.tokenise_ms) AS tokenise_ms, SUM(b.forward_ms) AS forward_ms,
               SUM(b.decode_ms) AS decode_ms, SUM(b.write_ms) AS write_ms,
               1000.0 * SUM(b.tokens) / SUM(b.forward_ms) AS tokens_per_forward_s
        FROM batches b
        GROUP BY b.job_id, b.backend, b.device, b.dtype
    """,
}


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("returned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("shards", sa.Integer(), nullable=False),
        sa.Column("questions", sa.Integer(), nullable=False),
        sa.Column("row_errors", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_fingerprint", sa.Text(), nullable=True),
        sa.Column("checkpoint_revision", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("null_ids", sa.BigInteger(), nullable=True),
        sa.Column("repeated_ids", sa.BigInteger(), nullable=True),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.Column("started_at", UtcTime(), nullable=True),
        sa.Column("finished_at", UtcTime(), nullable=True),
        sa.Column("cancel_requested_at", UtcTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "input_files",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("modified", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("first_row_number", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_input_files_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name=op.f("pk_input_files")),
    )
    op.create_index(op.f("ix_input_files_job_id_first_row_number"), "input_files", ["job_id", "first_row_number"])
    op.create_table(
        "shards",
        sa.Column("id", Id, nullable=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_row_number", sa.BigInteger(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("suspect_first_row", sa.BigInteger(), nullable=True),
        sa.Column("suspect_last_row", sa.BigInteger(), nullable=True),
        sa.Column("suspect_attempt", sa.Integer(), nullable=True),
        sa.Column("suspect_deaths", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", UtcTime(), nullable=True),
        sa.Column("sent_at", UtcTime(), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("unanswered", sa.BigInteger(), nullable=False),
        sa.Column("row_errors", sa.BigInteger(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.Column("started_at", UtcTime(), nullable=True),
        sa.Column("finished_at", UtcTime(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shards")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_shards_job_id_number")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_shards_status_lease_expires_at"), "shards", ["status", "lease_expires_at"], unique=False)
    op.create_table(
        "job_checkpoints",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_checkpoints_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "checkpoint", name=op.f("pk_job_checkpoints")),
    )
    op.create_table(
        "levels",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_levels_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "question", "level", name=op.f("pk_levels")),
    )
    op.create_table(
        "workers",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("parent_pid", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("backend_asked", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("fallback_reason", sa.Text(), nullable=True),
        sa.Column("dtype", sa.Text(), nullable=True),
        sa.Column("warmup_s", sa.Float(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=True),
        sa.Column("refused_messages", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("started_at", UtcTime(), nullable=False),
        sa.Column("heartbeat_at", UtcTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "batches",
        sa.Column("id", Id, nullable=False),
        sa.Column("job_id", Id, nullable=False),
        sa.Column("shard_id", Id, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", Id, nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("fallback_reason", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("bucket_length", sa.Integer(), nullable=False),
        sa.Column("sequences", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("padded_tokens", sa.Integer(), nullable=False),
        sa.Column("memory_splits", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("cpu_sequences", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("read_ms", sa.Float(), nullable=False),
        sa.Column("tokenise_ms", sa.Float(), nullable=False),
        sa.Column("forward_ms", sa.Float(), nullable=False),
        sa.Column("decode_ms", sa.Float(), nullable=False),
        sa.Column("write_ms", sa.Float(), nullable=True),
        sa.Column("created_at", UtcTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_batches_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name=op.f("fk_batches_shard_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_batches_worker_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_batches_job_id"), "batches", ["job_id"], unique=False)
    op.create_index(op.f("ix_batches_shard_id"), "batches", ["shard_id"], unique=False)
    op.create_index(op.f("ix_batches_worker_id"), "batches", ["worker_id"], unique=False)
    op.create_table(
        "results",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("row_number", sa.BigInteger(), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("row_id", sa.Text(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("choice", sa.Text(), nullable=True),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("noul", sa.Double(), nullable=True),
        sa.Column("probabilities", sa.JSON(), nullable=False),
        sa.Column("confidence", sa.Double(), nullable=False),
        sa.Column("answer_confidence", sa.Double(), nullable=False),
        sa.Column("act_probability", sa.Double(), nullable=False),
        sa.Column("state_tokens_dropped", sa.Integer(), nullable=False),
        sa.Column("options_cut", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("language", sa.Text(), nullable=True),
        sa.Column("route_reason", sa.Text(), nullable=True),
        sa.Column("batch_id", Id, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_results_batch_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_results_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "row_number", "question", name=op.f("pk_results")),
    )
    op.create_index(op.f("ix_results_batch_id"), "results", ["batch_id"], unique=False)
    op.create_table(
        "row_errors",
        sa.Column("job_id", Id, nullable=False),
        sa.Column("row_number", sa.BigInteger(), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.Column("row_id", sa.Text(), nullable=True),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_row_errors_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "row_number", "question", name=op.f("pk_row_errors")),
    )
    for name, select in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {select}")


def downgrade() -> None:
    for name in VIEWS:
        op.execute(f"DROP VIEW {name}")
    for name in ("row_errors", "results", "batches", "workers", "levels", "job_checkpoints"):
        op.drop_table(name)
    for name in ("shards", "input_files", "jobs"):
        op.drop_table(name)
