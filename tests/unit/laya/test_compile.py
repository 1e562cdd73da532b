"""torch.compile for real: on the CPU through the flag, on CUDA as a backend."""

import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import laya
from laya.backends import compile as compile_backend
from laya.backends.base import CompileOptions
from laya.backends.compile import CompileBackend
from laya.backends.graphs import Graphed
from laya.backends.selection import Flags, choose_backend
from laya.compiled_code import CACHE_VARIABLE, keep_compiled
from laya.errors import BackendError
from laya.inputs import inputs_of_rows
from laya.settings import Settings, read_settings
from tests.checkpoints import CheckpointSpec, make_checkpoint

QUESTIONS: dict[str, Any] = {
    "topic": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b", "c"]},
    "holds": {"type": "noul", "instructions": "Is it?"},
}
CUDA = torch.cuda.is_available()
ROWS, TOKENS, MARKERS = (1, 2, 3, 5, 8, 13), (2, 16, 17, 40, 128), (2, 3, 7)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No graph of another test's, and no cache of the developer's."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "inductor"))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def run_shapes(agent: laya.Agent) -> int:
    """Every combination of rows, tokens and markers, beside eager; how many."""
    generator = torch.Generator().manual_seed(0)
    shapes = list(itertools.product(ROWS, TOKENS, MARKERS))
    bound = 1e-4 if agent.dtype == torch.float32 else 0.06
    for rows, tokens, markers in shapes:
        ids = torch.randint(5, 200, (rows, tokens), generator=generator)
        places = torch.randint(0, tokens, (rows, markers), generator=generator)
        tensors = (ids, places, torch.full((rows,), markers), torch.zeros(rows, dtype=torch.int64))
        inputs = replace(inputs_of_rows(*(tensor.to(agent.device) for tensor in tensors)), equal=False)
        found = agent.backend_object.forward(inputs)[0]
        with torch.inference_mode():
            expected = agent.model(inputs)[0]
        assert (found.float().softmax(-1) - expected.float().softmax(-1)).abs().max() <= bound
    return len(shapes)


