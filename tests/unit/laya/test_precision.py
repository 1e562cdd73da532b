import pytest
import torch

from laya.errors import ArgumentError, LayaError
from laya.precision import choose_device, choose_dtype
from laya.settings import Settings, read_settings

CUDA = torch.device("cuda", 0)


def test_the_environment_is_read_into_settings() -> None:
    assert read_settings({}) == Settings(cuda_amp=None, cpu_amp=None)
    assert read_settings({"LAYA_CUDA_AMP": " FP16 ", "LAYA_CPU_AMP": "bf16"}) == Settings("fp16", "bf16")
    assert read_settings({"LAYA_CUDA_AMP": "bfloat16", "LAYA_CPU_AMP": "BFloat16"}) == Settings("bf16", "bf16")
    assert read_settings({"LAYA_CUDA_AMP": "float16", "LAYA_CPU_AMP": " "}) == Settings("fp16")
    pinned = read_settings({"LAYA_REVISION": " v1 ", "LAYA_SHA256_DIGESTS": '{"model.safetensors": "00"}'})
    assert (pinned.revision, pinned.sha256_digests) == ("v1", {"model.safetensors": "00"})
    unset = read_settings({"LAYA_REVISION": " ", "LAYA_SHA256_DIGESTS": ""})
    assert (unset.revision, unset.sha256_digests) == (None, None)


@pytest.mark.parametrize("value", ["0", "off", "no", "false", "OFF", " False "])
def test_a_flag_is_off_in_every_spelling(value: str) -> None:
    assert not read_settings({"LAYA_COMPILE_WARMUP": value}).compile_warmup


@pytest.mark.parametrize("value", ["1", "on", "yes", "TRUE", "", " "])
def test_a_flag_is_on_in_every_spelling_and_by_default(value: str) -> None:
    assert read_settings({"LAYA_COMPILE_WARMUP": value}).compile_warmup


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("LAYA_CUDA_AMP", "fp8"), ("LAYA_CPU_AMP", "fp16"), ("LAYA_COMPILE_WARMUP", "never")),
        *(
            ("LAYA_SHA256_DIGESTS", value)
            for value in ("model.safetensors=00", "[]", "null", '{"a": 5}', "[" * 100_000)
        ),
    ],
)
def test_an_unknown_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}.*expected"):
        read_settings({name: value})


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
        ((7, 5), "bf16", "fp16", torch.float16),
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


def test_bf16_asked_of_an_older_device_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ArgumentError, match=r"LAYA_CUDA_AMP=bf16: cuda:0 has compute capability 7\.5, and bf16 needs 8\.0"
    ):
        choose_dtype(CUDA, "fp16", Settings(cuda_amp="bf16"))


@pytest.mark.parametrize("asked", ["meta", "xpu", "cpu0", ""])
def test_a_device_that_computes_nothing_here_is_refused(asked: str) -> None:
    with pytest.raises(ArgumentError, match=f"device '{asked}'"):
        choose_device(asked)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in (None, "auto", "cpu", "CPU", "cpu:0", torch.device("cpu", 0)):
        assert choose_device(asked) == torch.device("cpu")
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
