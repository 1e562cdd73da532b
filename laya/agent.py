"""The engine: states and questions in, answers out. Owns the stages' order, the active backend, and `load`.

Each stage has a module of its own; a caller that times them calls them one by one, as `predict_batch` does.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laya.backends.base import Backend, BackendContext
from laya.backends.selection import DEFAULT, choose_backend, resolve_backend
from laya.calibration import Temperatures, read_calibration
from laya.checkpoint import Checkpoint, Limits, load_model, open_checkpoint
from laya.collation import LEAST_MARKERS, collate, synthetic_inputs
from laya.decode import Answers, Logits, decode
from laya.errors import QuestionError, StateError
from laya.location import find_checkpoint
from laya.packing import Batch, PackingLimits, Shapes, default_limits, in_batches_of, largest_batches, pack
from laya.precision import choose_device, choose_dtype
from laya.questions import check_questions
from laya.replies import render_replies
from laya.sequence import EncodedSequences, PreparedQuestions, SequenceLimits, encode_sequences, prepare_questions
from laya.settings import Settings, read_settings
from laya.tokenizer import TextTokenizer

Questions = Mapping[str, Mapping[str, Any]]


class Agent:
    """One checkpoint on one device. Safe to share between threads: forward passes run one at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str | torch.device | None = None,
        backend: str = DEFAULT,
        strict: bool = False,
        settings: Settings | None = None,
    ) -> None:
        """Raises CheckpointError when the files cannot be loaded, BackendError as `set_backend` does."""
        self.checkpoint = checkpoint
        self.device = choose_device(device)
        self.dtype = choose_dtype(self.device, checkpoint.amp_dtype, settings or read_settings())
        self.temperatures: Temperatures = checkpoint.temperatures
        self.tokenizer = TextTokenizer(checkpoint.tokenizer_path, checkpoint.model_config.vocab_size)
        self.model = load_model(checkpoint, self.device, self.dtype)
        self._lock = threading.RLock()  # held by each forward pass, so that whoever changes the backend waits for it
        self._backend: Backend = resolve_backend(DEFAULT, self._context, strict=True).backend
        self._fallback_reason: str | None = None
        self.set_backend(backend, strict=strict)

    @property
    def backend(self) -> str:
        """The name of the backend that runs, which after a fallback is not the one that was asked for."""
        return self._backend.name

    @property
    def backend_object(self) -> Backend:
        return self._backend

    @property
    def fallback_reason(self) -> str | None:
        """Why the backend asked for does not run; None when it does."""
        return self._fallback_reason

    def set_backend(self, name: str, strict: bool = False) -> str:
        """Run `name` from now on, after the inference in flight; the name that runs is returned.

        A backend that cannot run gives one RuntimeWarning and eager, or BackendError when `strict`; an unknown name
        always raises BackendError, and whatever ran before goes on.
        """
        name = choose_backend(name, fast=False, compile_model=False)
        with self._lock:
            resolution = resolve_backend(name, self._context, strict)
            self._backend.close()
            self._backend, self._fallback_reason = resolution.backend, resolution.reason
            return self._backend.name

    def deaccelerate(self) -> None:
        """Remove whatever backend was installed: eager runs."""
        self.set_backend(DEFAULT)

    def prepare(self, questions: Questions) -> PreparedQuestions:
        """Check the questions and lay their heads out once. Raises QuestionError for a malformed one."""
        limits = SequenceLimits(self.checkpoint.max_len, self.checkpoint.head_max_len)
        return prepare_questions(check_questions(questions), self.tokenizer, limits)

    def encode(
        self, states: Sequence[Any], prepared: PreparedQuestions, wanted: NDArray[np.bool_] | None = None
    ) -> EncodedSequences:
        """Tokenise the states once, join them with every question's head; `wanted` (states, questions) selects pairs.

        A state that has no text is left out and named in `unfit`, so that its neighbours are scored.
        """
        return encode_sequences(states, prepared, self.tokenizer, self.checkpoint.max_len, wanted)

    def pack(self, encoded: EncodedSequences, limits: PackingLimits | None = None) -> list[Batch]:
        """Plan the batches that `forward` takes one by one."""
        return pack(encoded.lengths, limits or default_limits(self.device.type), self._shapes)

    def forward(self, encoded: EncodedSequences, batch: Batch) -> Logits:
        """Run one batch on the active backend; the result is on the host when this returns."""
        inputs = collate(encoded, batch, self.tokenizer.special.pad, self.device)
        with self._lock:
            logits, act = self._backend.forward(inputs)
            return Logits(logits.cpu().numpy(), act.cpu().numpy())

    def decode(self, prepared: PreparedQuestions, encoded: EncodedSequences, batch: Batch, logits: Logits) -> Answers:
        """The answers of one batch at full precision."""
        return decode(prepared, encoded, batch, logits, self.temperatures)

    def predict(self, state: Any, questions: Questions) -> dict[str, Any]:
        """Answer the questions about one state, as `predict_batch` does."""
        return self.predict_batch([state], questions)[0]

    def predict_batch(
        self, states: Sequence[Any], questions: Questions, batch_size: int | None = None, sort_by_length: bool = True
    ) -> list[dict[str, Any]]:
        """Answer the questions about every state: dictionaries in input order, numbers rounded to 4 places.

        `batch_size` is the most sequences in one batch, None for as many as the budgets allow. Raises QuestionError for
        a malformed question or one that does not fit, StateError for a state that has no text.
        """
        prepared = self.prepare(questions)
        for reason in prepared.unfit.values():
            raise QuestionError(reason)
        encoded = self.encode(states, prepared)
        for index, reason in encoded.unfit.items():
            raise StateError(f"state {index}: {reason}")
        limits = in_batches_of(default_limits(self.device.type), batch_size, sort_by_length)
        parts = [
            self.decode(prepared, encoded, batch, self.forward(encoded, batch)) for batch in self.pack(encoded, limits)
        ]
        return render_replies(f"laya-{self.checkpoint.model_name}", len(states), prepared, encoded, parts)

    def warmup_shapes(self, limits: PackingLimits | None = None) -> list[tuple[int, int]]:
        """(sequences, bucket length) of the largest batch that packing can emit for each bucket length.

        On a CPU, where a large batch takes long and leaves nothing warmer, of one sequence.
        """
        shapes = largest_batches(limits or default_limits(self.device.type), self._shapes)
        return shapes if self.device.type != "cpu" else [(1, length) for _, length in shapes]

    def warmup(self, shapes: Iterable[tuple[int, ...]] | None = None) -> None:
        """Run the active backend once on each shape: (sequences, bucket length[, markers]); errors propagate."""
        for sequences, length, *markers in self.warmup_shapes() if shapes is None else shapes:
            shape = (sequences, length, markers[0] if markers else LEAST_MARKERS)
            with self._lock:
                logits, _ = self._backend.forward(synthetic_inputs(shape, self.device))
                logits.cpu()  # waits for the device, so that its errors surface here

    @property
    def _context(self) -> BackendContext:
        return BackendContext(self.model, self.device, self.dtype)

    @property
    def _shapes(self) -> Shapes:
        return Shapes(
            self.checkpoint.max_len, self.checkpoint.model_config.most_heads, self._backend.mask_bytes_per_element
        )


def load(  # noqa: PLR0913 - keyword-only, and the flags of earlier versions are among them
    checkpoint: str | Path = "english",
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    revision: str | None = None,
    expected_sha256: Mapping[str, str] | None = None,
    calibration: str | Path | None = None,
    max_len: int | None = None,
    head_max_len: int | None = None,
    strict: bool = False,
    fast: bool = False,
    compile: bool = False,
) -> Agent:
    """Find, verify and load a checkpoint: a name or alias, a folder, or a Hub id with an optional subfolder.

    `backend` is eager when left out, and beats the flags `fast` and `compile`; `strict` raises where it cannot run.
    `expected_sha256` maps relative paths to digests; `calibration` is a file that replaces the shipped temperatures;
    `max_len` and `head_max_len` (tokens) replace the checkpoint's. Raises CheckpointError, BackendError or LayaError.
    """
    name = choose_backend(backend, fast, compile)
    limits = Limits(max_len, head_max_len)
    opened = open_checkpoint(find_checkpoint(checkpoint, revision), expected_sha256, limits)
    agent = Agent(opened, device=device, backend=name, strict=strict)
    if calibration is not None:
        agent.temperatures = read_calibration(calibration)
    return agent
