"""The quickstart of an engine in docs, played as a reader would: its commands as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def commands(page: str) -> list[str]:
    """Return the commands below the numbered steps of a page."""
    found = re.findall(r"^ {7}(\S.*)$", (DOCS / page).read_text(), re.M)
    assert len(found) == 5, found
    return found


def flags_of(command: str, start: str) -> list[str]:
    """Return what follows `start`, which names the program and the model."""
    assert command.startswith(f"{start} "), command
    return shlex.split(command.removeprefix(start))


def output_of(command: str, address: str = "", **environment: str) -> str:
    """Run it with the address of the server in the place of the one it names; it must succeed."""
    words = shlex.split(re.sub(r"http://localhost:\d+", address, command))
    if words[0] == "statecache":
        words = [sys.executable, "-m", *words]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, env=environment or None, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
