"""Changes of an engine: what is put where, together or not at all, and taken back."""

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from statecache.engine.patching import (
    Patch,
    PatchSet,
    bind_dynamically,
    detect_overrides,
    original_function,
)
from statecache.errors import SeamError

SOURCE = """
class Base:
    def inherited(self):
        return "base"

class Record:
    pass

class Pool(Base):
    record = Record
    registry = {"mamba": "own"}

    def __init__(self):
        self.queue = [1, 2]

    def touch(self, blocks, *, twice=False):
        "Count a use."
        return ["own", *blocks, twice]

    def reset(self):
        return self.touch([])

    @staticmethod
    def parse(text):
        return text

    @classmethod
    def make(cls):
        return cls.__name__

def select(name):
    return name
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    module: Any = types.ModuleType("an_engine")
    sys.modules["an_engine"] = module
    exec(SOURCE, vars(module))
    yield module
    del sys.modules["an_engine"]


def row(path: str) -> Patch:
    return Patch(f"an_engine:{path}", "a reason")


TOUCH, SELECT = row("Pool.touch"), row("select")


def again(original: Any, *args: Any, **kwargs: Any) -> Any:
    return [original(*args, **kwargs)]


def test_a_method_is_wrapped_and_given_back(engine: Any) -> None:
    pool, own = engine.Pool(), engine.Pool.touch
    patches = PatchSet([TOUCH.wrapped_by(again)])
    patches.install()
    assert pool.touch([7], twice=True) == [["own", 7, True]]
    assert engine.Pool.touch.__qualname__ == "Pool.touch"
    assert inspect.getdoc(engine.Pool.touch) == "Count a use."
    patches.remove()
    assert engine.Pool.touch is own
    assert not patches.installed


@pytest.mark.parametrize(
    ("path", "call", "found"),
    [
        ("Pool.parse", lambda engine: engine.Pool().parse("a"), ["a"]),
        ("Pool.parse", lambda engine: engine.Pool.parse("a"), ["a"]),
        ("Pool.make", lambda engine: type("Sub", (engine.Pool,), {}).make(), ["Sub"]),
        ("Pool.inherited", lambda engine: engine.Pool().inherited(), ["base"]),
        ("select", lambda engine: engine.select("a"), ["a"]),
    ],
)
def test_static_class_and_inherited_methods_and_functions_stay_what_they_are(
    engine: Any, path: str, call: Any, found: Any
) -> None:
    owner, name = (engine.Pool, path[5:]) if "." in path else (engine, path)
    before = vars(owner).get(name)
    patches = PatchSet([row(path).wrapped_by(again)])
    patches.install()
    assert call(engine) == found
    patches.remove()
    assert vars(owner).get(name) is before
    assert call(engine) == found[0]


def test_a_class_that_is_an_attribute_is_called_without_the_object(engine: Any) -> None:
    patches = PatchSet([row("Pool.record").wrapped_by(again)])
    patches.install()
    ((made,),) = [engine.Pool().record()]
    assert type(made) is engine.Record
    patches.remove()
    assert engine.Pool.record is engine.Record


def test_a_target_is_replaced_as_it_is(engine: Any) -> None:
    patches = PatchSet([row("Pool.registry").replaced_by("other"), SELECT.replaced_by(len)])
    patches.install()
    assert (engine.Pool.registry, engine.select("four")) == ("other", 4)
    patches.remove()
    assert (engine.Pool.registry, engine.select("four")) == ({"mamba": "own"}, "four")


def test_one_object_alone_is_changed(engine: Any) -> None:
    pool, other = engine.Pool(), engine.Pool()
    patches = PatchSet(
        [
            TOUCH.on(pool).wrapped_by(again),
            row("Pool.queue").on(pool).replaced_by("ours"),
            row("Pool.reset").on(pool).replaced_by(lambda: "done"),
        ]
    )
    patches.install()
    assert (pool.touch([1]), pool.queue, pool.reset()) == ([["own", 1, False]], "ours", "done")
    assert (other.touch([1]), other.queue) == (["own", 1, False], [1, 2])
    patches.remove()
    assert (pool.touch([1]), pool.queue, pool.reset()) == (
        ["own", 1, False],
        [1, 2],
        ["own", False],
    )
    assert set(vars(pool)) == {"queue"}


def test_all_are_made_or_none(engine: Any) -> None:
    """The second one fails: the first is taken back, and what was done by functions, too."""
    own, log = engine.Pool.touch, []
    patches = PatchSet(
        [
            TOUCH.wrapped_by(again),
            row("registry").carried_out_by(lambda: log.append("on"), lambda: log.append("off")),
            row("Pool.gone").wrapped_by(again),
        ]
    )
    with pytest.raises(SeamError, match=r"^an_engine:Pool\.gone is missing$"):
        patches.install()
    assert engine.Pool.touch is own
    assert log == ["on", "off"]
    assert not patches.installed


def test_a_module_that_is_not_there_is_a_seam_that_moved() -> None:
    with pytest.raises(SeamError, match=r"^no_engine:Pool\.touch is missing \(No module named"):
        PatchSet([Patch("no_engine:Pool.touch", "a reason").replaced_by(1)]).install()


@pytest.mark.usefixtures("engine")
def test_changes_are_taken_back_in_the_other_order() -> None:
    log: list[str] = []
    rows = [
        row(name).carried_out_by(
            functools.partial(log.append, f"+{name}"), functools.partial(log.append, f"-{name}")
        )
        for name in ("a", "b")
    ]
    patches = PatchSet([*rows, row("c").carried_out_by(lambda: log.append("+c"))])
    patches.install()
    patches.remove()
    assert log == ["+a", "+b", "+c", "-b", "-a"]


def test_to_install_again_does_nothing(engine: Any) -> None:
    patches = PatchSet([TOUCH.wrapped_by(again)])
    patches.install()
    patches.install()
    assert engine.Pool().touch([]) == [["own", False]]
    patches.remove()
    patches.remove()
    assert engine.Pool().touch([]) == ["own", False]


@pytest.mark.parametrize("wrapped_by_another", [False, True])
def test_two_sets_cannot_hold_one_target(engine: Any, wrapped_by_another: bool) -> None:
    first, second = PatchSet([TOUCH.wrapped_by(again)]), PatchSet([TOUCH.wrapped_by(again)])
    first.install()
    if wrapped_by_another:
        ours = engine.Pool.touch
        engine.Pool.touch = functools.wraps(ours)(lambda *a, **k: ours(*a, **k))
    with pytest.raises(SeamError, match="patched by statecache already"):
        second.install()
    first.remove()
    second.install()
    assert engine.Pool().touch([]) == [["own", False]]


def test_two_objects_of_a_class_are_held_apart(engine: Any) -> None:
    pool, other = engine.Pool(), engine.Pool()
    PatchSet([TOUCH.on(pool).wrapped_by(again)]).install()
    PatchSet([TOUCH.on(other).wrapped_by(again)]).install()
    with pytest.raises(SeamError, match="already"):
        PatchSet([TOUCH.on(pool).wrapped_by(again)]).install()


def test_what_another_plugin_put_around_a_change_stays_and_ours_is_done_no_more(
    engine: Any,
) -> None:
    patches = PatchSet([TOUCH.wrapped_by(again)])
    patches.install()
    ours = engine.Pool.touch
    engine.Pool.touch = lambda *a, **k: {"theirs": ours(*a, **k)}
    assert engine.Pool().touch([]) == {"theirs": [["own", False]]}
    patches.remove()
    assert engine.Pool().touch([]) == {"theirs": ["own", False]}


@pytest.mark.usefixtures("engine")
def test_a_row_without_anything_to_put_there_is_a_fault_of_ours() -> None:
    with pytest.raises(TypeError, match="nothing was given"):
        PatchSet([TOUCH]).install()


def test_a_method_bound_dynamically_is_what_its_class_has_at_each_call(engine: Any) -> None:
    pool = engine.Pool()
    touch = bind_dynamically(pool, "touch")
    own = engine.Pool.touch
    assert touch([1]) == ["own", 1, False]
    engine.Pool.touch = lambda *a, **k: ["theirs", *own(*a, **k)]
    assert touch([1]) == ["theirs", "own", 1, False]
    pool.touch = lambda *_: "of this object"
    assert touch([1]) == ["theirs", "own", 1, False]
    assert bind_dynamically(pool, "touch") is pool.touch


def test_the_engines_own_function_is_told_from_that_of_another_plugin(engine: Any) -> None:
    own = engine.Pool.touch
    assert original_function(engine.Pool, "touch") is own
    engine.Pool.touch = lambda *a: own(*a)
    assert original_function(engine.Pool, "touch") is None
    assert original_function(engine.Pool, "nothing") is None


def test_an_override_that_comes_later_is_named(engine: Any) -> None:
    overridden = detect_overrides(["an_engine:Pool.reset", "an_engine:Pool.touch"])
    assert overridden() is None
    own = engine.Pool.touch
    engine.Pool.touch = lambda *a: own(*a)
    assert overridden() == "Pool.touch"
    engine.Pool.touch = own
    assert overridden() is None
