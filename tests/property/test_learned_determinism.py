"""`learned` decides alike in any process, under any hash seed, and built with -O0 or -O3.

-O3 is what is installed: a release build.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib.util, sys
if sys.argv[2:]:
    spec = importlib.util.spec_from_file_location("statecache._index", sys.argv[2])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["statecache._index"] = module
from statecache import CostModel, StateIndex
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import play
from statecache.trace.format import read_trace


class Logged:
    def __init__(self):
        self._index = StateIndex("learned", CostModel(), 24, 200)

    def __getattr__(self, name):
        return getattr(self._index, name)

    def __len__(self):
        return len(self._index)

    def evict(self, n):
        victims = self._index.evict(n)
        ranks = [self._index.rank(v).hex() for v in victims if v in self._index]
        print(victims, self._index.watermark.hex(), self._index.order, ranks)
        return victims


tree = PrefixTree.of(read_trace(sys.argv[1]))
index = Logged()
play(make_schedule(tree, kv_timeline(tree, 2_000_000), "dense"), index, 24)
for state in sorted(s for s in range(len(tree.parents)) if s in index._index):
    print(state, index.rank(state).hex())
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "mixed.jsonl"
    command = [sys.executable, "-m", "statecache", "generate", "mixed", "--requests", "4200"]
    more = ["--rewinds", "0.2", "--subagents", "3", "--prompts", "3", "--phase", "zipf"]
    subprocess.run([*command, *more, "--seed", "3", "-o", path], check=True)
    return path


def log_of(trace: Path, seed: str = "0", module: Path | None = None) -> bytes:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(trace), *([str(module)] if module else [])],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
    ).stdout


def test_four_processes_give_identical_logs(trace: Path) -> None:
    (log,) = {log_of(trace, seed) for seed in ("0", "1", "42", "random")}
    assert len(log.splitlines()) > 5_000


def test_two_builds_give_identical_logs(trace: Path, tmp_path: Path) -> None:
    assert log_of(trace, module=build("-O0", tmp_path)) == log_of(trace)


def build(level: str, folder: Path) -> Path:
    sources = [
        ROOT / "cpp" / "bindings" / "index_module.cpp",
        *sorted((ROOT / "cpp" / "src" / "index").glob("*.cpp")),
    ]
    module = folder / level / f"_index{sysconfig.get_config_var('EXT_SUFFIX')}"
    module.parent.mkdir()
    flags = ["-std=c++20", level, "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w"]
    includes = [ROOT / "cpp" / "include", sysconfig.get_paths()["include"], pybind11.get_include()]
    paths = [f"-I{path}" for path in includes]
    subprocess.run(["c++", "-shared", *flags, *paths, *sources, "-o", module], check=True)
    return module
