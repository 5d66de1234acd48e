"""`pip install .` as a user runs it: build isolation on, into an environment that holds nothing."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
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


def wheel(python: Path | str, source: Path, into: Path, *options: str) -> str:
    return pip(python, "wheel", "-v", "--no-deps", "-w", str(into), *options, ".", cwd=source)


def names_in(folder: Path) -> list[str]:
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path).namelist()


def test_without_torch_the_index_alone_is_built_and_a_second_build_compiles_nothing(
    source: Path, tmp_path: Path
) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    venv.create(python.parents[1], with_pip=True)
    first = wheel(python, source, tmp_path / "1")
    assert "Building CXX object" in first
    assert "building the index alone, without the checkpoint copies" in first
    assert "torch-" not in first
    assert "nvidia" not in first
    second = wheel(python, source, tmp_path / "2")
    assert "Building CXX object" not in second
    assert "no work to do" in second

    assert not [
        name for name in names_in(tmp_path / "2") if "_checkpoint_ops" in name and ".so" in name
    ]
    pip(python, "install", "--no-deps", *map(str, (tmp_path / "2").glob("*.whl")))
    code = "import statecache as s; i = s.StateIndex(); i.insert(1, 9); assert i.evict(1) == [1]"
    subprocess.run([python, "-I", "-c", code], cwd=tmp_path, check=True)
    for package in ("statecache_vllm", "statecache_sglang"):
        subprocess.run([python, "-I", "-c", f"import {package}; {package}.register"], check=True)


def test_torch_of_the_environment_is_found_under_isolation(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    log = wheel(sys.executable, source, tmp_path, "-C", "cmake.define.STATECACHE_CUDA=OFF")
    assert "checkpoint copies for torch 2." in log
    assert "Downloading torch" not in log
    assert "statecache/_checkpoint_ops.abi3.so" in names_in(tmp_path)


def test_missing_torch_is_an_error_where_the_copies_are_demanded(
    source: Path, tmp_path: Path
) -> None:
    python = tmp_path / "empty" / "bin" / "python"
    venv.create(python.parents[1], with_pip=True)
    options = ["-C", "cmake.define.STATECACHE_OPS=ON"]
    done = subprocess.run(
        [python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", tmp_path, *options, "."],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "STATECACHE_OPS=ON, but no torch >= 2.13" in done.stdout + done.stderr
