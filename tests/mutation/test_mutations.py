"""The tests of the index notice planted errors: each mutation of the C++ must fail them.

A mutation is one textual change of cpp/src/state_index.cpp. The module built from it takes the
place of `statecache._index` in a process of its own, which then runs the ordinary tests.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "cpp" / "src" / "state_index.cpp"
RULES = "tests/unit/test_index_rules.py"
DIFFERENTIAL = "tests/property/test_index_against_reference.py::test_long_run[1-100000]"

MUTATIONS = {
    "a stale bound kept": ("    heap_lower(child);\n", ""),
    "a child not re-parented": ("    hang(child, parent);\n", "    hang(child, kNone);\n"),
    "ties reversed": ("a.last_use < b.last_use", "a.last_use > b.last_use"),
    "L not raised": ("  watermark_ = std::max(watermark_, priority_of(nodes_[slot]));\n", ""),
    "a pin ignored": (
        "    if (node.pins > 0) {\n      heap_erase",
        "    if (false) {\n      heap_erase",
    ),
    "a use not stamped": ("  node.stamp = watermark_;\n", ""),
    "the last unpin not stamped": ("  stamp(node);\n  if (heap_at_[slot]", "  if (heap_at_[slot]"),
    "a skipped proposal lost": ("    if (node.pins == 0) heap_push(slot);\n", ""),
    "L raised to less than the priority": (
        "std::max(watermark_, priority_of(nodes_[slot]))",
        "std::max(watermark_, nodes_[slot].stamp)",
    ),
    "an outdated bound evicted": ("    if (less(top.key, key)) {", "    if (false) {"),
    "the gain from the start, not from the neighbour": (
        "cost_.cost(node.parent == kNone ? 0 : nodes_[node.parent].depth, node.depth)",
        "cost_.cost(0, node.depth)",
    ),
}

INJECT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("statecache._index", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.modules["statecache._index"] = module
import pytest, statecache
assert statecache.StateIndex is module.StateIndex
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[2:]]))
"""


def compile_object(source: Path, target: Path) -> None:
    flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w"]
    includes = [ROOT / "cpp" / "include", sysconfig.get_paths()["include"], pybind11.get_include()]
    command = ["c++", *flags, *(f"-I{path}" for path in includes), "-c", source, "-o", target]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("binding") / "index_module.o"
    compile_object(ROOT / "cpp" / "bindings" / "index_module.cpp", target)
    return target


def build(binding: Path, source: str, folder: Path) -> Path:
    (folder / "state_index.cpp").write_text(source)
    compile_object(folder / "state_index.cpp", folder / "state_index.o")
    module = folder / f"_index{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["c++", "-shared", binding, folder / "state_index.o", "-o", module], check=True)
    return module


def run(module: Path, tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", INJECT, str(module), tests]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_unchanged_source_passes(binding: Path, tmp_path: Path) -> None:
    module = build(binding, SOURCE.read_text(), tmp_path)
    for tests in (RULES, DIFFERENTIAL):
        done = run(module, tests)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(binding: Path, tmp_path: Path, name: str) -> None:
    before, after = MUTATIONS[name]
    source = SOURCE.read_text()
    assert source.count(before) == 1, f"the source no longer holds {before!r} once"
    module = build(binding, source.replace(before, after), tmp_path)
    for tests in (RULES, DIFFERENTIAL):
        done = run(module, tests)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
