"""How kernels launch: on the current stream, in a captured graph, from several threads; and without TileLang."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from laya import tl_kernels
from laya.attention import rotary_table
from laya.errors import BackendError
from laya.tl_kernels import kernel, reference
from tests.kernels.kernel_checks import ROUNDING, error, gpu, needs_tilelang, random


def test_a_factory_without_tilelang_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", None)
    kernel.tilelang.cache_clear()
    with pytest.raises(BackendError, match=r"install laya-batch with its extra `gpu`"):
        tl_kernels.rope_kernel(2, 48)  # a shape nothing else builds: a cached kernel would not import anything
    kernel.tilelang.cache_clear()


@needs_tilelang
def test_kernels_are_gathered_once_each_in_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BackendError("asked to compile")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel.Kernel, "compile", refuse)
    first, second = tl_kernels.rope_kernel(7, 32), tl_kernels.rope_kernel(9, 32)  # which nothing else compiles
    device = torch.device("cuda", 0)
    with kernel.gathered() as found:
        for each in (first, second, first):
            each(device=device)
        with ThreadPoolExecutor(1) as pool, pytest.raises(BackendError, match="asked to compile"):
            pool.submit(first, device=device).result()
    assert list(found) == [first, second]


@pytest.mark.gpu
def test_gpu_graph_replays_every_kernel_on_new_inputs() -> None:
    device, half = gpu(), torch.bfloat16
    weights = [random(*shape, dtype=half, device=device, scale=0.1) for shape in ((768, 256), (256, 128))]
    norm = torch.ones(256, device=device)
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device=device)
    positions = torch.cat((torch.arange(100), torch.arange(200))).int().to(device)
    table = rotary_table(200, 64, 10_000.0).to(device)
    x, hidden = random(300, 256, dtype=half, device=device), random(300, 256, dtype=torch.float32, device=device)

    def layer(ops: object = tl_kernels) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = ops.gemm(x, weights[0]).view(300, 3, 4, 64)  # type: ignore[attr-defined]  # a module
        mixed = ops.attn(ops.rope(qkv, positions, table, 200), offsets, 200, 64)  # type: ignore[attr-defined]
        summed, normed = ops.add_ln(hidden, mixed, norm, None, 1e-5, half)  # type: ignore[attr-defined]
        return summed, ops.gemm_geglu(normed[:, :128].contiguous(), weights[1])  # type: ignore[attr-defined]

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
    for _ in range(2):
        x.copy_(random(300, 256, dtype=half, device=device))
        hidden.copy_(random(300, 256, dtype=torch.float32, device=device))
        for part in got:
            part.fill_(float("nan"))
        graph.replay()
        want = layer(reference)
        # Each side rounds to bf16 five times on the way; a graph that read old inputs would be off by about 1.
        errors = [error(mine, theirs.double()) for mine, theirs in zip(got, want, strict=True)]
        assert max(errors) < 10 * ROUNDING[half], errors


@pytest.mark.gpu
def test_gpu_runs_on_the_current_stream() -> None:
    device = gpu()
    x, weight = (random(*shape, dtype=torch.float16, device=device) for shape in ((4097, 128), (128, 128)))
    want = reference.gemm(x.double(), weight.double())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x = x * 1
        torch.cuda._sleep(20_000_000)  # a launch on another stream would overtake this, and read nothing yet
        late = x.clone()
        got = tl_kernels.gemm(late, weight)
    stream.synchronize()
    assert error(got, want) < ROUNDING[torch.float16]


@pytest.mark.gpu
def test_gpu_compiles_once_for_many_threads() -> None:
    device = gpu()
    x, weight = (random(*shape, dtype=torch.bfloat16, device=device) for shape in ((65, 136), (264, 136)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: tl_kernels.gemm(x, weight), range(16)))
    assert all(torch.equal(one, found[0]) for one in found)
