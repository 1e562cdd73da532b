import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import laya.tokenizer
from laya.errors import CheckpointError
from laya.tokenizer import TextTokenizer
from tests.checkpoints import SENTENCES, SPECIAL, CheckpointSpec, write_json

Make = Callable[[CheckpointSpec], Path]
SPECIAL_TEXTS = ("[SEP]", "[CLS]", "[PAD]", "[UNK]", "[MASK]", "a[SEP]b", " [SEP] [CLS]", "[MASK] [SEP]")


def open_tokenizer(checkpoint: Path) -> TextTokenizer:
    return TextTokenizer(checkpoint / "tokenizer", 50_368)


@pytest.fixture
def word_level(tmp_path: Path) -> Path:
    """A tokenizer whose model spells the special tokens as words of its own."""
    words = [*SPECIAL.values(), "hello", "world"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    write_json(tmp_path / "tokenizer" / "tokenizer_config.json", SPECIAL)
    return tmp_path


@pytest.mark.parametrize("text", SPECIAL_TEXTS)
def test_no_literal_special_token_becomes_its_id(checkpoint_path: Path, word_level: Path, text: str) -> None:
    for path in (checkpoint_path, word_level):
        tokenizer = open_tokenizer(path)
        special = tokenizer.special
        found = set(tokenizer.tokenise([text]).flat.tolist())
        assert not found & {special.cls, special.sep, special.mask, special.pad}


def test_special_text_is_kept_as_text_and_the_mask_is_a_space(checkpoint_path: Path) -> None:
    tokenizer = open_tokenizer(checkpoint_path)
    raw = Tokenizer.from_file(str(checkpoint_path / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.tokenise(["a [SEP] b[MASK]c"]).flat.tolist()
    assert raw.decode(ids, skip_special_tokens=False) == "a [SEP] b c"


def test_texts_are_flat_with_offsets_and_whole_lengths(checkpoint_path: Path) -> None:
    tokenizer = open_tokenizer(checkpoint_path)
    texts = [*SENTENCES, "", "x"]
    whole = tokenizer.tokenise(texts)
    assert whole.flat.dtype == np.int32
    assert np.diff(whole.offsets).tolist() == whole.lengths.tolist()
    assert whole.lengths[-2:].tolist() == [0, 1]
    ends = [index % 2 == 0 for index in range(len(texts))]
    kept = tokenizer.tokenise(texts, keep=7, keep_end=ends)
    assert kept.lengths.tolist() == whole.lengths.tolist()
    for index, end in enumerate(ends):
        tokens = whole.flat[whole.offsets[index] : whole.offsets[index + 1]].tolist()
        expected = (tokens[-7:] if end else tokens[:7]) if tokens else []
        assert kept.flat[kept.offsets[index] : kept.offsets[index + 1]].tolist() == expected


def test_many_texts_take_several_calls_and_give_the_same(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = open_tokenizer(checkpoint_path)
    texts = [*SENTENCES, "x" * 500, "", *SENTENCES]
    expected = tokenizer.tokenise(texts)
    monkeypatch.setattr(laya.tokenizer, "CALL_CHARACTERS", 100)
    found = tokenizer.tokenise(texts)
    assert found.flat.tolist() == expected.flat.tolist()
    assert found.offsets.tolist() == expected.offsets.tolist()
    assert tokenizer.tokenise([]).offsets.tolist() == [0]


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>", "<b>"]},
        {"tokenizer_class": "NoSuchClass", "cls_token": {"content": "[CLS]", "lstrip": False}},
        {"cls_token": None, "bos_token": "[CLS]", "sep_token": None, "eos_token": "[SEP]"},
    ],
)
def test_published_spellings_of_the_configuration_load_unchanged(make: Make, config: dict[str, object]) -> None:
    path = make(CheckpointSpec(tokenizer=config))
    before = (path / "tokenizer" / "tokenizer_config.json").read_bytes()
    assert open_tokenizer(path).special.cls == 1
    assert open_tokenizer(path).special.sep == 2
    assert (path / "tokenizer" / "tokenizer_config.json").read_bytes() == before


def test_special_tokens_may_stand_in_their_own_file(make: Make) -> None:
    path = make(CheckpointSpec())
    write_json(path / "tokenizer" / "tokenizer_config.json", {})
    with pytest.raises(CheckpointError, match="cls_token: no token None"):
        open_tokenizer(path)
    write_json(path / "tokenizer" / "special_tokens_map.json", SPECIAL)
    assert open_tokenizer(path).special.mask_text == "[MASK]"


def test_truncation_and_padding_of_the_file_do_not_apply(make: Make) -> None:
    path = make(CheckpointSpec())
    file = path / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(file))
    assert open_tokenizer(path).tokenise(["x y z x y z"]).lengths.tolist() == [len("x y z x y z")]


def test_of_a_tokenizer_larger_than_the_model_only_texts_with_its_further_tokens_are_named(
    checkpoint_path: Path,
) -> None:
    whole = open_tokenizer(checkpoint_path)
    ids = whole.tokenise([SENTENCES[0]]).flat
    vocab_size = int(ids.max())
    tokenizer = TextTokenizer(checkpoint_path / "tokenizer", vocab_size)
    found = tokenizer.unknown_to_model(tokenizer.tokenise(["a", SENTENCES[0], "", "a"]))
    assert list(found) == [1]
    assert f"is token {vocab_size} of the tokenizer, but the model has {vocab_size} tokens" in found[1]
    assert whole.unknown_to_model(whole.tokenise([SENTENCES[0]])) == {}


def test_a_special_token_that_the_model_lacks_is_refused(checkpoint_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mask_token: no token '\[MASK\]' among the model's 4"):
        TextTokenizer(checkpoint_path / "tokenizer", 4)


def test_two_files_that_name_a_special_token_differently_are_refused(make: Make) -> None:
    path = make(CheckpointSpec())
    write_json(path / "tokenizer" / "special_tokens_map.json", SPECIAL | {"sep_token": {"content": "[PAD]"}})
    with pytest.raises(
        CheckpointError, match=r"sep_token: found '\[SEP\]', but special_tokens_map.json says '\[PAD\]'"
    ):
        open_tokenizer(path)


def test_a_broken_tokenizer_is_an_error_of_the_checkpoint(make: Make) -> None:
    path = make(CheckpointSpec())
    (path / "tokenizer" / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(CheckpointError, match="not a readable tokenizer"):
        open_tokenizer(path)
