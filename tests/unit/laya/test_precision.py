import pytest
import torch

from laya.errors import LayaError
from laya.precision import choose_device, choose_dtype
from laya.settings import Settings, read_settings

CUDA = torch.device("cuda", 0)


def test_the_environment_is_read_into_settings() -> None:
    assert read_settings({}) == Settings(cuda_amp=None, cpu_amp=None)
    assert read_settings({"LAYA_CUDA_AMP": " FP16 ", "LAYA_CPU_AMP": "bf16"}) == Settings("fp16", "bf16")


@pytest.mark.parametrize("environ", [{"LAYA_CUDA_AMP": "fp8"}, {"LAYA_CPU_AMP": "fp16"}])
def test_an_unknown_value_names_its_variable(environ: dict[str, str]) -> None:
    with pytest.raises(LayaError, match=f"{next(iter(environ))}=.*expected"):
        read_settings(environ)


def test_a_cpu_computes_in_fp32_unless_asked() -> None:
    assert choose_dtype(torch.device("cpu"), "bf16", Settings()) == torch.float32
    assert choose_dtype(torch.device("cpu"), "bf16", Settings(cpu_amp="bf16")) == torch.bfloat16


@pytest.mark.parametrize(
    ("capability", "amp", "override", "expected"),
    [
        ((9, 0), "bf16", None, torch.bfloat16),
        ((8, 0), "fp16", None, torch.float16),
        ((8, 9), "bf16", "fp16", torch.float16),
        ((7, 5), "bf16", None, torch.float16),
        ((7, 5), "fp16", "bf16", torch.bfloat16),
    ],
)
def test_cuda_takes_the_checkpoints_dtype_by_capability(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    amp: str,
    override: str | None,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_dtype(CUDA, amp, Settings(cuda_amp=override)) == expected


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == torch.device("cpu")
    with pytest.raises(LayaError, match="no CUDA device"):
        choose_device("cuda")
    with pytest.raises(LayaError, match="not one PyTorch knows"):
        choose_device("abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device(None) == torch.device("cuda", 1)
    assert choose_device("cuda:0") == CUDA
    with pytest.raises(LayaError, match="there are 2 CUDA devices"):
        choose_device("cuda:2")
