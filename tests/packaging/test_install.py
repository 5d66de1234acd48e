"""`pip install .` as a user runs it: build isolation on, into an environment that holds nothing."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pip(python: Path | str, *args: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(python), "-m", "pip", *args], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what git tracks, so that nothing built here before can help."""
    target = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in os.fsdecode(listed.stdout).split("\0"):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def test_build_pulls_nothing_big_and_a_second_one_compiles_nothing(
    source: Path, tmp_path: Path
) -> None:
    first = pip(
        sys.executable, "wheel", "-v", "--no-deps", "-w", str(tmp_path / "1"), ".", cwd=source
    )
    assert "Building CXX object" in first
    assert "torch-" not in first
    assert "nvidia" not in first
    second = pip(
        sys.executable, "wheel", "-v", "--no-deps", "-w", str(tmp_path / "2"), ".", cwd=source
    )
    assert "Building CXX object" not in second
    assert "no work to do" in second

    (wheel,) = (tmp_path / "2").glob("*.whl")
    assert wheel.stat().st_size < 5_000_000
    python = tmp_path / "empty" / "bin" / "python"
    venv.create(python.parents[1], with_pip=True)
    pip(python, "install", "--no-deps", str(wheel))
    code = "import statecache as s; i = s.StateIndex(); i.insert(1, 9); assert i.evict(1) == [1]"
    subprocess.run([python, "-I", "-c", code], cwd=tmp_path, check=True)
    for package in ("statecache_vllm", "statecache_sglang"):
        subprocess.run([python, "-I", "-c", f"import {package}; {package}.register()"], check=True)
