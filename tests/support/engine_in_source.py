"""The source of a small engine, and a table of seams and views of it: every form there is."""

from typing import Protocol

from statecache.engine.seams import Seam, methods, replaced
from statecache.engine.views import View

FILES = {
    "__init__.py": "from .pool import Pool as Exported\nfrom .pool import *\n",
    "base.py": '''
import enum
import typing
from dataclasses import dataclass, field


class Kind(enum.Enum):
    FULL = 1
    STATE = enum.auto()


class Base:
    """What every pool has."""

    shared: int

    def __init__(self, blocks, *rest, limit=None, **more):
        self.blocks, self.rest = blocks, rest
        for self.at in ():
            pass
        later.of_another = 1

    def free(self, blocks, *, force=False): ...

    @property
    def size(self):
        return len(self.blocks)

    def _codes(self):
        self._private = [self for _ in ()]
        return lambda other: setattr(other, "x", 1)


class Row(typing.NamedTuple):
    node: int
    parent: int
    depth: int = 0


@dataclass
class Record:
    first: int
    made: list = field(default_factory=list)
    last: int = 0


@dataclass(kw_only=True)
class Longer(Record):
    only: str = ""


def put(block, value: "int") -> "tuple[int, str]":
    block.hashed = value
''',
    "pool.py": """
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec

from .base import Base, Kind, Record as Plain, Row
from . import base as where

if TYPE_CHECKING:
    class Never: ...

try:
    from nowhere_at_all import thing
except ImportError:
    def thing(one): ...


def wrapped(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call


class Pool(Base):
    __slots__ = ("slot",)
    KIND = Kind.STATE
    step: tuple[int, str, None]

    class Inner(msgspec.Struct, kw_only=True):
        token: int
        name: str = ""

    def touch(self, blocks): return self.queue.remove(blocks)

    release = touch

    @classmethod
    def make(cls, size): ...

    @staticmethod
    def of(size, /, kind): ...

    @wrapped
    def changed(self, blocks): ...

    def hits(self, request) -> tuple[list[int], int]: ...


Alias = Pool
""",
}


class PoolView(Protocol):
    blocks: object
    slot: int
    shared: int
    statecache_seen: bool

    @property
    def size(self) -> int:
        """How many."""

    def free(self, blocks: object) -> None:
        """Give back."""


class BlockView(Protocol):
    hashed: int
    token: int


class GoneView(Protocol):
    nothing: int
    of_another: int
    at: int
    queue: int
    _private: int


def table(package: str) -> tuple[list[Seam], list[View]]:
    pool, base = f"{package}.pool", f"{package}.base"
    seams = [
        Seam(pool, "Pool", ("blocks", "rest", "limit", "more"), base="Base"),
        Seam(pool, "Alias", public=("KIND", "Inner", "touch", "release", "make", "of", "hits")),
        *methods(
            pool,
            "Pool",
            {
                "touch": "blocks | blocks more",
                "release": "blocks | blocks more",
                "free": "blocks force",
            },
        ),
        Seam(pool, "Pool.make", ("cls", "size")),
        Seam(pool, "Pool.of", ("size", "kind")),
        Seam(pool, "Pool.changed", ("self", "blocks"), replaced=True),
        Seam(pool, "Pool.hits", ("self", "request"), items=2),
        Seam(pool, "Pool.step", items=3),
        Seam(pool, "Pool.touch", code=("queue", "remove"), replaced=True),
        Seam(pool, "Pool.free", replaced=True),
        Seam(pool, "Pool.Inner", ("token", "name"), fields=("name", "token")),
        Seam(pool, "Pool.KIND"),
        Seam(pool, "Kind.FULL"),
        Seam(pool, "where.put", ("block", "value"), items=2),
        Seam(pool, "thing", ("one",)),
        Seam(pool, "Never"),
        Seam(pool, "Plain", ("first", "made", "last")),
        Seam(base, "Longer", ("first", "made", "last", "only"), fields=("made", "only")),
        Seam(base, "Record.first"),
        Seam(base, "Record.made"),
        Seam(base, "Row", ("node", "parent", "depth"), fields=("node", "parent", "depth")),
        Seam(package, "Exported.size"),
        Seam(package, "Alias.touch", optional="the alias"),
        Seam(package, "base.Kind"),
        Seam(f"{package}.nowhere", "x"),
        *replaced(base, "Kind", {"FULL": "", "STATE": ""})[:1],
    ]
    views = [
        View(PoolView, f"{pool}:Pool"),
        View(BlockView, f"{pool}:Pool.Inner", assigned_in=(f"{base}:put",)),
        View(GoneView, f"{pool}:Pool"),
        View(GoneView, f"{base}:Gone", optional="nothing"),
    ]
    return seams, views
