"""Which backend runs: names, compatibility flags and fallback. Owns the table of backends, not their code."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from laya.backends.base import Backend, BackendContext, BackendFactory, CompileOptions
from laya.errors import ArtifactMisfitError, BackendError, BackendUnavailableError, compiler_words
from laya.settings import Settings

DEFAULT = "eager"
AUTO = "auto"
MODES = ("default", "reduce-overhead")  # of the flag `compile`


def _eager(context: BackendContext) -> Backend:
    from laya.backends.eager import build_eager  # noqa: PLC0415 - a backend is imported when it is asked for

    return build_eager(context)


def _compile(context: BackendContext) -> Backend:
    from laya.backends.compile import build_compile  # noqa: PLC0415

    return build_compile(context)


def _tilelang(context: BackendContext) -> Backend:
    from laya.backends.tilelang import build_tilelang  # noqa: PLC0415

    return build_tilelang(context)


def _aot(context: BackendContext) -> Backend:
    from laya.backends.aot import build_aot  # noqa: PLC0415

    return build_aot(context)


def _onnx(context: BackendContext) -> Backend:
    from laya.backends.onnx import build_onnx  # noqa: PLC0415

    return build_onnx(context)


FACTORIES: Mapping[str, BackendFactory] = {
    "eager": _eager,
    "compile": _compile,
    "tilelang": _tilelang,
    "aot": _aot,
    "onnx": _onnx,
}
AUTO_ORDER = ("tilelang", "aot", "compile", "eager")  # by speed; aot is compile where an artifact fits


@dataclass(frozen=True)
class Flags:
    """The options of `load` from before there were backends, and their defaults."""

    fast: bool = False
    compile: bool = False
    compile_mode: str = "default"
    compile_warmup: bool = True
    compile_cache: bool = False


@dataclass(frozen=True)
class Choice:
    """One backend, by name, and how it compiles where it does."""

    name: str
    compiling: CompileOptions


@dataclass(frozen=True)
class Resolution:
    """The backend that will run; `reason` says why it is not the one asked for, None when it is."""

    backend: Backend
    reason: str | None = None


def choose_backend(backend: str | None, flags: Flags, settings: Settings) -> Choice:
    """One choice out of an explicit name and the older flags it beats.

    Raises BackendError when it is unknown, or is the flag `compile` in an unknown mode.
    """
    if backend is None and flags.compile and not flags.fast:
        if flags.compile_mode not in MODES:
            raise BackendError(f"compile_mode: expected {' or '.join(MODES)}, found {flags.compile_mode!r}")
        options = CompileOptions(flags.compile_mode, cpu=True, warm=flags.compile_warmup, best_effort=True)
        if flags.compile_cache:
            options = replace(options, cache_dir=settings.cache_dir / "torchinductor", cache_required=True)
        return Choice("compile", options)
    name = ("tilelang" if flags.fast else DEFAULT) if backend is None else backend.strip().lower()
    if name != AUTO and name not in FACTORIES:
        raise BackendError(f"unknown backend {name!r}; choose one of {', '.join((*FACTORIES, AUTO))}")
    return Choice(name, CompileOptions(warm=settings.compile_warmup, cache_dir=settings.inductor_cache_dir))


def resolve_backend(
    choice: Choice, context: BackendContext, strict: bool, warm: Callable[[Backend], None]
) -> Resolution:
    """Build and warm the backend chosen, or eager with one RuntimeWarning that says why.

    With `strict`, a backend that cannot run raises BackendError instead. `auto` passes over those that this machine or
    model is not for, even so: silently, but for an artifact that does not fit, which the warning names. `warm` runs a
    backend once; what it raises keeps the backend from being used.
    """
    context = replace(context, compiling=choice.compiling)
    reasons: list[str] = []
    for name in AUTO_ORDER if choice.name == AUTO else (choice.name,):
        try:
            return _explain(reasons, _build(name, context, warm))
        except BackendError as error:
            passed_over = choice.name == AUTO and isinstance(error, BackendUnavailableError)
            if not passed_over or isinstance(error, ArtifactMisfitError):
                reasons.append(f"backend {name!r} cannot run: {error}")
            if strict and not passed_over:
                raise BackendUnavailableError(reasons[-1]) from error
    return _explain(reasons, FACTORIES[DEFAULT](context))


def _explain(reasons: list[str], backend: Backend) -> Resolution:
    if not reasons:
        return Resolution(backend)
    reason = "; ".join(reasons)
    warnings.warn(f"{reason}; running {backend.name!r} instead", RuntimeWarning, stacklevel=5)
    return Resolution(backend, reason)


def _build(name: str, context: BackendContext, warm: Callable[[Backend], None]) -> Backend:
    options = context.compiling
    backend = FACTORIES[name](context)
    if not (backend.compiles and options.warm):
        return backend
    try:
        warm(backend)
    except (RuntimeError, ImportError, OSError) as error:  # what compilers raise
        cause = compiler_words(error)
        if not options.best_effort:
            backend.close()
            raise BackendError(f"its warm-up failed: {cause}") from error
        warnings.warn(
            f"warming the compiled model up failed, and requests will fail likewise: {cause}",
            RuntimeWarning,
            stacklevel=6,
        )
    return backend
