"""Drives `learned` and its plain form side by side on prompts of a random tree of points."""

import random
from collections.abc import Callable

from statecache import CostModel, LearnedReference, ReferenceCost, StateIndex

BLOCK = 512


class LearnedPair:
    """Both indexes; every call is made on both and must give the same result or error type."""

    def __init__(
        self, slots: int | None, ghosts: int, cost: tuple[float, float] = (1.862e-5, 3.33e-6)
    ) -> None:
        self.native = StateIndex("learned", CostModel(*cost), slots, ghosts)
        self.reference = LearnedReference(ReferenceCost(*cost), slots, ghosts)
        self.events = 0
        self.victims = 0
        self.orders: set[str] = set()

    def call(self, name: str, *args: object, **more: object) -> object:
        self.events += 1
        native = _outcome(getattr(self.native, name), args, more)
        reference = _outcome(getattr(self.reference, name), args, more)
        assert native == reference, f"event {self.events}: {name}{args}{more}"
        assert self.native.watermark == self.reference.watermark
        assert self.native.order == self.reference.order
        self.orders.add(self.native.order)
        if name == "evict" and isinstance(native, list):
            self.victims += len(native)
        return native

    def check(self) -> None:
        self.native.check()
        self.reference.check()
        assert len(self.native) == len(self.reference)
        assert self.native.ghosts == self.reference.ghosts
        assert self.native.points == self.reference.points
        for state, (rank, _) in self.reference._values().items():
            assert self.native.rank(state) == rank


def _outcome(call: Callable[..., object], args: tuple[object, ...], more: dict) -> object:
    try:
        return call(*args, **more)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        return type(error)


class PromptTree:
    """Points with keys and depths; some hang directly below others, some far below."""

    def __init__(self, rng: random.Random, points: int, branching: float) -> None:
        self.depth: dict[int, int] = {}
        self.above: dict[int, int | None] = {}
        self._rng = rng
        self._branching = branching
        self._next = 1
        for _ in range(points):
            self.grow()

    def grow(self) -> None:
        """Add a point, below the latest ones more often than not."""
        rng, known = self._rng, list(self.depth)
        above = None
        if known and rng.random() < 0.95:
            above = rng.choice(known if rng.random() < self._branching else known[-6:])
        key = self._next * 7919 % 1_000_003  # no order in the keys
        self._next += 1
        self.above[key] = above
        self.depth[key] = (self.depth[above] if above else 0) + BLOCK * rng.choice((1, 2, 3, 20))

    def prune(self, size: int) -> None:
        """Forget the oldest leaves beyond `size` points: no prompt names them again."""
        while len(self.depth) > size:
            inner = set(self.above.values())
            leaf = next(key for key in self.depth if key not in inner)
            del self.depth[leaf], self.above[leaf]

    def path(self, key: int) -> list[int]:
        path = [key]
        while (above := self.above[path[-1]]) is not None:
            path.append(above)
        return path[::-1]


def serve_prompt(pair: LearnedPair, tree: PromptTree, rng: random.Random, slots: int) -> None:
    """Look a prompt up, resume, and set the states beyond, as the replay does."""
    keys = list(tree.depth)
    tip = rng.choice(keys[-12:] if rng.random() < 0.5 else keys)
    path = tree.path(tip)
    depths = [tree.depth[key] for key in path]
    resumable = rng.randint(0, len(path)) if rng.random() < 0.1 else len(path) - 1
    admitted = [key for key in path[:-1] if rng.random() < 0.7] + [tip]
    offered = path
    if rng.random() < 0.05:  # not all of them
        offered = [key for key in path if key in admitted or rng.random() < 0.5]
        depths = [tree.depth[key] for key in offered]
        resumable = min(resumable, len(offered))
    pair.call("on_prompt", offered, depths, resumable, admitted)
    hit = next((key for key in reversed(offered[:resumable]) if key in pair.native), None)
    if hit is not None:
        pair.call("touch", hit)
        pair.call("pin", hit)
    if rng.random() < 0.03:
        gone = [key for key in keys if key not in path]
        pair.call("drop", rng.sample(gone, min(len(gone), rng.randint(0, 3))))
    for key in admitted:
        if hit is not None and tree.depth[key] <= tree.depth[hit]:
            continue
        if key in pair.native:
            pair.call("touch", key, end=key == tip)
            continue
        if len(pair.native) >= slots and not pair.call("evict", 1):
            continue
        insert(pair, tree, key, end=key == tip)
    if hit is not None and hit in pair.native:
        pair.call("unpin", hit)


def insert(pair: LearnedPair, tree: PromptTree, key: int, *, end: bool) -> None:
    """Insert a state where the tree puts it among the resident ones."""
    above = next((k for k in tree.path(key)[-2::-1] if k in pair.native), None)
    states = pair.reference._states
    siblings = [s.id for s in states.values() if (s.parent.id if s.parent else None) == above]
    below = [s for s in siblings if s in tree.depth and key in tree.path(s)]
    pair.call("insert", key, tree.depth[key], above, below, end=end)


def disturb(pair: LearnedPair, tree: PromptTree, rng: random.Random) -> None:
    """Make one call that no prompt makes: of an engine, or a wrong one."""
    resident = list(pair.reference._states)
    known = rng.choice(resident) if resident and rng.random() < 0.95 else 5
    roll = rng.random()
    if roll < 0.2:
        pair.call("touch", known, end=rng.random() < 0.3)
    elif roll < 0.3:
        pair.call("erase", known)
    elif roll < 0.4:
        pair.call("drop", [known, rng.choice(list(tree.depth))])
    elif roll < 0.5:
        pair.call("pin", known)
        if rng.random() < 0.9:
            pair.call("unpin", known)
    elif roll < 0.6:
        pinned = [s.id for s in pair.reference._states.values() if s.pins]
        pair.call("unpin", rng.choice(pinned) if pinned else known)
    elif roll < 0.8:
        pair.call("begin_walk")
        proposed = [pair.call("next_victim") for _ in range(rng.randint(1, 4))]
        for victim in proposed:
            if victim is not None and rng.random() < 0.5:
                pair.call("evicted", victim)
        pair.call("end_walk")
    elif roll < 0.9:
        tip = rng.choice(list(tree.depth))
        path = tree.path(tip)
        depths = [tree.depth[key] + rng.choice((0, 0, 0, 1)) for key in path]
        admitted = rng.sample(path, rng.randint(0, len(path)))
        pair.call("on_prompt", path, depths, rng.randint(-1, len(path) + 1), admitted)
    else:
        key = rng.choice(list(tree.depth))
        pair.call("insert", key, tree.depth[key] + rng.choice((0, 0, 0, 512)), None, ())
