"""The Laya decision engine: load a checkpoint, ask typed questions about states, get calibrated answers.

Knows nothing of jobs or queues. `agent` is the way in; docs of the stages are in their own modules.
"""

from importlib.metadata import version

import laya.threads  # noqa: F401 - first: it decides how torch is loaded
from laya.agent import Agent, export_aot, load
from laya.checkpoint import Checkpoint
from laya.decode import Answers, Logits
from laya.errors import (
    ArgumentError,
    BackendError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    LayaError,
    MissingFileError,
    NotFiniteError,
    QuestionError,
    StateError,
)
from laya.onnx import ONNXAgent, export_onnx
from laya.packing import Batch, PackingLimits
from laya.router import Route, Router, choose_route
from laya.runner import Launched
from laya.sequence import EncodedSequences, PreparedQuestions
from laya.states import state_text

__version__ = version("laya-batch")

__all__ = [
    "Agent",
    "Answers",
    "ArgumentError",
    "BackendError",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "EncodedSequences",
    "Launched",
    "LayaError",
    "Logits",
    "MissingFileError",
    "NotFiniteError",
    "ONNXAgent",
    "PackingLimits",
    "PreparedQuestions",
    "QuestionError",
    "Route",
    "Router",
    "StateError",
    "__version__",
    "choose_route",
    "export_aot",
    "export_onnx",
    "load",
    "state_text",
]
