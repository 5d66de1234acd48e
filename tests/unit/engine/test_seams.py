"""The forms that a seam may have, and what happens where an engine has another one."""

import dataclasses
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import pytest

from statecache.engine.seams import Seam, check, features_off, has, is_broken, methods, probe
from statecache.engine.views import View
from statecache.errors import SeamError

LOG = logging.getLogger("statecache.test")


@dataclasses.dataclass
class Step:
    """What an engine hands over."""

    states: "dict[str, list[tuple[int, int, int]]]"
    actions: list[str] = dataclasses.field(default_factory=list)


class Row(NamedTuple):
    node: int
    parent: int


class Manager:
    def __init__(self) -> None:
        self.pool = 1

    def look_up(self, request: Any, limit: int) -> "tuple[Step, int, int]":
        raise NotImplementedError

    def rows(self) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def plain(self) -> int:
        raise NotImplementedError

    def free(self) -> tuple[int, str]:
        raise NotImplementedError

    @staticmethod
    def make(size: int) -> None: ...


@pytest.fixture
def engine() -> Iterator[Any]:
    """A module that stands for an engine's; what is planted there goes with it."""
    module: Any = types.ModuleType("an_engine")
    for item in (Step, Row, Manager):
        setattr(module, item.__name__, type(item.__name__, (item,), {}))
    module.Row = Row
    sys.modules["an_engine"] = module
    has.cache_clear()
    yield module
    has.cache_clear()
    del sys.modules["an_engine"]


def state(path: str, **wanted: Any) -> str:
    return Seam("an_engine", path, **wanted).state()


@pytest.mark.usefixtures("engine")
def test_one_of_several_signatures_is_enough() -> None:
    one, two = methods("an_engine", "Manager", {"look_up": "request | request limit", "free": ""})
    assert (one.parameters, one.variants) == (("self", "request"), (("self", "request", "limit"),))
    assert (two.parameters, two.variants) == (("self",), ())
    assert (one.state(), two.state()) == ("ok", "ok")
    three = methods("an_engine", "Manager", {"look_up": "request | request salt"})[0]
    assert three.state() == "moved (takes self, request, limit)"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("place", "name", "there"),
    [
        ("Manager.look_up", "limit", True),
        ("Manager.look_up", "salt", False),
        ("Manager.make", "size", True),
        ("Manager", "pool", True),  # an attribute that `__init__` gives each object
        ("Manager", "free", True),
        ("Manager", "queue", False),
        ("Row", "parent", True),
        ("Row", "children", False),
        ("Step", "states", True),
        ("Gone", "x", False),
    ],
)
def test_code_asks_which_form_is_there(place: str, name: str, there: bool) -> None:
    assert has(f"an_engine:{place}", name) is there
    assert has("no_engine:x", name) is False


@pytest.mark.usefixtures("engine")
def test_fields_of_a_class_must_be_there_and_of_a_tuple_be_all() -> None:
    assert state("Step", fields=("actions", "states")) == "ok"
    assert state("Step", fields=("states", "frees", "more")) == "moved (has no frees, more)"
    assert state("Manager", fields=("pool",)) == "ok"
    assert state("Row", fields=("node", "parent")) == "ok"
    assert state("Row", fields=("node",)) == "moved (has node, parent)"
    assert state("Row", fields=("parent", "node")) == "moved (has node, parent)"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("place", "items"), [("Manager.look_up", 3), ("Step.states", 3), ("Manager.free", 2)]
)
def test_a_tuple_has_as_many_items_as_its_annotation_says(place: str, items: int) -> None:
    assert state(place, items=items) == "ok"
    assert state(place, items=items + 1) == f"moved (has {items} items)"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("place", ["Manager.rows", "Manager.plain", "Manager.make", "Step.actions"])
def test_no_length_that_is_said_is_a_difference(place: str) -> None:
    assert state(place, items=3) == "moved (has an unknown number of items)"


class Queue(Protocol):
    pool: int
    extra: int


