"""Which state is in which slot of the checkpoint pool, as the scheduler sees it.

A slot is pinned, and not given away, until its store is known to be good: an exact copy when the
next step is planned, another once the workers have confirmed it, a step or more later, and until
then that is not restored. In one step workers restore first and store last: a slot that is restored
may be given to another state in the same step, and an exact copy is there from the next step on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from statecache.checkpoint.proof import Prefix
from statecache.engine.metric_table import MetricKey
from statecache.engine.metrics import EventCounters
from statecache.engine.settings import Settings
from statecache_vllm.state_tree import Hash, StateTree

__all__ = ["CheckpointCopy", "CheckpointCounts", "CheckpointManager"]


class CheckpointCopy(NamedTuple):
    """One state between a slot and its blocks, one in each group of recurrent layers.

    `prefix` is that of the request the state is stored for, or restored to.
    """

    state: int
    slot: int
    blocks: tuple[int, ...]
    prefix: Prefix


@dataclasses.dataclass
class CheckpointCounts:
    """What became of checkpoints since the start."""

    stored: int = 0
    restored: int = 0
    evicted: int = 0
    refused: int = 0
    worthless: int = 0
    skipped: int = 0


class CheckpointManager:
    """Slots and the states in them.

    `on_change(hash, resident)` is called for each state that gets a slot or loses it. `exact` says
    that no store is refused.
    """

    def __init__(
        self,
        settings: Settings,
        slots: int,
        block_tokens: int,
        on_change: Callable[[Hash, bool], None],
        *,
        exact: bool = False,
    ) -> None:
        self.tree = StateTree(settings, block_tokens, slots)
        self.slots = slots
        self.counts = CheckpointCounts()
        self.events = EventCounters()
        self._on_change = on_change
        self._exact = exact
        self._slot: dict[int, int] = {}
        self._pending: set[int] = set()
        self._free: list[int] = list(range(slots - 1, -1, -1))

    def clear(self) -> None:
        """Forget every state: the weights may have changed."""
        if self._slot:
            self.events.add(MetricKey.EVICTIONS.of("reset"), len(self._slot))
        for state in list(self._slot):
            self._on_change(self.tree.hash_of(state), False)
        self.tree.clear()
        self._slot.clear()
        self._pending.clear()
        self._free = list(range(self.slots - 1, -1, -1))

    def begin_step(self) -> None:
        """Another step is planned: the exact copies of the one before are there."""
        if self._exact:
            self.complete_store(sorted(self._pending), ())

    def prepare_store(
        self, path: Sequence[Hash], *, end: bool = True, between: bool = False
    ) -> tuple[int, int] | None:
        """A state was committed at the end of `path`: return its number and the slot to store to.

        `end` says that this is the end of a prompt, `between` that it is one of its interval
        states: such a one never takes the slot of the only state its prompt has.

        None when it is in a slot already, or every slot is waiting for its store.
        """
        known = self.tree.find(path[-1])
        if known is not None:
            self.tree.put(path, end=end)
            return None
        if not self._free and not self._evict(path if between else ()):
            self.counts.skipped += 1
            self.events.add(MetricKey.SKIPS.of("not_cached"))
            return None
        state = self.tree.put(path, end=end)
        slot = self._slot[state] = self._free.pop()
        self.tree.pin(state)
        self._pending.add(state)
        self._on_change(path[-1], True)
        return state, slot

    @property
    def pinned(self) -> int:
        """How many states wait for their store."""
        return len(self._pending)

    def _evict(self, sparing: Sequence[Hash] = ()) -> bool:
        """Make room, but not by the only state on the path `sparing`."""
        began = time.perf_counter()
        victim = self.tree.peek()
        if victim is None or (sparing and [victim] == list(self.tree.on(sparing))):
            return False
        self._on_change(self.tree.hash_of(victim), False)
        self.tree.evict()
        self._free.append(self._slot.pop(victim))
        self.counts.evicted += 1
        self.events.add(MetricKey.EVICTIONS.of("policy"))
        self.events.walked(time.perf_counter() - began)
        return True

    def complete_store(self, states: Iterable[int], refused: Iterable[int]) -> None:
        """The workers have stored these states, except those refused (NaN or Inf).

        One worker may refuse a state before the others have told of it: it is dropped at once.
        """
        bad = set(refused)
        for state in dict.fromkeys((*states, *bad)):
            if state not in self._pending:
                continue  # dropped in the meantime
            if state in bad:
                self.counts.refused += 1
                self.events.add(MetricKey.SKIPS.of("not_finite"))
                self._drop(state)
            else:
                self.counts.stored += 1
                self._pending.discard(state)
                self.tree.unpin(state)

    def lookup(self, path: Sequence[Hash], above: int) -> tuple[int, int] | None:
        """Return the deepest good state on `path` deeper than `above` blocks, and its slot."""
        for state in self.states_on(path, above):
            if self._exact or state not in self._pending:
                return state, self._slot[state]
        return None

    def expected(self, path: Sequence[Hash], above: int) -> int | None:
        """Return the deepest state on `path` deeper than `above` if it waits for its report."""
        deepest = next(self.states_on(path, above), None)
        return deepest if deepest in self._pending and not self._exact else None

    def states_on(self, path: Sequence[Hash], above: int) -> Iterator[int]:
        """Yield the states on `path` deeper than `above` blocks, the deepest one first."""
        return takewhile(lambda state: self.tree.depth_of(state) > above, self.tree.on(path))

    def restored(self, state: int) -> None:
        """A request resumes from `state`."""
        self.counts.restored += 1
        self.tree.use(state)

    def drop_below(self, block_hash: Hash) -> None:
        """The KV of a block has left the cache: no state at or below it can be used."""
        for state in reversed(self.tree.depending_on(block_hash)):
            self.counts.worthless += 1
            self.events.add(MetricKey.EVICTIONS.of("kv_gone"))
            self._drop(state)
        self.tree.lost(block_hash)

    def _drop(self, state: int) -> None:
        self._on_change(self.tree.hash_of(state), False)
        self.tree.erase(state)
        self._pending.discard(state)
        self._free.append(self._slot.pop(state))

    def __len__(self) -> int:
        return len(self._slot)

    def check(self) -> None:
        """Verify that every slot is free or holds one state; raise `RuntimeError`."""
        self.tree.check()
        if set(self._slot) != set(self.tree_states()):
            raise RuntimeError("slots and states disagree")
        used = [*self._slot.values(), *self._free]
        if sorted(used) != list(range(self.slots)):
            raise RuntimeError("a slot was lost or given twice")

    def tree_states(self) -> list[int]:
        """Return the states that have a slot and are in the tree."""
        return [state for state in self._slot if state in self.tree]