def test_one_graph_serves_every_shape_on_a_cpu(checkpoint_path: Path, fresh: None) -> None:
    agent = laya.load(checkpoint_path, device="cpu", compile=True)
    assert agent.backend == "compile"
    assert isinstance(agent.backend_object, CompileBackend)
    assert run_shapes(agent) == 90
    assert counters["stats"]["unique_graphs"] == 1
    assert agent.predict("a state", QUESTIONS)["answers"].keys() == QUESTIONS.keys()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "mode", "graphs"),
    [
        ("cuda", torch.bfloat16, (9, 0), "reduce-overhead", True),
        ("cuda", torch.bfloat16, (9, 0), "default", False),
        ("cuda", torch.float16, (7, 5), "reduce-overhead", False),
        ("cuda", torch.float32, (9, 0), "reduce-overhead", False),
        ("cpu", torch.float32, (0, 0), "reduce-overhead", False),
    ],
)
def test_graphs_are_recorded_only_where_their_shapes_pad_nothing(  # noqa: PLR0917
    agent: laya.Agent,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    mode: str,
    graphs: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    context = replace(agent._runner.context, device=torch.device(device), dtype=dtype)
    backend = CompileBackend(replace(context, compiling=CompileOptions(mode=mode)))
    assert isinstance(backend._run, Graphed) == graphs
    assert backend.padded == (backend.mask_bytes_per_element > 0)


def test_models_of_one_process_share_no_limit_of_recompilations(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo allows a function few graphs, and every model's forward pass is written as the same one."""
    monkeypatch.setattr(compile_backend, "inductor", lambda graph, _: graph.forward)
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (32, 64, 96):
            sizes = {"hidden_size": width, "num_hidden_layers": 1}
            path = make_checkpoint(tmp_path / str(width), CheckpointSpec(encoder=sizes, agent={"head_layers": 1}))
            compiled = laya.load(path, device="cpu", compile=True)
            expected = laya.load(path, device="cpu").predict("a", QUESTIONS)
            for _ in range(2):  # again, as after a time on another device
                assert compiled.predict("a", QUESTIONS) == expected
                compiled._runner.set_backend(compiled._runner._choice, strict=True)


def test_one_marker_is_no_graph_of_its_own_and_a_dropped_backend_is_freed(
    checkpoint_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_backend, "inductor", lambda graph, _: graph.forward)
    agent = laya.load(checkpoint_path, device="cpu", compile=True)
    agent.warmup([(2, 64, 1), (1, 16, 1), (3, 20, 5)])
    assert counters["stats"]["unique_graphs"] == 1
    backend = weakref.ref(agent.backend_object)
    gc.collect()
    gc.disable()
    try:
        del agent
        assert backend() is None
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_one_graph_serves_every_shape_on_cuda(
    checkpoint_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_CUDA_AMP", "fp16")
    agent = laya.load(checkpoint_path, device="cuda", backend="compile", strict=True)
    assert run_shapes(agent) == 90
    agent.warmup([(40, 128, 2), (3, 16, 17)])  # more than is replayed from a recording
    assert counters["stats"]["unique_graphs"] == 1


def test_the_compile_backend_is_for_cuda(checkpoint_path: Path) -> None:
    if CUDA:
        pytest.skip("here it runs")
    with pytest.warns(RuntimeWarning, match="'compile' cannot run: it compiles for CUDA.*; running 'eager'") as caught:
        agent = laya.load(checkpoint_path, backend="compile")
    assert len(caught) == 1
    assert agent.backend == "eager"


def test_compile_options_are_checked_where_they_count_only(checkpoint_path: Path, tmp_path: Path) -> None:
    before = dict(os.environ)
    options: dict[str, Any] = {"compile_mode": "fastest", "compile_cache": True}
    assert laya.load(checkpoint_path, device="cpu", **options).backend == "eager"
    assert laya.load(checkpoint_path, device="cpu", backend="eager", compile=True, **options).backend == "eager"
    assert dict(os.environ) == before
    with pytest.raises(BackendError, match="compile_mode: expected default or reduce-overhead, found 'fastest'"):
        laya.load(checkpoint_path, device="cpu", compile=True, compile_mode="fastest", strict=True)


def test_the_cache_is_placed_only_where_none_was_said(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    keep_compiled(tmp_path / "a", environ)
    assert environ == {CACHE_VARIABLE: str(tmp_path / "a")}
    assert (tmp_path / "a").is_dir()
    keep_compiled(tmp_path / "b", environ)
    assert environ == {CACHE_VARIABLE: str(tmp_path / "a")}
    assert not (tmp_path / "b").exists()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        keep_compiled(tmp_path / "file" / "c", {})


def test_a_folder_that_cannot_be_made_is_a_reason_to_fall_back_unless_the_flag_wants_it(
    agent: laya.Agent, checkpoint_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError):
        laya.load(checkpoint_path, device="cpu", compile=True, compile_cache=True)
    options = CompileOptions(cpu=True, cache_dir=tmp_path / "file" / "c")
    with pytest.raises(BackendError, match=r"compiled code cannot be kept: .*Not a directory"):
        compile_backend.build_compile(replace(agent._runner.context, compiling=options))
    assert CACHE_VARIABLE not in os.environ


def test_settings_say_where_caches_are() -> None:
    read = read_settings({"HOME": "/h", "XDG_CACHE_HOME": "/x"})
    assert (read.cache_dir, read.inductor_cache_dir) == (Path("/x/laya"), Path("/h/.cache/laya/inductor"))
    assert read_settings({"HOME": "/h", "XDG_CACHE_HOME": "relative"}).cache_dir == Path("/h/.cache/laya")
    read = read_settings({"HOME": "/h", "LAYA_INDUCTOR_CACHE_DIR": "/i", "LAYA_COMPILE_WARMUP": "0"})
    assert (read.inductor_cache_dir, read.compile_warmup) == (Path("/i"), False)
    assert not read_settings({"LAYA_COMPILE_WARMUP": "false"}).compile_warmup
    with pytest.raises(laya.LayaError, match="LAYA_COMPILE_WARMUP='maybe': expected 1 or true or yes or on or 0 or"):
        read_settings({"LAYA_COMPILE_WARMUP": "maybe"})
    assert Settings().compile_warmup


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no compiler here\nand more")


def test_a_failed_warm_up_of_the_flag_warns_and_requests_fail_likewise(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.warns(RuntimeWarning, match="requests will fail likewise: RuntimeError: no compiler here$") as caught:
        agent = laya.load(checkpoint_path, device="cpu", compile=True)
    assert len(caught) == 1
    assert (agent.backend, agent.fallback_reason) == ("compile", None)
    with pytest.raises(RuntimeError, match="no compiler here"):
        agent.predict("a", QUESTIONS)
    with pytest.raises(RuntimeError, match="no compiler here"):
        agent.warmup([(1, 16)])


def test_without_warm_up_the_first_request_meets_the_compiler(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    agent = laya.load(checkpoint_path, device="cpu", compile=True, compile_warmup=False)
    with pytest.raises(RuntimeError, match="no compiler here"):
        agent.predict("a", QUESTIONS)


def test_a_failed_warm_up_of_the_backend_falls_back(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch, agent: laya.Agent
) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    monkeypatch.setattr(compile_backend, "build_compile", CompileBackend)
    with pytest.warns(RuntimeWarning, match="its warm-up failed: RuntimeError: no compiler here; running 'eager'"):
        fallen = laya.load(checkpoint_path, device="cpu", backend="compile")
    assert fallen.backend == "eager"
    with pytest.raises(BackendError, match="no compiler here"):
        fallen.set_backend("compile", strict=True)
    assert fallen.set_backend("compile", warmup=False) == "compile"
    with pytest.raises(RuntimeError, match="no compiler here"):
        fallen.predict("a", QUESTIONS)


def print_in_own_process(program: str, checkpoint: Path, **variables: str) -> str:
    """What the program prints where nothing has said yet where compiled code is kept."""
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE} | variables
    command = [sys.executable, "-c", program, str(checkpoint)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_loading_without_compiling_leaves_the_environment_alone(checkpoint_path: Path) -> None:
    program = (
        "import os, sys, laya; before = dict(os.environ); laya.load(sys.argv[1], device='cpu');"
        f"assert os.environ == before; print(os.environ.get({CACHE_VARIABLE!r}))"
    )
    assert print_in_own_process(program, checkpoint_path) == "None"


def print_place(checkpoint: Path, imported_first: str = "laya", **variables: str) -> str:
    """Where a load that keeps compiled code has placed it."""
    program = (
        f"import os, sys, {imported_first}, laya; laya.load(sys.argv[1], device='cpu', compile=True,"
        f"compile_cache=True, compile_warmup=False); print(os.environ[{CACHE_VARIABLE!r}])"
    )
    return print_in_own_process(program, checkpoint, **variables)


def test_a_compiling_load_places_the_cache_before_torch_does(checkpoint_path: Path, tmp_path: Path) -> None:
    placed = print_place(checkpoint_path, XDG_CACHE_HOME=str(tmp_path))
    assert placed == str(tmp_path / "laya" / "torchinductor")


def test_the_compile_backend_keeps_its_code_where_laya_s_variable_says(
    agent: laya.Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    said = read_settings({"HOME": "/h", "LAYA_INDUCTOR_CACHE_DIR": str(tmp_path / "said")})
    options = replace(choose_backend("compile", Flags(), said).compiling, cpu=True)
    compile_backend.build_compile(replace(agent._runner.context, compiling=options)).close()
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "said")
    assert (tmp_path / "said").is_dir()


def test_an_earlier_setting_wins_torch_s_own_included(checkpoint_path: Path, tmp_path: Path) -> None:
    """Importing its compiler, or compiling, torch sets the variable to a folder of its own."""
    own = print_place(checkpoint_path, "torch._dynamo", XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert Path(own).parent == tmp_path
    assert Path(own).name.startswith("torchinductor_")
    chosen = print_place(checkpoint_path, "torch._dynamo", **{CACHE_VARIABLE: str(tmp_path / "mine")})
    assert chosen == str(tmp_path / "mine")
    assert not (tmp_path / "laya").exists()


def test_what_laya_imports_of_the_compiler_is_no_earlier_setting(checkpoint_path: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys, laya; from laya.compiled_code import import_flash_attention; import_flash_attention();"
        "assert 'torch._dynamo' in sys.modules; laya.load(sys.argv[1], device='cpu', compile=True, compile_cache=True,"
        f"compile_warmup=False); print(os.environ[{CACHE_VARIABLE!r}])"
    )
    placed = print_in_own_process(program, checkpoint_path, XDG_CACHE_HOME=str(tmp_path))
    assert placed == str(tmp_path / "laya" / "torchinductor")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_where_warnings_are_errors_the_compile_backend_runs_on_cuda(checkpoint_path: Path) -> None:
    program = (
        "import sys, laya; agent = laya.load(sys.argv[1], device='cuda', compile=True, strict=True);"
        "agent.warmup([(8, 64), (1, 32)]); agent.predict('a', {'q': {'type': 'noul', 'instructions': 'x'}});"
        "print(agent.backend, laya.load(sys.argv[1], device='cuda', backend='compile').backend)"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error::RuntimeWarning", "-c", program]
    done = subprocess.run([*command, str(checkpoint_path)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("compile compile", 0), done.stderr[-2000:]
