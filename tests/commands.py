"""Runs `laya-batch` for tests: several commands in one process, in a pipe or on a terminal of their own."""

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from select import select

_MARK = "=== exit code "
# The command's own entry point, called again and again: starting Python costs more than most commands.
_DRIVER = f"""
import json, sys, traceback
from jobs import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["laya-batch", *arguments]
    code = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = "traceback"
    sys.stderr.flush()
    print("{_MARK}" + str(code), flush=True)
"""


@dataclass(frozen=True)
class Shown:
    """What a command wrote, on both streams, and its exit code; 'traceback' where it raised."""

    code: str
    text: str


def run_commands(
    commands: list[list[str]], *, terminal: bool = False, columns: int = 80, cwd: Path | None = None, **variables: str
) -> list[Shown]:
    """Run the commands one after the other; `variables` are added to the environment."""
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **variables}
    call = [sys.executable, "-c", _DRIVER, json.dumps(commands)]
    if terminal:
        text = _on_a_terminal(call, environment, cwd)
    else:
        done = subprocess.run(
            call, env=environment, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200, check=False
        )
        text = done.stdout.decode(errors="replace")
    shown, lines = [], []
    for line in text.replace("\r\n", "\n").split("\n"):
        if line.startswith(_MARK):
            shown.append(Shown(line.removeprefix(_MARK), "\n".join(lines)))
            lines = []
        else:
            lines.append(line)
    assert len(shown) == len(commands), text
    return shown


def _on_a_terminal(call: list[str], environment: dict[str, str], cwd: Path | None) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(call, env=environment, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = b""
    try:
        while True:
            ready, _, _ = select([ours], [], [], 200)
            assert ready, read
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                break
            if not chunk:
                break
            read += chunk
    finally:
        os.close(ours)
        process.wait(60)
    return read.decode(errors="replace")
