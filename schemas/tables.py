"""The tables, for SQLite and PostgreSQL. Owns their shape alone: `jobs.store` holds the statements."""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, ForeignKey, Index, Table, UniqueConstraint

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

MESSAGE_CHARS = 2000

Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only INTEGER keys count up by themselves in SQLite


class UtcTime(sa.types.TypeDecorator[datetime]):
    """A moment in UTC: timestamptz in PostgreSQL; in SQLite, which has no zones, text that sorts."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        # PostgreSQL answers in the session's zone.
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Text(sa.types.TypeDecorator[str]):
    """Text without NUL, which PostgreSQL cannot hold: it is shown as U+2400, its picture."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:  # noqa: ARG002
        return value.replace("\x00", "\u2400") if value is not None and "\x00" in value else value


class Message(Text):
    """Words for people, which can always be saved: at most MESSAGE_CHARS, and U+FFFD for what is no Unicode."""

    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        if value is None:
            return None
        if len(value) > MESSAGE_CHARS:
            value = value[: MESSAGE_CHARS - 1] + "…"
        return super().process_bind_param(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), dialect)


jobs = Table(
    "jobs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text),
    Column("status", Text, nullable=False),
    Column("spec", sa.JSON, nullable=False),
    Column("priority", sa.Integer, nullable=False),
    Column("idempotency_key", Text, unique=True),
    Column("returned", sa.Boolean, nullable=False, server_default=sa.false()),  # by its key, to a later call: it stays
    Column("rows", sa.BigInteger, nullable=False),
    Column("shards", sa.Integer, nullable=False),
    Column("questions", sa.Integer, nullable=False),
    Column("row_errors", sa.BigInteger, nullable=False, default=0),
    Column("checkpoint_fingerprint", Text),  # of the weights that score it: set by the first shard, held to by the rest
    Column("checkpoint_revision", Text),
    Column("error", Message),
    # Rows without an id, and rows whose id another has, too: counted when first asked for, once the job has ended.
    Column("null_ids", sa.BigInteger),
    Column("repeated_ids", sa.BigInteger),
    Column("warnings", sa.JSON, nullable=False),  # a list of texts: of options that the model cannot tell apart
    Column("created_at", UtcTime, nullable=False),
    Column("started_at", UtcTime),
    Column("finished_at", UtcTime),
    Column("cancel_requested_at", UtcTime),
    sqlite_autoincrement=True,  # an id is never another's: what a late worker or a script holds names nothing else
)

input_files = Table(
    "input_files",
    metadata,
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("number", sa.Integer, primary_key=True, autoincrement=False),  # 0-based within the job
    Column("name", Text, nullable=False),  # absolute path or URL
    Column("size", sa.BigInteger, nullable=False),  # bytes; with `modified`, what tells that a file has changed
    Column("modified", Text, nullable=False),
    Column("rows", sa.BigInteger, nullable=False),
    Column("first_row_number", sa.BigInteger, nullable=False),  # 0-based within the job
    Index(None, "job_id", "first_row_number"),
)

