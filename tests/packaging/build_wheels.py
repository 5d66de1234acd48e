"""Builds a wheel for each version of Python that is here, and tests each where it is installed.

usage: tests/packaging/build_wheels.py [VERSION ...]    # without: 3.11 3.12 3.13

The wheels lie in dist. That for the Python of this environment has the checkpoint copies, which
torch must be there for; the others are the index alone. Exit status 1 if a Python is not here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
VERSIONS = ("3.11", "3.12", "3.13")
BUILD = ("pybind11==3.1.0", "scikit-build-core==1.1.2", "ninja==1.13.2")
TEST = ("pytest==9.2.0", "pytest-benchmark==5.3.1", "pytest-xdist==3.8.0", "hypothesis==6.170.17")
# What needs neither torch nor an engine.
TESTS = (
    "tests/unit/index",
    "tests/property/test_index_against_reference.py",
    "tests/unit/tools/test_engine_source.py",
    "tests/unit/engine/test_seams.py",
    "tests/unit/engine/test_views.py",
)


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run([*map(str, command)], check=True, cwd=ROOT, env={**os.environ, **variables})


def places(version: str) -> Iterator[str | Path]:
    """Yield where a Python of this version may be."""
    if version == "{}.{}".format(*sys.version_info):
        yield sys.executable
    found = shutil.which(f"python{version}")
    if found is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    if shutil.which("uv") is not None:
        asked = ["uv", "python", "find", "--no-python-downloads", version]
        yield subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def interpreter(version: str) -> Path | None:
    """Return a Python of this version that runs, None where there is none."""
    ask = "import sys; print('{}.{}'.format(*sys.version_info))"
    for place in filter(None, places(version)):
        said = subprocess.run([place, "-c", ask], capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:
            return Path(place)
    return None


def build(version: str, base: Path) -> None:
    """Build the wheel for one Python; install it in an environment of its own and test it there."""
    folder = ROOT / f"build/python-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", folder)
    python = folder / "bin/python"
    pip: tuple[str | Path, ...] = (python, "-m", "pip", "install", "-q")
    run(*pip, *BUILD, *TEST)
    here = str(base) == sys.executable
    builder = base if here else python
    options = ("--no-build-isolation", "--no-deps", "-C", f"build-dir={folder}/build")
    made = folder / "dist"
    copies = {"STATECACHE_OPS": "ON"} if here else {}
    run(builder, "-m", "pip", "wheel", "-q", *options, "-w", made, ".", **copies)
    (wheel,) = made.iterdir()
    DIST.mkdir(exist_ok=True)
    shutil.copy2(wheel, DIST)
    run(*pip, wheel)
    run(python, "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider", *TESTS)
    print(f"{wheel.name}: built and tested", flush=True)


def main(versions: list[str]) -> int:
    found = {version: interpreter(version) for version in versions or VERSIONS}
    for version, base in found.items():
        if base is not None:
            build(version, base)
    missing = [version for version, base in found.items() if base is None]
    for version in missing:
        print(f"no Python {version} here: no python{version}, none of pyenv or uv; not built")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
