"""What is read of an engine's objects is looked for in the engine's classes."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest

from statecache.engine.seams import Seam, probe
from statecache.engine.views import View, members_of, probe_views


class Block(Protocol):
    block_id: int
    ref_cnt: int
    statecache_seen: bool  # ours

    @property
    def is_null(self) -> bool:
        """Whether it is none."""

    def reset(self) -> None:
        """Start over."""

    def __len__(self) -> int:
        """Its tokens."""


class HashedBlock(Block, Protocol):
    block_hash: bytes


class Assigned:
    """Everything in `__init__` and elsewhere, in the ways that assignments are written."""

    def __init__(self, other: Any) -> None:
        self.block_id, other.block_hash = 1, b""
        self.ref_cnt: int = 0
        self.names = [self.ref_cnt for _ in "ab"]

    def reset(self) -> None:
        self.late = 1

    @property
    def is_null(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0


class Hashed(Assigned):
    def __init__(self, other: Any) -> None:
        super().__init__(other)

        def inner() -> Any:
            return self

        self.block_hash = inner


class Slots:
    __slots__ = ("block_hash", "block_id", "ref_cnt")
    is_null = False
    reset = __len__ = None


@dataclasses.dataclass
class Record:
    block_id: int
    ref_cnt: int
    block_hash: bytes
    is_null: bool = False
    reset: Any = None

    def __len__(self) -> int:
        return 1


class Struct(msgspec.Struct):
    block_id: int
    ref_cnt: int
    block_hash: bytes
    is_null: bool = False
    reset: Any = None

    def __len__(self) -> int:
        return 1


class ShortStruct(msgspec.Struct):
    block_id: int
    ref_cnt: int
    is_null: bool = False
    reset: Any = None
    __len__ = None


class Row(NamedTuple):
    block_id: int
    ref_cnt: int
    block_hash: bytes
    is_null: bool
    reset: Any


def put_hash(block: Any) -> None:
    block.block_hash = b"" if block is not None else None


@pytest.fixture
def engine() -> Iterator[Any]:
    module: Any = types.ModuleType("an_engine")
    for item in (Assigned, Hashed, Slots, Record, Struct, ShortStruct, Row, put_hash):
        setattr(module, item.__name__, item)
    sys.modules["an_engine"] = module
    yield module
    del sys.modules["an_engine"]


def test_the_members_of_a_protocol_are_those_of_its_bases_without_ours() -> None:
    own = ["block_id", "ref_cnt", "is_null", "reset", "__len__"]
    assert members_of(Block) == own
    assert sorted(members_of(HashedBlock)) == sorted(["block_hash", *own])


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["Hashed", "Slots", "Record", "Struct", "Row"])
def test_an_attribute_is_found_however_a_class_comes_by_it(name: str) -> None:
    assert View(HashedBlock, f"an_engine:{name}").missing() == []


@pytest.mark.usefixtures("engine")
def test_what_a_method_puts_on_another_object_is_not_its_own() -> None:
    assert View(HashedBlock, "an_engine:Assigned").missing() == ["block_hash"]


@pytest.mark.usefixtures("engine")
def test_a_field_that_a_struct_does_not_have_is_missing() -> None:
    """The base class of structs has a descriptor where other classes list their fields."""
    assert View(HashedBlock, "an_engine:ShortStruct").missing() == ["block_hash"]


@pytest.mark.usefixtures("engine")
def test_another_function_may_be_named_that_puts_it_there() -> None:
    view = View(HashedBlock, "an_engine:Assigned", assigned_in=("an_engine:put_hash",))
    assert view.missing() == []


@pytest.mark.usefixtures("engine")
def test_every_attribute_is_a_line_of_the_probe_once() -> None:
    seams = [Seam("an_engine", "Assigned.reset", ("self",))]
    views = [View(HashedBlock, "an_engine:Assigned"), View(Block, "an_engine:Assigned")]
    found = dict(probe(seams, views))
    assert found.pop("an_engine.Assigned.block_hash") == "missing"
    assert found == dict.fromkeys(
        [f"an_engine.Assigned.{name}" for name in members_of(Block)], "ok"
    )
    assert len(probe(seams, views)) == 6


@pytest.mark.parametrize("target", ["an_engine:Gone", "no_engine:Block", "an_engine:put_hash"])
@pytest.mark.usefixtures("engine")
def test_a_class_that_is_not_there_is_one_line(target: str) -> None:
    assert probe_views([View(Block, target)]) == [(target.replace(":", "."), "missing")]
