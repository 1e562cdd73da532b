"""A folder of modules with the names of ours and of libraries: nothing that runs in it may import them."""

from pathlib import Path

SPRUNG = "a module of the current folder was imported"
_MODULES = (
    *("worker", "jobs", "laya", "schemas"),
    *("celery", "celeryconfig", "redis", "torch", "numpy", "queue", "logging", "secrets", "sitecustomize"),
)


def set_traps(folder: Path) -> None:
    """Write each module, half of them as packages; importing one ends the process."""
    for number, name in enumerate(_MODULES):
        file = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"raise SystemExit({SPRUNG + ': ' + name!r})\n")
