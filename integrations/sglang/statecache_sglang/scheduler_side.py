"""The recurrent states of one tree as the index sees them, and the guard around the index.

A state is named by the id of the tree node that holds it. Node ids come from the engine and are
never used twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import ParamSpec, TypeVar

from statecache import StateIndex
from statecache.engine.metrics import Counts, Reporter
from statecache.engine.settings import Settings
from statecache.index.keyed_index import PrefixKeyedIndex

_log = logging.getLogger("statecache.sglang")
_P = ParamSpec("_P")
_T = TypeVar("_T")


class StateBook:
    """Resident states, what hangs directly below what, and the walk that picks victims.

    `below` answers which of some states sit under a node of the engine's tree. Locks stay the
    engine's: a walk asks about each proposal, so they cannot drift apart from the index.

    With a hierarchical cache a state may live on the host alone. A match can still restart from
    it, so it stays in the index as a shallower neighbour, pinned until it is back or gone.
    """

    def __init__(
        self,
        settings: Settings,
        below: Callable[[int, list[int]], list[int]],
        index: StateIndex | PrefixKeyedIndex | None = None,
    ) -> None:
        if index is None:
            index = StateIndex(settings.policy, settings.cost_model())
        self._index = index
        self._stamps_release = settings.policy != "lru"
        self._below = below
        self._parent: dict[int, int | None] = {}
        self._children: dict[int | None, dict[int, None]] = {None: {}}
        self._proposed: set[int] = set()
        self.walking = False
        self._host_only: set[int] = set()
        self.policy = settings.policy
        self.admission = settings.admission
        self.counts = Counts()
        self._walk_began = 0.0

    def put(self, state: int, depth: int, nearest_first: Iterable[int], *, is_leaf: bool) -> None:
        """A state was cached at `depth`; its ancestor nodes come nearest first.

        A node without children cannot have states below it, so none are looked for. Cached again
        or loaded back from the host is a use.
        """
        if state in self._host_only:
            self._host_only.discard(state)
            self._index.unpin(state)
            return
        if state in self._parent:
            self._index.touch(state)
            return
        parents = self._parent
        parent = next((node for node in nearest_first if node in parents), None)
        siblings = self._children[parent]
        children = [] if is_leaf or not siblings else self._below(state, list(siblings))
        self._index.insert(state, depth, parent, children)
        parents[state] = parent
        siblings[state] = None
        below = self._children[state] = {}
        for child in children:
            parents[child] = state
            del siblings[child]
            below[child] = None

    def use(self, state: int) -> bool:
        """A match ended at this node; return whether it holds a state."""
        if state not in self._parent:
            return False
        self._index.touch(state)
        return True

    def released(self, state: int) -> None:
        """The last request holding this node let go. SGLang's own order does not count that."""
        if self._stamps_release and state in self._parent:
            self._index.touch(state)

    def gone(self, state: int) -> None:
        """The engine dropped the state of this node: the open walk's proposal, or by itself."""
        if state not in self._parent:
            return
        if state in self._proposed:
            self._index.evicted(state)
            self._proposed.discard(state)
            self.counts.add("evictions|policy")
        else:
            self._index.erase(state)
            self.counts.add("evictions|engine")
        self._host_only.discard(state)
        parent = self._parent.pop(state)
        siblings = self._children[parent]
        del siblings[state]
        for child in self._children.pop(state):
            self._parent[child] = parent
            siblings[child] = None

    def left_device(self, state: int, depth: int) -> None:
        """The engine dropped the device copy of the state of this node; the host copy stays."""
        if state not in self._parent or state in self._host_only:
            return
        if state in self._proposed:
            self._index.evicted(state)
            self._proposed.discard(state)
            self._index.insert(state, depth, self._parent[state], list(self._children[state]))
        self.counts.add("evictions|to_host")
        self._index.pin(state)
        self._host_only.add(state)

    def begin_walk(self) -> None:
        """Start one eviction pass."""
        self._walk_began = time.perf_counter()
        self._index.begin_walk()
        self.walking = True
        self._proposed.clear()

    def propose(self, is_locked: Callable[[int], bool]) -> int | None:
        """Return the cheapest state that is not locked and was not proposed in this walk."""
        while (state := self._index.next_victim()) is not None:
            if not is_locked(state):
                self._proposed.add(state)
                return state
        return None

    def end_walk(self) -> None:
        """End the pass; proposals the engine did not act on stay as they were."""
        self._proposed.clear()
        self.walking = False
        self._index.end_walk()
        self.counts.walked(time.perf_counter() - self._walk_began)

    def next_below(self, state: int) -> int | None:
        """Return a device state below `state` with no other one in between, if there is one."""
        waiting = list(self._children[state])
        while waiting:
            found = waiting.pop(0)
            if found not in self._host_only:
                return found
            waiting += self._children[found]
        return None

    def above(self, state: int) -> list[int]:
        """Return the shallower device states on the path of `state`, deepest first."""
        found = []
        at = self._parent[state]
        while at is not None:
            if at not in self._host_only:
                found.append(at)
            at = self._parent[at]
        return found

    def states(self) -> Sequence[int]:
        """Return every state on the device, oldest first."""
        return tuple(state for state in self._parent if state not in self._host_only)

    def on_host_alone(self) -> Set[int]:
        """Return the states that live on the host alone."""
        return self._host_only

    def __contains__(self, state: int) -> bool:
        return state in self._parent

    def __len__(self) -> int:
        """How many states are on the device."""
        return len(self._parent) - len(self._host_only)

    def priority(self, state: int) -> float:
        """Return the priority the index gives to `state`."""
        return self._index.priority(state)

    def sample(self) -> dict[str, float]:
        """Return what the policy itself has for the metrics."""
        return {}

    @property
    def watermark(self) -> float:
        """The clock of the index."""
        return self._index.watermark

    def check(self) -> None:
        """Verify the index and that both sides know the same tree; raise `RuntimeError`."""
        self._index.check()
        if len(self._index) != len(self._parent):
            raise RuntimeError(f"{len(self._index)} states indexed, {len(self._parent)} known")
        listed = {c: p for p, children in self._children.items() for c in children}
        if listed != self._parent:
            raise RuntimeError("children and parents of the states disagree")


