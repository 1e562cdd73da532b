"""The Celery task: a message in, a shard's outcome in the database. Thin: `worker.shard` does the work."""

import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Task
from pydantic import ValidationError

from jobs.errors import DatabaseError, LayaBatchError, LeaseLostError
from jobs.queue import SCORE_SHARD
from jobs.store import leases
from jobs.store.suspects import record_death
from schemas.job import Claim
from schemas.message import QueuedShard, ShardMessage
from worker.sweep import send_again

if TYPE_CHECKING:
    from worker.session import Session

log = logging.getLogger(__name__)

UNUSABLE_S = 5.0  # between two messages, while the database can be used for neither
LOOK_S = 0.1


class ScoreShard(Task):  # type: ignore[misc]  # Celery has no types
    """Scores the shard that the message names, if it still waits to be scored."""

    name = SCORE_SHARD
    session: ClassVar["Session"]  # set in the child once it is warm

    def run(self, **message: Any) -> None:
        """Claim, score and end one shard. A message that names nothing waiting is dropped: it came twice, or late."""
        try:
            doorbell = ShardMessage.model_validate(message)
        except ValidationError:
            log.warning("message dropped: it is not {job_id, shard_id}")
            self.session.vitals.count_refused()
            return
        session = self.session
        named = f"job {doorbell.job_id} shard {doorbell.shard_id}"
        try:
            claim = leases.claim_shard(session.db, doorbell, session.owner, session.settings.lease_s)
            if claim is None:
                log.info("%s: nothing to claim", named)
                return
            named = str(claim)
            with session.holding(claim):
                _score(session, claim)
        except LeaseLostError as error:
            log.warning("%s: left to the next worker: %s", named, error)
        except DatabaseError as error:
            log.error("%s: left until the database can be used: %s", named, error)  # noqa: TRY400 - words, no traceback
            _wait_for_database(session)


def _wait_for_database(session: "Session") -> None:
    """Let some time pass before the next message: a worker that can record nothing must not empty the queue."""
    wait_until = time.monotonic() + UNUSABLE_S
    while time.monotonic() < wait_until and not session.vitals.draining.is_set():
        time.sleep(LOOK_S)


def _score(session: "Session", claim: Claim) -> None:
    """Run the shard and record how it ended."""
    from worker.halving import DeviceLostError  # noqa: PLC0415 - not in the parent
    from worker.shard import OF_THE_JOB, PERMANENT, DrainingError, JobStoppedError, run_shard  # noqa: PLC0415

    plan = claim.plan
    log.info("%s: %d rows of %d files, the first %s", claim, plan.rows, len(plan.files), plan.files[0].name)
    try:
        run_shard(session, claim)
        outcome = leases.finish_shard(session.db, claim)
        log.info("%s: done%s", claim, f"; the job {outcome}" if outcome else "")
    except LeaseLostError:
        raise
    except JobStoppedError:
        leases.stop_shard(session.db, claim)
        log.info("%s: stopped with its job", claim)
    except DrainingError:
        leases.give_back(session.db, claim)
        send_again(session.settings, [QueuedShard(claim.job_id, claim.shard_id, claim.priority)])
        log.info("%s: given back", claim)
    except DeviceLostError as error:
        log.exception("%s: this process can score no more", claim)
        reason = f"the worker process ended itself: {error}"
        try:
            send_again(session.settings, record_death(session.db, claim, reason, session.settings.max_attempts))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)  # only a new process has a new device, and only if it boots
    except Exception as error:  # the task boundary: whatever an attempt dies of is counted on the shard
        expected = isinstance(error, LayaBatchError)  # its words say enough
        log.log(logging.ERROR, "%s: failed: %s", claim, error, exc_info=None if expected else error)
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OF_THE_JOB):
            leases.fail_job(session.db, claim, reason)
        else:
            attempts = 1 if isinstance(error, PERMANENT) else session.settings.max_attempts
            leases.fail_shard(session.db, claim, reason, attempts)
