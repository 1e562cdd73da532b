"""Where what this package makes of a checkpoint lies: exported graphs and programs that were compiled ahead of time.

A checkpoint that is a folder has them beside it. One from the Hub lies in the Hub's cache, where nothing is written,
and what a hub sends is data, never a program to run: those of its checkpoints are kept in a cache folder of ours.
"""

from pathlib import Path

from laya.checkpoint import Checkpoint


def artifact_folders(checkpoint: Checkpoint, cache_dir: Path, kind: str) -> tuple[Path, ...]:
    """Return the folders to look in, in order, ours under `cache_dir` last; `kind` is its name, such as `aot`."""
    beside = () if checkpoint.revision else (checkpoint.path,)
    return (*beside, cache_dir / kind)
