"""The tests of the index notice planted errors: each mutation of the C++ must fail them.

A mutation is one textual change of a source. The module built from it takes the
place of `statecache._index` in a process of its own, which then runs the ordinary tests.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cpp" / "src"
SOURCES = (
    "state_index",
    "invariants",
    "point_tree",
    "learned_table",
    "members",
    "cell_heaps",
    "learned_index",
    "learned_guard",
)
RULES = "tests/unit/test_index_rules.py"
DIFFERENTIAL = "tests/property/test_index_against_reference.py::test_long_run[1-100000]"
LEARNED = [
    f"tests/property/test_learned_against_reference.py::{test}"
    for test in (
        "test_same_order_through_phases",
        "test_same_victims[6-4000-8-6-24-80-0.5]",
        "test_same_victims[4-4000-8-6-12-50-0.3]",
    )
]

MUTATIONS = {
    "a stale bound kept": ("    heap_lower(child);\n", ""),
    "a child not re-parented": ("    hang(child, parent);\n", "    hang(child, kNone);\n"),
    "ties reversed": ("a.last_use < b.last_use", "a.last_use > b.last_use"),
    "L not raised": ("  watermark_ = std::max(watermark_, priority_of(nodes_[slot]));\n", ""),
    "a pin ignored": (
        "    if (node.pins > 0) {\n      heap_erase",
        "    if (false) {\n      heap_erase",
    ),
    "a use not stamped": ("  nodes_[slot].stamp = watermark_;\n", ""),
    "the last unpin not stamped": ("  stamp(slot);\n  if (heap_at_[slot]", "  if (heap_at_[slot]"),
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

LEARNED_MUTATIONS = {  # source, what it says, what it says instead
    "a child of a forgotten member not moved": (
        "members",
        "    members_[child].above = above;\n    reclass(child);\n",
        "    reclass(child);\n",
    ),
    "an age not advanced": ("members", "uint64_t{2} << bucket", "uint64_t{4} << bucket"),
    "superseding at the third end": (
        "members",
        "entry.superseded >= 2) +",
        "entry.superseded > 2) +",
    ),
    "ghosts that lend nothing": (
        "members",
        "  if (heir != kNone) lend(heir, entry.cell, 1);\n  ++ghosts_;",
        "  ++ghosts_;",
    ),
    "a worth not found again after a rebuild": (
        "members",
        "    for (Nest& nest : nests_) find_best(nest);\n",
        "",
    ),
    "a generation of its own": ("members", "members_[source].generation + 1", "1"),
    "no end": ("members", "  members_[node].end = end;\n", ""),
    "the exposure of one request": ("learned_table", "uint64_t{kEvery} * members", "members"),
    "prices without worth": ("learned_index", "members_.worth(cell); }", "1.0 + 0 * cell; }"),
    "a dropped state that stays a ghost": ("learned_index", "members_.forget(node);", "void();"),
    "shadows that keep what was dropped": ("learned_index", "guard_->drop(point);", "void();"),
    "a lead that need not be large": ("learned_guard", "kLead = 1.15;", "kLead = 1.0;"),
    "gds with stamps of its own": ("learned_index", "adopt(guard_->gds());", "void();"),
    "late savings that never fade": (
        "learned_guard",
        "shadow.lately * kDecay +",
        "shadow.lately +",
    ),
    "savings that never fade": ("learned_guard", "shadow.saved * kLongDecay +", "shadow.saved +"),
    "a home lost for little": ("learned_guard", "kLongLead = 1.01;", "kLongLead = 1.0;"),
    "a home that stays": ("learned_guard", "now = home_ = ahead;", "now = ahead;"),
    "no way home": (
        "learned_guard",
        ".lately >= shadows_[now].lately) now = home_;",
        ".lately < 0) {}",
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
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The binding and all sources, compiled."""
    folder = tmp_path_factory.mktemp("objects")
    compile_object(ROOT / "cpp" / "bindings" / "index_module.cpp", folder / "binding.o")
    for source in SOURCES:
        compile_object(FOLDER / f"{source}.cpp", folder / f"{source}.o")
    return folder


def build(objects: Path, changed: str, text: str, folder: Path) -> Path:
    """Build the module with the source `changed` saying `text`."""
    (folder / f"{changed}.cpp").write_text(text)
    compile_object(folder / f"{changed}.cpp", folder / f"{changed}.o")
    module = folder / f"_index{sysconfig.get_config_var('EXT_SUFFIX')}"
    others = [objects / f"{source}.o" for source in ("binding", *SOURCES) if source != changed]
    command = ["c++", "-shared", *others, folder / f"{changed}.o", "-o", module]
    subprocess.run(command, check=True)
    return module


def mutated(name: str, before: str, after: str) -> str:
    text = (FOLDER / f"{name}.cpp").read_text()
    assert text.count(before) == 1, f"{name}.cpp no longer holds {before!r} once"
    return text.replace(before, after)


def run(module: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", INJECT, str(module), *tests]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_unchanged_source_passes(objects: Path, tmp_path: Path) -> None:
    source = (FOLDER / "state_index.cpp").read_text()
    module = build(objects, "state_index", source, tmp_path)
    for tests in (RULES, DIFFERENTIAL, *LEARNED):
        done = run(module, tests)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(objects: Path, tmp_path: Path, name: str) -> None:
    text = mutated("state_index", *MUTATIONS[name])
    module = build(objects, "state_index", text, tmp_path)
    for tests in (RULES, DIFFERENTIAL):
        done = run(module, tests)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr


@pytest.mark.parametrize("name", LEARNED_MUTATIONS)
def test_mutation_of_learned_is_caught(objects: Path, tmp_path: Path, name: str) -> None:
    source, before, after = LEARNED_MUTATIONS[name]
    module = build(objects, source, mutated(source, before, after), tmp_path)
    done = run(module, *LEARNED)
    # Some lose their own bookkeeping and crash.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED or done.returncode < 0, done.stdout
