"""What holds for the files of vLLM's adapter, read without vLLM."""

import ast
from pathlib import Path

import pytest

import statecache_vllm
from statecache_vllm.patches import ALWAYS, PATCHES

PACKAGE = Path(statecache_vllm.__file__).parent
LOADERS = {"seams.py"}  # and all of `bench`
# What is an object of vLLM's wherever the adapter assigns to one of its attributes.
ENGINE_OBJECTS = {"pool", "manager", "owner", "scheduler", "coordinator", "block"}


def files():
    return sorted(PACKAGE.glob("*.py"))


def loads_of(tree):
    """The calls that import a module by a name, and the name where it is written down."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("load", "import_module", "__import__"):
                argument = node.args[0]
                written = isinstance(argument, ast.Constant)
                yield str(argument.value) if written else ast.unparse(argument)


def is_of_vllm(name):
    return name.split(".")[0] == "vllm" or not name.replace("_", "").replace(".", "").islower()


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_seams_alone_loads_vllm(path):
    """A name that is not written down, as `at.POOL`, counts as a module of vLLM."""
    tree = ast.parse(path.read_text())
    found = [name for name in loads_of(tree) if is_of_vllm(name)]
    assert bool(found) == (path.name in LOADERS), found


def assigned_on_vllms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            owner = getattr(target, "value", None)
            if isinstance(owner, ast.Name) and owner.id in ENGINE_OBJECTS:
                yield path.name, ast.unparse(target)


def test_what_is_changed_of_vllm_is_a_row():
    """Beside the rows: links, what a hand-over puts into the pool, and our half for a connector."""
    found = {place for path in files() for place in assigned_on_vllms(path)}
    hooks = {"add_cli_args", "from_cli_args", "create_engine_config"}
    assert {row.target.rpartition(".")[2] for row in ALWAYS} == hooks
    assert found == {
        ("seams.py", "owner._statecache"),
        *(("seams.py", f"owner.{name}") for name in hooks),
        ("seams.py", "pool.cached_block_hash_to_block"),
        ("seams.py", "pool.free_block_queue"),
        ("block_queues.py", "block.prev_free_block"),
        ("block_queues.py", "block.next_free_block"),
        ("unconnected.py", "scheduler.connector"),
    }


def test_a_row_says_why_and_until_when_and_there_is_one_for_each_target():
    assert all(row.why and row.upstream and row.remove_when for row in PATCHES)
    targets = [row.target for row in PATCHES]
    assert len(targets) == len(set(targets))
