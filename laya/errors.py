"""Every error this package raises on purpose:

LayaError
├── CheckpointError
├── QuestionError
├── StateError
└── BackendError
    └── BackendUnavailableError
"""


class LayaError(Exception):
    """Something laya was given, or runs on, does not allow what was asked."""


class CheckpointError(LayaError):
    """A checkpoint cannot be found, verified or read."""


class QuestionError(LayaError):
    """A question is malformed, or does not fit in a sequence."""


class StateError(LayaError):
    """A state cannot be turned into text."""


class BackendError(LayaError):
    """A backend is unknown, or cannot run here."""


class BackendUnavailableError(BackendError):
    """A backend is not for this machine or model."""