OPTIONAL = (
    Seam("an_engine", "Manager.record", ("self",), optional="recording"),
    Seam("an_engine", "Manager.look_up", ("self", "salt"), optional="recording"),
    Seam("an_engine", "Manager.free", ("self",), optional="freeing"),
)


@pytest.mark.usefixtures("engine")
def test_what_is_optional_turns_one_feature_off_with_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    views = [View(Queue, "an_engine:Manager", optional="extras")]
    missing = check("X", "2.0", OPTIONAL, ["2.0"], package="x", strict=True, log=LOG, views=views)
    assert missing == {
        "recording": "an_engine.Manager.record: missing",
        "extras": "an_engine.Manager.extra: missing",
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"statecache: without {feature} in X 2.0: {reason}" for feature, reason in missing.items()
    ]
    states = dict(probe(OPTIONAL, views))
    assert states == {
        "an_engine.Manager.record": "off: recording: missing",
        "an_engine.Manager.look_up": "off: recording: moved (takes self, request, limit)",
        "an_engine.Manager.free": "ok",
        "an_engine.Manager.pool": "ok",
        "an_engine.Manager.extra": "off: extras: missing",
    }
    assert not any(map(is_broken, states.values()))
    assert features_off([*states.items()]) == missing


@pytest.mark.usefixtures("engine")
def test_what_something_else_needs_is_not_optional() -> None:
    seams = [*OPTIONAL, Seam("an_engine", "Manager.record")]
    assert dict(probe(seams))["an_engine.Manager.record"] == "missing"
    both = [View(Queue, "an_engine:Manager", optional="extras"), View(Queue, "an_engine:Manager")]
    for views in (both, both[::-1]):
        assert dict(probe([], views))["an_engine.Manager.extra"] == "missing"


# A change of the engine, and what is said of it at start.
PLANTED = {
    "renamed method": ("Manager.free", "missing"),
    "added argument": ("Manager.look_up", "moved (takes self, request, limit, salt)"),
    "field gone": ("Step", "moved (has no actions)"),
    "shorter tuple": ("Step.states", "moved (has 2 items)"),
    "shorter named tuple": ("Row", "moved (has node)"),
}
TABLE = (
    *methods("an_engine", "Manager", {"look_up": "request | request limit", "free": ""}),
    Seam("an_engine", "Step", fields=("states", "actions")),
    Seam("an_engine", "Step.states", items=3),
    Seam("an_engine", "Row", fields=("node", "parent")),
)


def plant(engine: Any, what: str) -> None:
    class Shorter(NamedTuple):
        node: int

    def look_up(self: Any, request: Any, limit: int, salt: str) -> None: ...

    bare = type("Step", (), {"__annotations__": {"states": dict[str, list[tuple[int, int, int]]]}})
    two = {"states": dict[str, list[tuple[int, int]]], "actions": list[str]}
    if what == "renamed method":
        engine.Manager = type("Manager", (), {"look_up": Manager.look_up, "release": Manager.free})
    elif what == "added argument":
        engine.Manager.look_up = look_up
    elif what == "field gone":
        engine.Step = bare
    elif what == "shorter tuple":
        engine.Step = type("Step", (), {"__annotations__": two})
    else:
        engine.Row = Shorter


def test_nothing_is_said_of_what_is_in_place(engine: Any) -> None:
    assert check("X", "2.0", TABLE, ["2.0"], package="x", strict=True, log=LOG) == {}
    assert engine.Manager.look_up is Manager.look_up


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_change_stops_with_one_line(engine: Any, what: str) -> None:
    plant(engine, what)
    place, said = PLANTED[what]
    with pytest.raises(SeamError) as caught:
        check("X", "2.0", TABLE, ["2.0"], package="x", strict=False, log=LOG)
    stopped = f"of {len(TABLE)} seams 1 is not in place: an_engine.{place}: {said}"
    assert str(caught.value) == f"X 2.0 does not fit (a tested version): {stopped}"
