"""The engine: states and questions in, answers out. Owns the stages' order, the active backend, and `load`.

Each stage has a module of its own; a caller that times them calls them one by one, as `predict_batch` does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laya.backends.base import Backend, BackendContext
from laya.backends.selection import AUTO, DEFAULT, Choice, Flags, choose_backend
from laya.calibration import Temperatures, read_calibration, warn_if_fitted_for_another
from laya.checkpoint import Checkpoint, check_digests, load_model
from laya.decode import Answers, Logits, decode
from laya.errors import ArgumentError, BackendError, CheckpointMismatchError, NotFiniteError, QuestionError, StateError
from laya.opening import LoadOptions, open_named
from laya.operations import choose_operations
from laya.packing import Batch, PackingLimits, default_limits, in_batches_of, pack, split_batch, warmup_shapes
from laya.precision import choose_device, choose_dtype
from laya.questions import check_questions
from laya.replies import render_replies
from laya.runner import Degradations, Launched, Runner, one_behind
from laya.sequence import EncodedSequences, PreparedQuestions, encode_sequences, prepare_questions
from laya.settings import Settings, read_settings
from laya.states import list_states
from laya.tokenizer import TextTokenizer
from schemas.question_text import SequenceLimits

Questions = Mapping[str, Mapping[str, Any]]
MODEL_NAME = "laya-rl-agent"  # of every reply, whatever the checkpoint


class Agent:
    """One checkpoint on one device. Safe to share between threads."""

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path = "english",
        device: str | torch.device | None = None,
        *,
        backend: str | Choice | None = None,
        strict: bool = False,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        """`checkpoint` is an opened one, or a name, folder or Hub id, with which `options` are those of `laya.load`.

        Raises CheckpointError when it cannot be found or loaded, BackendError as `set_backend` does.
        """
        self._settings = settings or read_settings()
        if isinstance(checkpoint, Checkpoint):
            if options:
                raise TypeError(f"of an opened checkpoint, {', '.join(options)} cannot be said any more")
            opened = checkpoint
        else:
            named = backend.name if isinstance(backend, Choice) else backend
            opened, backend = open_named(checkpoint, LoadOptions(backend=named, **options), self._settings)
            if backend.name == "onnx":
                raise BackendError("an Agent runs the PyTorch model: laya.load the checkpoint with backend='onnx'")
        self.checkpoint: Checkpoint = opened
        self.temperatures: Temperatures = opened.temperatures
        self.tokenizer = TextTokenizer(opened.tokenizer_path, opened.model_config.vocab_size)
        if not isinstance(backend, Choice):
            backend = self._choose(DEFAULT if backend is None else backend, self._settings.compile_warmup)
        self._runner = Runner(self._make_context(device), backend, strict)

    def _make_context(self, asked: str | torch.device | None) -> BackendContext:
        checkpoint, device = self.checkpoint, choose_device(asked)
        dtype = choose_dtype(device, checkpoint.amp_dtype, self._settings)
        model = load_model(checkpoint, device, dtype)
        return BackendContext(model, device, dtype, checkpoint, self._settings.cache_dir)

    @property
    def model(self) -> torch.nn.Module:
        return self._runner.context.model

    @property
    def device(self) -> torch.device:
        return self._runner.context.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return self._runner.context.dtype

    @property
    def backend(self) -> str:
        """The name of the backend that runs, which after a fallback is not the one that was asked for."""
        return self._runner.backend.name

    @property
    def backend_object(self) -> Backend:
        return self._runner.backend

    @property
    def fallback_reason(self) -> str | None:
        """Why the backend asked for does not run; None when it does."""
        return self._runner.fallback_reason

    @property
    def degradations(self) -> Degradations:
        """How often memory was short, since the agent was made."""
        return self._runner.degradations

    def set_backend(self, name: str = AUTO, strict: bool = False, warmup: bool | None = None) -> str:
        """Run `name` from now on, after the inference in flight; the name that runs is returned.

        A backend that cannot run gives one RuntimeWarning and eager, or BackendError when `strict`; an unknown name
        always raises BackendError, and whatever ran before goes on. `warmup=False` leaves compiling to the first
        request, whose errors then surface there; None does as LAYA_COMPILE_WARMUP says.
        """
        choice = self._choose(name, self._settings.compile_warmup if warmup is None else warmup)
        self._runner.set_backend(choice, strict)
        return self.backend

    def with_options(
        self,
        *,
        max_len: int | None = None,
        head_max_len: int | None = None,
        calibration: str | Path | Mapping[str, Any] | None = None,
        expected_sha256: Mapping[str, str] | None = None,
    ) -> "Agent":
        """Return an agent with other lengths (tokens) or temperatures that shares this one's weights and backend.

        Without `max_len` it reads as many tokens as the checkpoint's files say; all else stays as it is where nothing
        is given. `set_backend` on either changes both. Raises CheckpointError for a calibration that cannot be read,
        CheckpointMismatchError for files of other digests than `expected_sha256`, a `max_len` beyond the one that this
        agent was loaded with, and a `head_max_len` that leaves a state no room.
        """
        loaded = self.checkpoint
        check_digests(loaded.path, loaded.digests, expected_sha256 or {})
        longest = loaded.own_max_len if max_len is None else max_len
        if not 1 <= longest <= loaded.max_len:
            raise CheckpointMismatchError(
                f"{loaded.name}: max_len: expected 1 to {loaded.max_len} tokens, found {longest}"
            )
        if head_max_len is not None and not 1 <= head_max_len < longest:
            raise CheckpointMismatchError(
                f"{loaded.name}: head_max_len: expected 1 to {longest - 1} tokens, fewer than max_len, "
                f"found {head_max_len}"
            )
        other = copy(self)
        other.checkpoint = replace(loaded, max_len=longest, head_max_len=head_max_len or loaded.head_max_len)
        if calibration is not None:
            other.temperatures = read_calibration(calibration)
            warn_if_fitted_for_another(other.temperatures, loaded.name, loaded.path, loaded.agent_config)
        return other

    def deaccelerate(self) -> None:
        """Remove whatever backend was installed: eager runs."""
        self.set_backend(DEFAULT)

    def prepare(self, questions: Questions) -> PreparedQuestions:
        """Check the questions and lay their heads out once.

        Raises QuestionError for a malformed one, TypeError for what is no object of questions.
        """
        if not isinstance(questions, Mapping):
            raise TypeError(f"questions: expected an object of {{id: question}}, found {type(questions).__name__}")
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
        return pack(encoded.lengths, limits or default_limits(self.device.type), self._runner.shapes)

    def forward(self, encoded: EncodedSequences, batch: Batch) -> Logits:
        """Run one batch on the active backend; the result is on the host when this returns."""
        return self.launch(encoded, batch).result()

    def launch(self, encoded: EncodedSequences, batch: Batch) -> Launched:
        """Queue one batch on the device, whose errors may come with the result."""
        return self._runner.launch(encoded, batch)

    def forward_each(self, encoded: EncodedSequences, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Logits]]:
        """Run batches one after another, each laid out and queued while the device is busy with the one before."""
        launches = ((batch, self.launch(encoded, batch)) for batch in batches)
        for batch, launched in one_behind(launches, lambda launch: launch[1].done):
            yield batch, launched.result()

    def halve(self, encoded: EncodedSequences, batch: Batch) -> tuple[Batch, Batch]:
        """A batch of two sequences or more as two."""
        return split_batch(batch, encoded.lengths, self._runner.shapes)

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
        a malformed question or one that does not fit, StateError for a state that has no text, NotFiniteError for one
        whose logits are not finite, TypeError for one state where a list of them belongs.
        """
        states = list_states(states)
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ArgumentError(f"batch_size: expected a whole number of at least 1, or None, found {batch_size!r}")
        prepared = self.prepare(questions)
        for reason in prepared.unfit.values():
            raise QuestionError(reason)
        encoded = self.encode(states, prepared)
        for index, reason in encoded.unfit.items():
            raise StateError(f"state {index}: {reason}")
        limits = in_batches_of(default_limits(self.device.type), batch_size, sort_by_length)
        return self.predict_encoded(len(states), prepared, encoded, limits)

    def predict_encoded(
        self,
        states: int,
        prepared: PreparedQuestions,
        encoded: EncodedSequences,
        limits: PackingLimits | None = None,
    ) -> list[dict[str, Any]]:
        """What `predict_batch` returns, about `states` states that are encoded already."""
        parts = [
            self.decode(prepared, encoded, part, finite)
            for batch, logits in self.forward_each(encoded, self.pack(encoded, limits))
            for part, finite in self._finite_parts(prepared, encoded, batch, logits)
        ]
        return render_replies(MODEL_NAME, states, prepared, encoded, parts)

    def _finite_parts(
        self, prepared: PreparedQuestions, encoded: EncodedSequences, batch: Batch, logits: Logits
    ) -> Iterator[tuple[Batch, Logits]]:
        """The batch as it is, or its halves scored again: within a pass, a sequence may spoil the others' logits."""
        if logits.finite:
            yield batch, logits
        elif len(batch) == 1:
            (sequence,) = batch.index
            question = prepared.questions[int(encoded.question_index[sequence])].id
            dtype = str(self.dtype).removeprefix("torch.")
            raise NotFiniteError(int(encoded.state_index[sequence]), question, dtype)
        else:
            for half in self.halve(encoded, batch):
                yield from self._finite_parts(prepared, encoded, half, self.forward(encoded, half))

    def warmup_shapes(self, limits: PackingLimits | None = None) -> list[tuple[int, int]]:
        """(sequences, tokens of each): shapes that, run once, leave the backend warm for every batch under `limits`.

        On a CPU, where a large batch takes long and leaves nothing warmer, of one sequence.
        """
        shapes = warmup_shapes(limits or default_limits(self.device.type), self._runner.shapes)
        return shapes if self.device.type != "cpu" else [(1, length) for _, length in shapes]

    def warmup(self, shapes: Iterable[tuple[int, ...]] | None = None) -> None:
        """Run the active backend once on each shape: (sequences, tokens of each[, markers]); errors propagate."""
        self._runner.warmup(self.warmup_shapes() if shapes is None else shapes)

    def export_aot(self, path: str | Path | None = None) -> Path:
        """As `laya.export_aot`."""
        from laya.aot import artifact_path, describe, write_artifact  # noqa: PLC0415 - the compiler is long to import

        context = self._runner.context
        description = describe(self.checkpoint, context.device, context.dtype)
        asked = None if path is None else Path(path).expanduser()
        path = artifact_path(asked, context.cache_dir / "aot", description)
        write_artifact(context.model, choose_operations(context.device, context.dtype), description, path)
        return path

    def _choose(self, name: str, warm: bool) -> Choice:
        return choose_backend(name, Flags(), replace(self._settings, compile_warmup=warm))


