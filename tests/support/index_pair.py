"""Drives the native index and the plain-Python reference side by side."""

import random
from collections.abc import Callable, Sequence

from statecache import CostModel, ReferenceCost, ReferenceIndex, StateIndex
from statecache.index.tips_reference import TipsReference

# Few distinct depths make equal priorities common, so that the tie rule is exercised.
DEPTHS = (*range(64), 100, 8_192, 8_193, 65_536, 2**31 - 1)
COSTS = ((1.862e-5, 3.33e-6), (1.0, 0.0), (0.0, 1.0), (0.1, 1e-9))


class Pair:
    """Both indexes; every call is made on both and must give the same result or error type."""

    def __init__(self, policy: str, cost: tuple[float, float]) -> None:
        self.native = StateIndex(policy, CostModel(*cost))
        plain = ReferenceCost(*cost)
        self.reference = (
            TipsReference(plain) if policy == "gds-tips" else ReferenceIndex(policy, plain)
        )
        self.events = 0

    def call(self, name: str, *args: object) -> object:
        self.events += 1
        native = _outcome(getattr(self.native, name), args)
        reference = _outcome(getattr(self.reference, name), args)
        assert native == reference, f"event {self.events}: {name}{args}"
        assert self.native.watermark == self.reference.watermark
        return native

    def check(self) -> None:
        self.native.check()
        self.reference.check()
        assert len(self.native) == len(self.reference)
        for state in self.reference._states:
            assert state in self.native
            assert self.native.priority(state) == self.reference.priority(state)

    # What the driver has to know to make sensible calls, read from the reference.

    @property
    def resident(self) -> list[int]:
        return list(self.reference._states)

    @property
    def walking(self) -> bool:
        return self.reference._proposed is not None

    @property
    def open_proposals(self) -> list[int]:
        proposed = self.reference._proposed or []
        states = self.reference._states
        return [s.id for s in proposed if states.get(s.id) is s]

    @property
    def pinned(self) -> list[int]:
        return [s.id for s in self.reference._states.values() if s.pins]

    def depth(self, state: int) -> int:
        return self.reference._states[state].depth

    def children_of(self, parent: int | None) -> list[int]:
        states = self.reference._states.values()
        return [s.id for s in states if (s.parent.id if s.parent else None) == parent]


def _outcome(call: Callable[..., object], args: Sequence[object]) -> object:
    try:
        return call(*args)
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        return type(error)


def insert_anywhere(pair: Pair, rng: random.Random, state: int) -> None:
    """Insert `state` at a random point of the tree: a leaf, or in the middle of chains."""
    parent = rng.choice(pair.resident) if pair.resident and rng.random() < 0.8 else None
    least = pair.depth(parent) + 1 if parent is not None else 0
    depth = min(rng.choice(DEPTHS) if rng.random() < 0.5 else least + rng.randrange(8), 2**31 - 1)
    below = [c for c in pair.children_of(parent) if pair.depth(c) > depth]
    if rng.random() < 0.5:
        below = rng.sample(below, rng.randint(0, len(below)))
    if pair.resident and rng.random() < 0.03:  # twice, or from elsewhere
        below.append(rng.choice(pair.resident))
    pair.call("insert", state, depth, parent, below)


def random_event(pair: Pair, rng: random.Random, states: int) -> None:
    """Make one random call on about `states` states; about one call in ten is wrong."""
    resident = pair.resident
    any_id = rng.randrange(2 * states)
    known = rng.choice(resident) if resident and rng.random() < 0.96 else any_id
    roll = rng.random() * (1.0 if len(resident) < states else 0.5)
    if roll >= 0.72:
        absent = (
            any_id if any_id not in pair.native or rng.random() < 0.1 else 1_000_000 + pair.events
        )
        insert_anywhere(pair, rng, absent)
    elif roll < 0.05:
        pair.call("erase", known)
    elif roll < 0.12:
        pair.call("pin", known)
    elif roll < 0.22:
        pinned = pair.pinned
        pair.call("unpin", rng.choice(pinned) if pinned and rng.random() < 0.96 else known)
    elif roll < 0.50 and not pair.walking:
        pair.call("evict", rng.randrange(-1 if rng.random() < 0.02 else 0, 3))
        if rng.random() < 0.3:
            pair.call("begin_walk")
    elif roll < 0.34:
        pair.call("next_victim")
    elif roll < 0.44:
        proposals = pair.open_proposals
        pair.call("evicted", rng.choice(proposals) if rng.random() < 0.96 and proposals else known)
    elif roll < 0.48:
        pair.call("end_walk")
    elif roll < 0.50:
        pair.call("begin_walk")
    else:
        pair.call("touch", known)
