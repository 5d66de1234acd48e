"""Runs the doctor on an installation that was changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import statecache

INSTALLED = Path(statecache.__file__).parent


def doctor(*arguments: object, path: Path | None = None, **variables: str):
    """Run it; `path` is searched for modules before what is installed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "statecache", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "PYTHONPATH": str(path or ""), **variables},
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """The last finding about each thing."""
    report = json.loads(done.stdout)
    assert report["schema"] == "statecache.doctor/1"
    assert report["works"] == (done.returncode == 0)
    return {finding["about"]: (finding["level"], finding["text"]) for finding in report["findings"]}


def planted(folder: Path, broken: str, content: bytes | None) -> Path:
    """A copy of the package in which one extension module is something else, or not there."""
    copy = folder / "statecache"
    shutil.copytree(INSTALLED, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (found,) = copy.glob(f"{broken}.*.so")
    if content:
        found.write_bytes(content)
    else:
        found.unlink()
    return folder
