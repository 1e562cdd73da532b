"""Exported graphs: their parity with eager, their file, and what is refused."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import pytest
import torch

import laya
import laya.onnx
from laya.backends.onnx import FINGERPRINT, GRAPH_INPUTS
from laya.inputs import inputs_of_rows

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo" / "checkpoint"
TOLERANCE = 1e-4
QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the customer want a refund?"},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
    "letter": {"type": "choice", "instructions": "Which?", "criteria": list("abcdefgh")},
}
STATES = ["I was charged twice!", "我这个月被重复扣款了两次", "", {"role": "user", "content": "hi"}, "word " * 400]


@pytest.fixture(scope="module", params=["tiny", "demo"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's folder with a graph in it."""
    if request.param == "tiny":
        return Path(request.getfixturevalue("tiny"))
    folder = tmp_path_factory.mktemp("onnx") / "demo"
    shutil.copytree(DEMO, folder)
    assert laya.export_onnx(folder) == folder / "laya.onnx"
    return folder


@pytest.fixture(scope="module")
def tiny(checkpoint_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the tiny checkpoint alone."""
    folder = tmp_path_factory.mktemp("onnx") / "tiny"
    shutil.copytree(checkpoint_path, folder)
    laya.export_onnx(folder)
    return folder


def test_a_graph_answers_as_eager_does(exported: Path) -> None:
    graph, eager = laya.load(exported, backend="onnx", device="cpu"), laya.load(exported, device="cpu")
    assert isinstance(graph, laya.ONNXAgent)
    assert (graph.backend, graph.fallback_reason, graph.dtype) == ("onnx", None, torch.float32)
    prepared = eager.prepare(QUESTIONS)
    encoded = eager.encode(STATES, prepared)
    for batch in eager.pack(encoded):
        found, expected = graph.forward(encoded, batch), eager.forward(encoded, batch)
        assert np.abs(found.logits - expected.logits).max() < TOLERANCE
        assert np.abs(found.act - expected.act).max() < TOLERANCE
    for found, expected in zip(*(agent.predict_batch(STATES, QUESTIONS) for agent in (graph, eager)), strict=True):
        assert found["usage"] == expected["usage"]
        assert found["answers"]["letter"]["choice"] == expected["answers"]["letter"]["choice"]
        assert found["answers"]["anger"]["score"] == pytest.approx(expected["answers"]["anger"]["score"], abs=2e-4)


@pytest.mark.parametrize(("rows", "tokens", "markers"), [(1, 1, 2), (1, 7, 2), (2, 16, 9), (3, 40, 5), (5, 97, 3)])
def test_rows_tokens_and_markers_may_be_any_number(tiny: Path, rows: int, tokens: int, markers: int) -> None:
    session = onnxruntime.InferenceSession(tiny / "laya.onnx")
    model, draw = laya.load(tiny, device="cpu").model, torch.Generator().manual_seed(rows * tokens)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=draw)
    lengths[0] = tokens
    ids = torch.randint(5, 400, (rows, tokens), generator=draw)
    places = (torch.rand((rows, markers), generator=draw) * lengths[:, None]).long()
    counts = torch.randint(1, markers + 1, (rows,), generator=draw)
    types = torch.randint(0, 3, (rows,), generator=draw)
    masks = [(torch.arange(most) < some[:, None]).long() for most, some in ((tokens, lengths), (markers, counts))]
    fed = zip(GRAPH_INPUTS, (ids, masks[0], places, masks[1], types), strict=True)
    logits, act = session.run(None, {name: value.numpy() for name, value in fed})
    for row, length in enumerate(lengths.tolist()):
        alone = slice(row, row + 1)
        with torch.inference_mode():
            one, one_act = model(inputs_of_rows(ids[alone, :length], places[alone], counts[alone], types[alone]))
        assert np.abs(logits[row] - one[0].numpy()).max() < TOLERANCE
        assert np.abs(act[row] - one_act[0].numpy()).max() < TOLERANCE


def test_questions_of_one_option_are_answered(tiny: Path) -> None:
    only = {"only": {"type": "choice", "instructions": "Which?", "criteria": ["this"]}}
    for reply in laya.load(tiny, backend="onnx").predict_batch(STATES, only):
        assert reply["answers"]["only"]["choice"] == "this"
        assert reply["answers"]["only"]["probabilities"] == {"this": 1.0}


def test_an_onnx_agent_holds_no_weights_and_keeps_its_backend(tiny: Path) -> None:
    agent = laya.load(tiny, backend="onnx")
    assert all(weights.is_meta for weights in agent.model.parameters())
    assert agent.set_backend("onnx") == "onnx"
    for name in ("eager", "auto"):
        with pytest.raises(laya.BackendError, match=f"backend '{name}' wants the PyTorch model"):
            agent.set_backend(name)
    assert agent.predict("x", QUESTIONS)["answers"]["refund"]["type"] == "noul"


def test_a_graph_s_inputs_lie_on_the_cpu_wherever_it_runs(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that the agent only says it has."""
    agent = laya.load(tiny, backend="onnx", device="cpu")
    expected = agent.predict_batch(STATES, QUESTIONS)
    elsewhere = replace(agent._runner.context, device=torch.device("cuda", 0))
    monkeypatch.setattr(agent._runner, "context", elsewhere)
    assert agent.device == torch.device("cuda", 0)
    assert agent.predict_batch(STATES, QUESTIONS) == expected
    agent.warmup([(2, 16)])


class SmallSession:
    """Has room for `most` rows at a time."""

    def __init__(self, session: Any, most: int) -> None:
        self.session, self.most = session, most

    def run(self, outputs: list[str], feed: dict[str, Any]) -> Any:
        if len(feed["qtype"]) > self.most:
            raise onnxruntime.capi.onnxruntime_pybind11_state.Fail("CUDA failure 2: out of memory ; GPU=0")
        return self.session.run(outputs, feed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_graph_without_room_is_fed_less_and_never_another_model(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    agent = laya.load(tiny, backend="onnx", device="cpu")
    expected = agent.predict_batch(STATES, QUESTIONS)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(agent._runner, "context", replace(agent._runner.context, device=torch.device(device)))
    session = agent.backend_object._session
    monkeypatch.setattr(agent.backend_object, "_session", SmallSession(session, 1))
    for found, whole in zip(agent.predict_batch(STATES, QUESTIONS), expected, strict=True):
        for name, answer in whole["answers"].items():
            assert found["answers"][name]["type"] == answer["type"]
            assert found["answers"][name]["confidence"] == pytest.approx(answer["confidence"], abs=2e-4)
    assert (agent.degradations.splits > 0, agent.degradations.on_cpu) == (True, 0)
    monkeypatch.setattr(agent.backend_object, "_session", SmallSession(session, 0))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        agent.predict("x", QUESTIONS)


def test_onnxruntime_s_own_failure_to_allocate_is_out_of_memory(tiny: Path) -> None:
    program = (
        "import resource, sys, torch, laya; from laya.inputs import synthetic_inputs;"
        "backend = laya.load(sys.argv[1], backend='onnx', device='cpu').backend_object;"
        "large, small = (synthetic_inputs((rows, 128, 2), torch.device('cpu')) for rows in (512, 1));"
        "backend.forward(small); pages = int(open('/proc/self/statm').read().split()[0]);"
        "limit = pages * resource.getpagesize() + 200 * 2**20; resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: backend.forward(large)\n"
        "except torch.OutOfMemoryError as error: print(error)\n"
        "backend.forward(small)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tiny)], capture_output=True, text=True, check=True)
    assert "Failed to allocate memory" in done.stdout


def test_there_is_nothing_to_compile_in_a_graph(tiny: Path) -> None:
    with pytest.raises(laya.BackendError, match="an artifact is compiled from the PyTorch model"):
        laya.export_aot(laya.load(tiny, backend="onnx"))


def test_any_agent_may_run_the_graph_in_its_checkpoints_folder(tiny: Path, checkpoint_path: Path) -> None:
    agent = laya.load(tiny, device="cpu")
    before = agent.predict(STATES[0], QUESTIONS)["answers"]["letter"]["choice"]
    assert agent.set_backend("onnx", strict=True) == "onnx"
    assert agent.predict(STATES[0], QUESTIONS)["answers"]["letter"]["choice"] == before
    without = laya.load(checkpoint_path, device="cpu")
    with pytest.warns(RuntimeWarning, match=r"laya\.onnx or .*\.onnx: no such file; .* running 'eager' instead"):
        assert without.set_backend("onnx") == "eager"


def test_a_missing_graph_is_an_error_that_says_how_to_make_one(checkpoint_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        laya.BackendError, match=r"tiny/laya\.onnx or .*\.onnx: no such file; write it with laya\.export_onnx\("
    ):
        laya.load(checkpoint_path, backend="onnx")
    with pytest.raises(laya.BackendError, match=r"other\.onnx: no such file"):
        laya.load(checkpoint_path, backend="onnx", onnx_path=tmp_path / "other.onnx")


def test_a_missing_package_is_an_error_that_names_the_extra(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(laya.BackendError, match="onnxruntime is not installed: pip install onnxruntime"):
        laya.load(tiny, backend="onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(laya.BackendError, match=r"exporting needs onnxscript: pip install onnxscript"):
        laya.export_onnx(tiny)


def test_the_graph_of_another_checkpoint_is_refused(tiny: Path, exported: Path, tmp_path: Path) -> None:
    found = onnxruntime.InferenceSession(tiny / "laya.onnx").get_modelmeta().custom_metadata_map
    assert found[FINGERPRINT] == laya.load(tiny).checkpoint.fingerprint
    if exported.name != tiny.name:
        with pytest.raises(laya.BackendError, match=r"was exported from the checkpoint .* but .* has fingerprint"):
            laya.load(exported, backend="onnx", onnx_path=tiny / "laya.onnx")
    with pytest.raises(laya.BackendError, match="for sequences of 128 tokens at most, not 256"):
        laya.load(tiny, backend="onnx", max_len=256)
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(laya.BackendError, match=r"bad\.onnx: onnxruntime cannot read it"):
        laya.load(tiny, backend="onnx", onnx_path=tmp_path / "bad.onnx")


def foreign_graph(tiny: Path, file: Path) -> onnx_ir.Model:
    """The graph as the public package has it exported: without metadata, and with a boolean marker_mask."""
    graph = onnx_ir.load(tiny / "laya.onnx")
    graph.metadata_props.clear()
    place = list(GRAPH_INPUTS).index("marker_mask")
    mask = graph.graph.inputs[place]
    truth = onnx_ir.val("marker_mask", onnx_ir.DataType.BOOL, mask.shape)
    cast = onnx_ir.node("Cast", [truth], {"to": onnx_ir.DataType.INT64.value})
    onnx_ir.convenience.replace_all_uses_with(mask, cast.outputs[0])
    graph.graph.inputs[place] = truth
    graph.graph.insert_before(next(iter(graph.graph)), cast)
    onnx_ir.save(graph, file)
    return graph


def test_a_graph_of_another_exporter_answers_and_is_said_to_be_unknown(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "public.onnx"
    foreign_graph(tiny, file)
    session = onnxruntime.InferenceSession(file)
    assert {one.name: one.type for one in session.get_inputs()}["marker_mask"] == "tensor(bool)"
    with pytest.warns(RuntimeWarning, match=r"public\.onnx: records no fingerprint .* is not known"):
        graph = laya.load(tiny, backend="onnx", device="cpu", onnx_path=file)
    expected = laya.load(tiny, device="cpu").predict_batch(STATES, QUESTIONS)
    for found, wanted in zip(graph.predict_batch(STATES, QUESTIONS), expected, strict=True):
        for question, answer in wanted["answers"].items():
            for key in ("confidence", "answer_confidence"):
                assert found["answers"][question][key] == pytest.approx(answer[key], abs=2e-4)


def test_an_export_compares_the_digests_that_the_environment_asks_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAYA_SHA256_DIGESTS", '{"model.safetensors": "00"}')
    with pytest.raises(laya.CheckpointError, match="sha256: expected 00"):
        laya.export_onnx(tiny, tmp_path / "laya.onnx")


def test_a_graph_that_takes_something_else_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.onnx"
    graph = foreign_graph(tiny, file)
    graph.graph.inputs[0].shape = onnx_ir.Shape(["rows", 128])
    onnx_ir.save(graph, file)
    with pytest.raises(laya.BackendError, match="input_ids: has a fixed dimension of 128"):
        laya.load(tiny, backend="onnx", device="cpu", onnx_path=file)
    graph.graph.inputs[-1].name = "question_type"
    onnx_ir.save(graph, file)
    with pytest.raises(
        laya.BackendError, match=r"expected a graph from input_ids, .*, qtype to .* from .*question_type"
    ):
        laya.load(tiny, backend="onnx", device="cpu", onnx_path=file)


def test_a_path_without_the_backend_is_refused(tiny: Path) -> None:
    with pytest.raises(laya.BackendError, match="onnx_path is for backend='onnx', not 'eager'"):
        laya.load(tiny, onnx_path=tiny / "laya.onnx")


def test_weights_too_large_for_one_file_lie_beside_it(
    checkpoint_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laya.onnx, "MOST_INLINE_BYTES", 1000)
    path = laya.export_onnx(laya.load(checkpoint_path), tmp_path)
    fingerprint = laya.load(checkpoint_path).checkpoint.fingerprint
    assert sorted(file.name for file in tmp_path.iterdir()) == ["laya.onnx", f"laya.onnx.{fingerprint[:12]}.data"]
    assert path.stat().st_size < 1_000_000
    agent = laya.load(checkpoint_path, backend="onnx", onnx_path=path)
    assert agent.predict(STATES[0], QUESTIONS)["answers"].keys() == QUESTIONS.keys()


def test_an_export_that_fails_leaves_what_was_there(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "mine.onnx"
    target.write_bytes(b"as it was")

    def fill_the_disk(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(laya.onnx, "_trace", lambda *_: onnx_ir.load(tiny / "laya.onnx"))
    monkeypatch.setattr(onnx_ir, "save", fill_the_disk)
    with pytest.raises(laya.BackendError, match=r"mine\.onnx: cannot be written: .*No space left"):
        laya.export_onnx(tiny, target)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("mine.onnx", b"as it was")]
    with pytest.raises(laya.BackendError, match="cannot be written"):
        laya.export_onnx(tiny, tmp_path / "nowhere" / "laya.onnx")