def load(  # noqa: PLR0913 - keyword-only, and the flags of earlier versions are among them
    checkpoint: str | Path = "english",
    device: str | torch.device | None = None,
    token: str | None = None,
    subfolder: str | None = None,
    *,
    backend: str | None = None,
    revision: str | None = None,
    expected_sha256: Mapping[str, str] | None = None,
    calibration: str | Path | Mapping[str, Any] | None = None,
    max_len: int | None = None,
    head_max_len: int | None = None,
    strict: bool = False,
    fast: bool = False,
    compile: bool = False,
    compile_mode: str = "default",
    compile_warmup: bool = True,
    compile_cache: bool = False,
    onnx_path: str | Path | None = None,
) -> Agent:
    """Find, verify and load a checkpoint: a name or alias, a folder, or a Hub id with an optional subfolder.

    `device` is chosen where it is None or "auto". `subfolder` is one of the folder or Hub repository, `revision` a
    branch, tag or commit of the Hub, or `reviewed`, and `token` the Hub's. `expected_sha256` maps paths in the
    checkpoint to digests; `calibration` is a file, or the content of one, that replaces the shipped temperatures;
    `max_len` and `head_max_len` (tokens) replace the checkpoint's. Where `revision` or `expected_sha256` is left out,
    LAYA_REVISION or LAYA_SHA256_DIGESTS counts.

    `backend` is eager when left out, and beats the flags `fast` (tilelang) and `compile`; `strict` raises where it
    cannot run. The flag `compile` works on a CPU too, in `compile_mode` default or reduce-overhead; `compile_warmup`
    compiles at load, as well as it can; `compile_cache` keeps compiled code in ~/.cache/laya unless
    TORCHINDUCTOR_CACHE_DIR says where. `backend="onnx"` gives an ONNXAgent on the graph at `onnx_path`, or at
    `laya.onnx` in the checkpoint's folder, and never falls back. Raises CheckpointError, BackendError or ArgumentError.
    """
    settings = read_settings()
    options = LoadOptions(
        backend=backend,
        token=token,
        subfolder=subfolder,
        revision=revision,
        expected_sha256=expected_sha256,
        calibration=calibration,
        max_len=max_len,
        head_max_len=head_max_len,
        fast=fast,
        compile=compile,
        compile_mode=compile_mode,
        compile_warmup=compile_warmup,
        compile_cache=compile_cache,
    )
    opened, choice = open_named(checkpoint, options, settings)
    if choice.name == "onnx":
        from laya.onnx import ONNXAgent  # noqa: PLC0415 - it builds on this module

        return ONNXAgent(opened, onnx_path=onnx_path, device=device, settings=settings)
    if onnx_path is not None:
        raise BackendError(f"onnx_path is for backend='onnx', not {choice.name!r}")
    return Agent(opened, device=device, backend=choice, strict=strict, settings=settings)


def export_aot(checkpoint: str | Path | Agent, path: str | Path | None = None, **options: Any) -> Path:
    """Compile a checkpoint's forward pass ahead of time, for this device and this torch; the artifact's path.

    `path` is a file that ends in .pt2, or a folder; without one it goes to ~/.cache/laya/aot, where `backend="aot"` and
    `auto` find it; they also look beside a checkpoint that is a folder. `options` are `load`'s. It takes minutes, and
    the artifact is a program: use those only that you made. Raises BackendError, before it compiles where it can.
    """
    agent = checkpoint if isinstance(checkpoint, Agent) else load(checkpoint, **options)
    return agent.export_aot(path)