class BackupLocks:
    """Nodes that a write-through to the host keeps locked.

    SGLang locks them as a request does, but a copy that was made is no use of the state.
    """

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._made: int | None = None

    def begin(self, node: int) -> None:
        """A write-through locked this node."""
        self._running.add(node)

    def end(self, node: int) -> None:
        """The write-through of this node is through: the next release of it is its own."""
        if node in self._running:
            self._running.discard(node)
            self._made = node

    def last_request_left(self, node: int, locks: int) -> bool:
        """Whether a release that left so many locks was the last request's."""
        if node == self._made:
            self._made = None
            return False
        return locks == (node in self._running)


class Advisor:
    """The one guarded way to a `StateBook`.

    Advice must never take a server down: an unexpected error is counted, logged once, and ends
    the plugin's part. From then on `active` is False and the engine's own walk decides.
    """

    def __init__(self, new_book: Callable[[], StateBook]) -> None:
        self._new_book = new_book
        self.book = new_book()
        self.active = True
        self.anomalies = 0
        self.reporter: Reporter | None = None

    @property
    def counts(self) -> Counts:
        """What happened since the start, over every tree there was."""
        return self.book.counts

    def reset(self) -> None:
        """Start over with an empty tree."""
        counts = self.counts
        if len(self.book):
            counts.add("evictions|reset", len(self.book))
        self.book = self._new_book()
        self.book.counts = counts
        self.active = True

    def ask(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Return what `call` returns, or None once the engine decides by itself."""
        if not self.active:
            return None
        try:
            return call(*args, **kwargs)
        except Exception:
            self.active = False
            self._count("the state index failed; SGLang's own order takes over", traceback=True)
            return None

    def give_up(self, what: str) -> None:
        """Count something that must not happen, and let the engine decide from now on."""
        self.active = False
        self._count(f"{what}; SGLang's own order takes over", traceback=False)

    def anomaly(self, what: str) -> None:
        """Count something that must not happen; log the first one."""
        self._count(what, traceback=False)

    def _count(self, what: str, *, traceback: bool) -> None:
        self.anomalies += 1
        if self.anomalies == 1:
            _log.error("statecache: %s", what, exc_info=traceback)