shards = Table(
    "shards",
    metadata,
    Column("id", Id, primary_key=True),
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("number", sa.Integer, nullable=False),  # 0-based within the job
    Column("first_row_number", sa.BigInteger, nullable=False),  # 0-based within the job
    Column("rows", sa.Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("attempt", sa.Integer, nullable=False, default=0),  # rises with each claim; every write checks it
    Column("failures", sa.Integer, nullable=False, default=0),  # attempts that ended in an error, since the last answer
    # Processes that died with it in hand since the last answer; and, once one has, the rows that may have been why,
    # the last attempt that scored just these, and how many processes died of that.
    Column("deaths", sa.Integer, nullable=False, default=0),
    Column("suspect_first_row", sa.BigInteger),
    Column("suspect_last_row", sa.BigInteger),
    Column("suspect_attempt", sa.Integer),
    Column("suspect_deaths", sa.Integer, nullable=False, default=0),
    Column("lease_owner", Text),
    Column("lease_expires_at", UtcTime),
    Column("sent_at", UtcTime, nullable=False),  # when its message last went to the queue
    Column("answers", sa.BigInteger, nullable=False, default=0),
    Column("unanswered", sa.BigInteger, nullable=False, default=0),  # (row, question) pairs that ended in an error
    Column("row_errors", sa.BigInteger, nullable=False, default=0),
    Column("last_error", Message),
    Column("started_at", UtcTime),
    Column("finished_at", UtcTime),
    UniqueConstraint("job_id", "number"),
    Index(None, "status", "lease_expires_at"),
    sqlite_autoincrement=True,
)

job_checkpoints = Table(
    "job_checkpoints",
    metadata,
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("checkpoint", Text, primary_key=True),  # of a routed job: `english` or `multilingual`
    Column("fingerprint", Text, nullable=False),  # of the weights: set by the first shard, held to by the rest
    Column("revision", Text),
)

levels = Table(
    "levels",
    metadata,
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("question", Text, primary_key=True),  # a score
    Column("level", sa.Integer, primary_key=True),  # 0 the lowest
    Column("text", Text, nullable=False),  # its description, which is the answer's text
)

workers = Table(
    "workers",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", sa.Integer, nullable=False),  # of the process that scores
    Column("parent_pid", sa.Integer, nullable=False),  # of Celery, which started it
    Column("device", Text, nullable=False),
    Column("status", Text, nullable=False),  # starting, ready, failed, stopped
    Column("checkpoint", Text, nullable=False),
    Column("backend_asked", Text, nullable=False),
    Column("backend", Text),
    Column("fallback_reason", Message),
    Column("dtype", Text),
    Column("warmup_s", sa.Float),
    Column("versions", sa.JSON),
    Column("refused_messages", sa.Integer, nullable=False, default=0),  # pickled, garbled, or naming more than a shard
    Column("error", Message),
    Column("started_at", UtcTime, nullable=False),
    Column("heartbeat_at", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)

batches = Table(
    "batches",
    metadata,
    Column("id", Id, primary_key=True),
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("shard_id", Id, ForeignKey("shards.id", ondelete="CASCADE"), nullable=False),
    Column("attempt", sa.Integer, nullable=False),
    Column("worker_id", Id, ForeignKey("workers.id"), nullable=False),
    Column("checkpoint", Text),  # as the job named it; in a routed job, the one its rows went to
    Column("backend", Text, nullable=False),  # the one that really ran
    Column("fallback_reason", Message),  # why it is not the one that the job asked for
    Column("device", Text, nullable=False),
    Column("dtype", Text, nullable=False),
    Column("bucket_length", sa.Integer, nullable=False),  # tokens; none of its sequences is longer
    Column("sequences", sa.Integer, nullable=False),  # (row, question) pairs
    Column("tokens", sa.Integer, nullable=False),  # real tokens
    Column("padded_tokens", sa.Integer, nullable=False),  # computed: sequences x bucket_length where a backend pads
    Column("memory_splits", sa.Integer, nullable=False, server_default="0"),  # times run as two halves, out of memory
    Column("cpu_sequences", sa.Integer, nullable=False, server_default="0"),  # run on the CPU, out of memory
    Column("read_ms", sa.Float, nullable=False),
    Column("tokenise_ms", sa.Float, nullable=False),
    Column("forward_ms", sa.Float, nullable=False),
    Column("decode_ms", sa.Float, nullable=False),
    Column("write_ms", sa.Float),  # up to, not with, the commit
    Column("created_at", UtcTime, nullable=False),
    Index(None, "job_id"),
    Index(None, "shard_id"),
    Index(None, "worker_id"),
    sqlite_autoincrement=True,
)

results = Table(
    "results",
    metadata,
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("row_number", sa.BigInteger, primary_key=True),  # 0-based within the job, in the order of its files
    Column("question", Text, primary_key=True),
    Column("row_id", Text),
    Column("type", Text, nullable=False),
    Column("choice", Text),  # choice: the most probable label
    Column("score", sa.Double),  # score: the expected level, 0 the lowest
    Column("noul", sa.Double),  # noul: P(true)
    Column("probabilities", sa.JSON, nullable=False),  # option -> probability
    Column("confidence", sa.Double, nullable=False),
    Column("answer_confidence", sa.Double, nullable=False),
    Column("act_probability", sa.Double, nullable=False),
    Column("state_tokens_dropped", sa.Integer, nullable=False),
    # Whether some options had the same tokens left, so that the model could not tell them apart.
    Column("options_cut", sa.Boolean, nullable=False, server_default=sa.false()),
    Column("language", Text),  # in a routed job: what the row is written in, null when undecided
    Column("route_reason", Text),  # in a routed job: why its batch's checkpoint answered
    Column("batch_id", Id, ForeignKey("batches.id", ondelete="CASCADE"), nullable=False),
    Index(None, "batch_id"),
)

row_errors = Table(
    "row_errors",
    metadata,
    Column("job_id", Id, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("row_number", sa.BigInteger, primary_key=True),
    Column("question", Text, primary_key=True),  # '*': the whole row
    Column("row_id", Text),
    Column("code", Text, nullable=False),
    Column("message", Message, nullable=False),
)


# The views, which the migrations create.

job_progress = sa.table(
    "job_progress",
    *(sa.column(name) for name in ("job_id", "shards_done", "answers", "unanswered", "row_errors")),
)

answers = sa.table(
    "answers",
    *(
        sa.column(name, kind)
        for name, kind in (
            ("job_id", Id),
            ("row_number", sa.BigInteger()),
            ("row_id", Text()),
            ("question", Text()),
            ("type", Text()),
            ("answer", Text()),
            ("level", sa.Integer()),
            ("choice", Text()),
            ("score", sa.Double()),
            ("noul", sa.Double()),
            ("probabilities", sa.JSON()),
            ("confidence", sa.Double()),
            ("answer_confidence", sa.Double()),
            ("act_probability", sa.Double()),
            ("state_tokens_dropped", sa.Integer()),
            ("options_cut", sa.Boolean()),
            ("checkpoint", Text()),
            ("language", Text()),
            ("route_reason", Text()),
            ("batch_id", Id),
        )
    ),
)

backend_throughput = sa.table(
    "backend_throughput",
    *(
        sa.column(name)
        for name in (
            *("job_id", "backend", "device", "dtype", "batches", "sequences", "tokens", "padded_tokens"),
            *("read_ms", "tokenise_ms", "forward_ms", "decode_ms", "write_ms"),
        )
    ),
)
