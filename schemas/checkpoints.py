"""The public checkpoints' names, and the files of a checkpoint: known to whoever submits a job, and to the engine.

Owns both tables. Does not fetch or read anything (`laya.location`, `laya.checkpoint`).
"""

from pathlib import Path

REPOSITORY = "convaiinnovations/laya"
NAMES = {
    "english": REPOSITORY,
    "multilingual": f"{REPOSITORY}/multilingual",
    "typed-decisions": f"{REPOSITORY}/typed-decisions",
}
ALIASES = {
    "en": "english",
    "laya": "english",
    "default": "english",
    "multi": "multilingual",
    "ml": "multilingual",
    "laya-multilingual": "multilingual",
    "typed": "typed-decisions",
    "decisions": "typed-decisions",
    "typed_decisions": "typed-decisions",
    "laya-typed-decisions": "typed-decisions",
}
REVIEWED = "reviewed"  # as a revision: the commit below, and none for any other repository
REVIEWED_COMMITS = {
    REPOSITORY: "55cf4c4ebb4ebe31b2550e8bdf3bd21b99753851",
    "convaiinnovations/laya-multilingual": "e4e9ddf21a7b1903b7acffd8814ad4307bf63a67",
    "convaiinnovations/laya-typed-decisions": "1a793eb568e6718f15941d08f85432581df534e3",
}
REQUIRED_FILES = ("rl_agent_config.json", "encoder/config.json", "tokenizer/tokenizer.json", "model.safetensors")
# Which tokens are special is read from either or both of these.
TOKENIZER_CONFIGS = ("tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json")


def known_name(name: str) -> str | None:
    """Return the public checkpoint that a name or an alias means, in any case; None when it is neither."""
    asked = name.strip().lower()
    asked = ALIASES.get(asked, asked)
    return asked if asked in NAMES else None


def split_hub_id(hub_id: str) -> tuple[str, str]:
    """Return the repository (owner/name) that a Hub id means, and the folder in it; empty where the id has none."""
    owner, _, rest = hub_id.partition("/")
    name, _, subfolder = rest.partition("/")
    return (f"{owner}/{name}" if name else ""), subfolder


def missing_files(folder: Path) -> list[str]:
    """Return the files that a checkpoint's folder should hold and does not."""
    missing = [file for file in REQUIRED_FILES if not (folder / file).is_file()]
    if not any((folder / file).is_file() for file in TOKENIZER_CONFIGS):
        missing.append(" or ".join(TOKENIZER_CONFIGS))
    return missing
