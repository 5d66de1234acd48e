"""`pip install .` as a user runs it: build isolation on, into an environment that holds nothing."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def pip(python: Path | str, *args: str, cwd: Path | None = None) -> str:
    """Run pip as a user does who has set none of this project's variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")}
    done = subprocess.run(
        [str(python), "-m", "pip", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
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

    names = names_in(tmp_path / "2")
    assert not [name for name in names if "_checkpoint_ops" in name and ".so" in name]
    assert "statecache/ab/report/page.html.jinja" in names
    pip(python, "install", "--no-deps", *map(str, (tmp_path / "2").glob("*.whl")))
    code = "import statecache as s; i = s.StateIndex(); i.insert(1, 9); assert i.evict(1) == [1]"
    subprocess.run([python, "-I", "-c", code], cwd=tmp_path, check=True)
    for package in ("statecache_vllm", "statecache_sglang"):
        subprocess.run([python, "-I", "-c", f"import {package}; {package}.register"], check=True)


class Built(NamedTuple):
    """A wheel of this environment's torch: the folder it lies in, and the log of its build."""

    folder: Path
    log: str
    cuda: bool


def with_cuda_compiler() -> dict[str, str]:
    """Return an environment with nvcc: the one on the PATH, else that of the wheels."""
    found = dict(os.environ)
    if shutil.which("nvcc") is None:
        (nvcc,) = Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvcc")
        found["PATH"] = f"{nvcc.parent}:{found['PATH']}"
        found["LIBRARY_PATH"] = str(nvcc.parents[1] / "lib")  # its own profile looks in lib64
    return found


@pytest.fixture(scope="module", params=["OFF", "ON"], ids=["without CUDA", "with CUDA"])
def with_copies(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    cuda = request.param == "ON"
    if cuda:  # as `make wheel` does it where there is an nvcc
        venv_here = f"VENV={Path(sys.executable).parents[1]}"
        made = subprocess.run(
            ["make", "wheel", venv_here],
            cwd=source,
            env=with_cuda_compiler(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        return Built(source / "dist", made.stdout, cuda)
    folder, option = tmp_path_factory.mktemp("wheel"), "cmake.define.STATECACHE_CUDA=OFF"
    return Built(folder, wheel(sys.executable, source, folder, "-C", option), cuda)


def test_torch_of_the_environment_is_found_with_and_without_isolation(with_copies: Built) -> None:
    assert "statecache/_checkpoint_ops.abi3.so" in names_in(with_copies.folder)
    if not with_copies.cuda:
        assert "checkpoint copies for torch 2." in with_copies.log
        assert "Downloading torch" not in with_copies.log


# What of this environment torch needs to run; nothing that could build anything.
TORCH_NEEDS = ("torch", "torchgen", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2")
TORCH_NEEDS += ("markupsafe", "filelock", "fsspec", "numpy", "numpy.libs", "functorch")


def test_the_wheel_works_where_there_is_no_compiler(with_copies: Built, tmp_path: Path) -> None:
    """A new environment, only its own programs on the PATH, torch linked in beside, no CUDA."""
    home = tmp_path / "clean"
    python = home / "bin" / "python"
    venv.create(home, with_pip=True)
    (path,) = with_copies.folder.glob("*.whl")
    pip(python, "install", "--only-binary", ":all:", str(path))
    (packages,) = home.glob("lib/python*/site-packages")
    for name in TORCH_NEEDS:
        here = Path(sysconfig.get_path("platlib")) / name
        if here.exists() and not (packages / name).exists():
            (packages / name).symlink_to(here)
    code = """
import shutil, torch
assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang", "cmake", "ninja", "nvcc")))
from statecache import StateIndex
from statecache.checkpoint import ops
from statecache.checkpoint import reference as checkpoint_reference
index = StateIndex()
index.insert(1, 9)
assert index.evict(1) == [1]
native = ops.ops_for("cpu")
assert native.name == "native"
state = torch.randn(2, 1, 64, 64)
levels, scale = torch.zeros(1, 2, 1, 64, 64, dtype=torch.int8), torch.zeros(1, 2, 1, 1, 64)
report, slots = torch.zeros(1, dtype=torch.int32), torch.tensor([1])
native.store([state], levels, scale, report, slots, slots)
back = torch.zeros_like(state)
native.load(levels, scale, [back], slots, slots)
assert torch.equal(back[1], checkpoint_reference.dequantize(levels[0, 1], scale[0, 1], state.dtype))
assert float((back[1] - state[1]).abs().max()) <= float(scale.max()) / 2 * 1.0001
"""
    alone = {"PATH": str(home / "bin"), "HOME": str(tmp_path)}
    subprocess.run([python, "-I", "-c", code], cwd=tmp_path, env=alone, check=True)
    done = subprocess.run(
        [home / "bin" / "statecache", "doctor"],
        cwd=tmp_path,
        env=alone,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "copies of the checkpoint pool work" in done.stdout
    kernels = "CUDA 80-real,90-real,100,120" if with_copies.cuda else "no CUDA kernels"
    assert kernels in done.stdout
    assert done.returncode == 1, "no engine is there to work with, and all else is in order"
    problems = [line for line in done.stdout.splitlines() if "PROBLEM" in line]
    assert [line.split()[1] for line in problems] == ["engines"]


def test_the_list_of_contents_names_every_file_and_what_was_compiled_in(
    with_copies: Built,
) -> None:
    (path,) = with_copies.folder.glob("*.whl")
    script = Path(__file__).parent / "wheel_contents.py"
    done = subprocess.run([sys.executable, script, path], capture_output=True, check=True)
    if with_copies.cuda:
        assert Path(f"{path}.cdx.json").read_bytes() == done.stdout
    listed = {component["name"]: component for component in json.loads(done.stdout)["components"]}
    assert sorted(listed) == sorted(names_in(with_copies.folder))
    for component in listed.values():
        assert (ROOT / component["properties"][0]["value"]).exists()
    extensions = {
        name.split("/")[1].split(".")[0]: component
        for name, component in listed.items()
        if ".so" in name
    }
    assert {
        name: [part["name"] for part in component["components"]]
        for name, component in extensions.items()
    } == {
        "_index": ["pybind11", "libstdc++"],
        "_blocks": ["pybind11", "libstdc++"],
        "_checkpoint_ops": ["torch", "libstdc++", *["cuda-runtime"] * with_copies.cuda],
    }


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
    assert "STATECACHE_OPS=ON, but no torch >= 2.11" in done.stdout + done.stderr
