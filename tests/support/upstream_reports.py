"""The reports in docs/upstream: what their code is said to print, and what it prints here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "upstream"


def reports(engine: str) -> list[str]:
    """Those that show something, and what it prints."""
    found = FOLDER.glob(f"{engine}-*.md")
    return sorted(path.name for path in found if "```text\n" in path.read_text())


def fenced(name: str, kind: str) -> str:
    """The one block of a report in this language."""
    (text,) = re.findall(rf"```{kind}\n(.*?)```", (FOLDER / name).read_text(), re.DOTALL)
    return text


def printed(name: str, folder: Path, **variables: str) -> str:
    """Run the code of a report in a process of its own; return what it prints."""
    file = folder / "reproduction.py"
    file.write_text(fenced(name, "python"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", file],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
