"""Which backend runs: names, compatibility flags and fallback. Owns the table of backends, not their code."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from laya.backends.base import Backend, BackendContext, BackendFactory
from laya.errors import BackendError

DEFAULT = "eager"
AUTO = "auto"
AUTO_ORDER = ("tilelang", "compile", "eager")


def _eager(context: BackendContext) -> Backend:
    from laya.backends.eager import build_eager  # noqa: PLC0415 - a backend is imported when it is asked for

    return build_eager(context)


def _missing(_: BackendContext) -> Backend:
    raise BackendError("this version of laya has no such backend yet")


FACTORIES: Mapping[str, BackendFactory] = {"eager": _eager, "compile": _missing, "tilelang": _missing, "onnx": _missing}


@dataclass(frozen=True)
class Resolution:
    """The backend that will run; `reason` says why it is not the one asked for, None when it is."""

    backend: Backend
    reason: str | None = None


def choose_backend(backend: str | None, fast: bool, compile_model: bool) -> str:
    """One name out of an explicit choice and the older flags it beats. Raises BackendError when it is unknown."""
    flagged = "tilelang" if fast else "compile" if compile_model else DEFAULT
    name = flagged if backend is None else backend
    if name != AUTO and name not in FACTORIES:
        raise BackendError(f"unknown backend {name!r}; choose one of {', '.join((*FACTORIES, AUTO))}")
    return name


def resolve_backend(name: str, context: BackendContext, strict: bool) -> Resolution:
    """Build the backend `name`, or eager with one RuntimeWarning that says why.

    With `strict`, a backend that cannot run raises BackendError instead. `auto` silently takes the first of its
    order that runs.
    """
    if name == AUTO:
        return Resolution(_first_that_runs(context))
    try:
        return Resolution(FACTORIES[name](context))
    except BackendError as error:
        if strict or name == DEFAULT:
            raise BackendError(f"backend {name!r} cannot run: {error}") from error
        reason = f"backend {name!r} cannot run: {error}"
    warnings.warn(f"{reason}; running {DEFAULT!r} instead", RuntimeWarning, stacklevel=3)
    return Resolution(FACTORIES[DEFAULT](context), reason)


def _first_that_runs(context: BackendContext) -> Backend:
    for name in AUTO_ORDER[:-1]:
        try:
            return FACTORIES[name](context)
        except BackendError:
            continue
    return FACTORIES[AUTO_ORDER[-1]](context)
