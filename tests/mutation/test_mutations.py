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
FOLDER = ROOT / "cpp" / "src" / "index"
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cpp"))
RULES = "tests/unit/index/test_index_rules.py"
DIFFERENTIAL = "tests/property/test_index_against_reference.py::test_long_run[1-100000]"
LEARNED = [
    f"tests/property/test_learned_against_reference.py::{test}"
    for test in (
        "test_same_order_through_phases",
        "test_same_victims_in_the_order_of_gds",
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
        "cost_->cost(node.parent == kNone ? 0 : nodes_[node.parent].depth, node.depth)",
        "cost_->cost(0, node.depth)",
    ),
}

TIPS = (
    "tests/unit/index/test_tips_rules.py",
    "tests/property/test_index_against_reference.py::test_long_run[4-200000]",
)
TIPS_MUTATIONS = {
    "a fork in the middle": ("node_at(child).next_sibling == kNone &&", "true &&"),
    "a state above a tip in the middle": ("node_at(child).first_child != kNone;", "true;"),
    "the state above not asked again": ("    regain(node_at(slot).parent);\n", ""),
    "the state itself not asked again": ("    regain(slot);\n", ""),
    "the gain itself, not its root": (
        "std::sqrt(TreeIndex::gain_of(slot))",
        "TreeIndex::gain_of(slot)",
    ),
}

LEARNED_MUTATIONS = {  # source, what it says, what it says instead
    "a child of a forgotten member not moved": (
        "tracked_states",
        "    tracked_[child].above = above;\n    reclass(child);\n",
        "    reclass(child);\n",
    ),
    "an age not advanced": (
        "tracked_states",
        "uint64_t{2} << age_bucket",
        "uint64_t{4} << age_bucket",
    ),
    "superseding at the third end": (
        "tracked_states",
        "entry.superseded >= 2) +",
        "entry.superseded > 2) +",
    ),
    "ghosts that count for nothing": (
        "tracked_states",
        "    add_ghosts(inheritor, entry.bucket, 1);\n    ghosts_changed(inheritor);\n",
        "",
    ),
    "ghosts not assessed again after a rebuild": (
        "tracked_states",
        "      assess(group);\n      rank",
        "      rank",
    ),
    "a generation of its own": ("tracked_states", "tracked_[source].generation + 1", "1"),
    "no end": ("tracked_states", "  tracked_[node].end = end;\n", ""),
    "the exposure of one request": (
        "learned_table",
        "uint64_t{kEvery} * states",
        "states",
    ),
    "ranks by gain alone": (
        "learned_index",
        "return tracked_.index_of(bucket);",
        "return 1.0 + 0 * bucket;",
    ),
    "a dropped state that stays a ghost": ("learned_index", "tracked_.forget(node);", "void();"),
    "shadows that keep what was dropped": ("learned_index", "selector_->drop(point);", "void();"),
    "gds with stamps of its own": ("learned_index", "adopt(selector_->gds());", "void();"),
    "short-term savings that never fade": (
        "shadow_selector",
        "shadow.short_term_savings * kDecay +",
        "shadow.short_term_savings +",
    ),
    "long-term savings that never fade": (
        "shadow_selector",
        "shadow.long_term_savings * kLongDecay +",
        "shadow.long_term_savings +",
    ),
    "a lead that need not last": ("shadow_selector", "kPersistence = 600;", "kPersistence = 500;"),
    "no way back to learned": ("shadow_selector", "leader != 0 && ahead_for_", "ahead_for_"),
    "chances that do not add up": ("tracked_states", "group.chances += count *", "group.chances ="),
    "interior ghosts that add up": ("tracked_states", "if (bucket < kAddingUp) ", ""),
    "a chain that is never spared": (
        "learned_index",
        "slot == kNone ? kNone : spare_in_chain(slot);",
        "slot;",
    ),
    "what was seen that never fades": ("tracked_states", "    table_.fade();\n", ""),
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
    includes = [
        ROOT / "cpp" / "include",
        FOLDER,
        sysconfig.get_paths()["include"],
        pybind11.get_include(),
    ]
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
    source = (FOLDER / "tree_index.cpp").read_text()
    module = build(objects, "tree_index", source, tmp_path)
    for tests in (RULES, DIFFERENTIAL, *TIPS, *LEARNED):
        done = run(module, tests)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(objects: Path, tmp_path: Path, name: str) -> None:
    text = mutated("tree_index", *MUTATIONS[name])
    module = build(objects, "tree_index", text, tmp_path)
    for tests in (RULES, DIFFERENTIAL):
        done = run(module, tests)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr


@pytest.mark.parametrize("name", TIPS_MUTATIONS)
def test_mutation_of_tips_is_caught(objects: Path, tmp_path: Path, name: str) -> None:
    text = mutated("tips_index", *TIPS_MUTATIONS[name])
    module = build(objects, "tips_index", text, tmp_path)
    for tests in TIPS:
        done = run(module, tests)
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr


@pytest.mark.parametrize("name", LEARNED_MUTATIONS)
def test_mutation_of_learned_is_caught(objects: Path, tmp_path: Path, name: str) -> None:
    source, before, after = LEARNED_MUTATIONS[name]
    module = build(objects, source, mutated(source, before, after), tmp_path)
    done = run(module, *LEARNED)
    # Some lose their own bookkeeping and crash.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED or done.returncode < 0, done.stdout
