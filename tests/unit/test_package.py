"""What the installed package promises to whoever loads it."""

import pickle
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

import statecache

ROOT = Path(__file__).parents[2]

WITHOUT_ENGINES = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "sglang", "matplotlib", "numpy"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import statecache
index = statecache.StateIndex()
index.insert(1, 100)
assert index.evict(1) == [1]
"""


def test_index_needs_neither_torch_nor_engines() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ENGINES], check=True)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_cost_model_can_be_copied_and_an_index_cannot(protocol: int) -> None:
    cost = pickle.loads(pickle.dumps(statecache.CostModel(0.5, 0.25), protocol))
    assert (cost.linear, cost.quadratic) == (0.5, 0.25)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(statecache.StateIndex(), protocol)


def test_version_is_the_one_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert statecache.__version__ == project["version"]


def test_no_base_dependency_pulls_torch_or_an_engine() -> None:
    base = [r for r in requires("statecache") or [] if "extra ==" not in r]
    assert {re.split(r"[^\w-]", r)[0] for r in base} == {"msgspec", "rich", "typer"}


def test_extras_are_declared() -> None:
    assert set(metadata("statecache").get_all("Provides-Extra") or []) == {
        "ab",
        "dev",
        "plot",
        "sglang",
        "vllm",
    }


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_each_engine_finds_its_adapter_and_loading_it_imports_no_engine(group: str) -> None:
    (entry,) = [e for e in entry_points(group=group) if e.name == "statecache"]
    before = set(sys.modules)
    assert callable(entry.load())
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not imported & {"vllm", "sglang", "torch"}


def test_sglang_finds_its_adapter_and_loading_it_loads_nothing_else() -> None:
    code = """
import sys
from importlib.metadata import entry_points
(entry,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "statecache"]
assert callable(entry.load())
assert not {"statecache", "sglang", "torch"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("_index", "CostModel", "linear"),
        ("_index", "StateIndex", "watermark"),
        *(
            ("_blocks", queue, use)
            for queue in ("FifoQueue", "ReuseQueue")
            for use in ("num_free_blocks", "lost", "get_all_free_blocks", "remove", "popleft")
        ),
        ("_blocks", "ReuseQueue", "ratio"),
    ],
)
def test_an_object_made_without_init_raises_and_nothing_else(
    module: str, name: str, use: str
) -> None:
    """In a process of its own: without the check it may end in a segmentation fault."""
    code = f"""
from statecache import {module}
bare = {module}.{name}.__new__({module}.{name})
try:
    found = bare.{use}
    found(1) if "{use}" == "remove" else found()
except TypeError as error:
    assert "__init__" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_bound_class_is_checked() -> None:
    from statecache import _blocks, _index

    bound = {name for m in (_index, _blocks) for name, x in vars(m).items() if isinstance(x, type)}
    assert bound == {
        "BlockQueue",  # the base of the queues
        "BlockHashIndex",  # made by __new__ itself
        "CostModel",
        "ReuseQueue",
        "StateIndex",
        "FifoQueue",
    }
