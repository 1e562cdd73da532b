"""Every error this package raises on purpose, and what a compiler's says:

LayaError
├── ArgumentError (ValueError)
├── CheckpointError (ValueError)
│   ├── CheckpointMismatchError
│   └── MissingFileError (FileNotFoundError)
│       └── CheckpointNotFoundError
├── QuestionError (ValueError)
├── StateError (TypeError)
├── NotFiniteError
└── BackendError (ValueError)
    └── BackendUnavailableError (RuntimeError)
        └── ArtifactMisfitError

The built-in class beside each is the one that the public package raises in its place. An argument of the wrong type is
a plain TypeError.
"""


class LayaError(Exception):
    """Something laya was given, or runs on, does not allow what was asked."""


class ArgumentError(LayaError, ValueError):
    """An argument, a variable of the environment, or a device is none of what can be."""


class CheckpointError(LayaError, ValueError):
    """A checkpoint cannot be found, verified or read."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is there, but is not the one that was asked for, or cannot be used as was asked."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A checkpoint, or a file that belongs to it, is not there."""


class CheckpointNotFoundError(MissingFileError):
    """There is no checkpoint of that name, here or on the Hub; asking again changes nothing."""


class QuestionError(LayaError, ValueError):
    """A question is malformed, or does not fit in a sequence."""


class StateError(LayaError, TypeError):
    """A state cannot be turned into text."""


class NotFiniteError(LayaError):
    """A state, or the checkpoint's weights, lead to numbers that are not finite: there is no answer."""

    def __init__(self, state: int, question: str, dtype: str) -> None:
        self.state, self.question, self.dtype = state, question, dtype
        super().__init__(
            f"state {state}, question {question!r}: its logits are not finite numbers; something in the text, or in "
            f"the weights, leads beyond what {dtype} holds"
        )


class BackendError(LayaError, ValueError):
    """A backend is unknown, or cannot run here."""


class BackendUnavailableError(BackendError, RuntimeError):
    """A backend is not for this machine or model."""


class ArtifactMisfitError(BackendUnavailableError):
    """What was compiled ahead of time for a checkpoint does not fit this machine, this torch or this code any more."""


def compiler_words(error: BaseException) -> str:
    """The compiler's own words, which torch wraps in its own: those about an error, or else the first."""
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = cause
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "error: " in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {said}"
