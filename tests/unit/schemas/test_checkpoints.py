from pathlib import Path

import pytest

from jobs.errors import InputError
from jobs.submission import resolve_checkpoint
from schemas.checkpoints import ALIASES, NAMES, REQUIRED_FILES, known_name


@pytest.mark.parametrize("name", [*NAMES, *ALIASES])
def test_a_job_keeps_the_name_that_an_alias_means(name: str) -> None:
    assert resolve_checkpoint(name) == resolve_checkpoint(f" {name.upper()} ") == known_name(name) in NAMES


@pytest.mark.parametrize("tokenizer", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_folder_needs_one_of_the_files_that_name_the_special_tokens(tmp_path: Path, tokenizer: str) -> None:
    for file in REQUIRED_FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(InputError, match=r"has no tokenizer/tokenizer_config\.json or tokenizer/special_tokens_map"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "tokenizer" / tokenizer).touch()
    assert resolve_checkpoint(tmp_path) == str(tmp_path)
