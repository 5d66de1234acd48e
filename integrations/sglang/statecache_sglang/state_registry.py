"""The recurrent states of one tree as the index sees them.

A state is named by the id of the tree node that holds it. Node ids come from the engine and are
never used twice.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set

from statecache.engine.metrics import EventCounters, MetricKey, learned_numbers
from statecache.engine.settings import Settings
from statecache.index.interface import EvictionIndex
from statecache.index.keyed_index import GHOSTS, PrefixKey, PrefixKeyedIndex, TokenPrefixes
from statecache.index.policies import find_policy, make_index

__all__ = ["StateRegistry"]

# As plain texts: a member of an enum takes longer to find than to count.
_EVICTED_BY_POLICY = MetricKey.EVICTIONS.of("policy")
_EVICTED_BY_ENGINE = MetricKey.EVICTIONS.of("engine")
_EVICTED_TO_HOST = MetricKey.EVICTIONS.of("to_host")
_EVICTED_BY_RESET = MetricKey.EVICTIONS.of("reset")


class StateRegistry:
    """Resident states, what hangs directly below what, and the walk that picks victims.

    `find_below` answers which of some states sit under a node of the engine's tree; `slots` is how
    many states there can be. Locks stay the engine's: a walk asks about each proposal, so they
    cannot drift apart from the index.

    With a hierarchical cache a state may live on the host alone. A match can still restart from
    it, so it stays in the index as a shallower neighbour, pinned until it is back or dropped.

    What a policy does not need is not done: `needs_prompts` says whether it has to know of prompts,
    and of states by the keys of their prefixes.
    """

    def __init__(
        self,
        settings: Settings,
        find_below: Callable[[int, list[int]], list[int]],
        slots: int,
    ) -> None:
        self._settings = settings
        self._find_below = find_below
        self._slots = slots
        self.policy = settings.policy
        self.needs_prompts = find_policy(self.policy).needs_prompts
        # A scheduler matches a waiting request again and again. A policy that is told of prompts
        # counts the admission instead, once; its states are stamped at their release.
        self.matches_are_uses = not self.needs_prompts
        self.releases_are_uses = not self.needs_prompts and self.policy != "lru"
        self.admits_branch_points = settings.admission == "branch-points"
        self.counts = EventCounters()
        self._start_over()

    def _start_over(self) -> None:
        cost = self._settings.cost_model()
        self._keyed = (
            PrefixKeyedIndex(self.policy, cost, self._slots) if self.needs_prompts else None
        )
        self._prefixes = TokenPrefixes(4 * (GHOSTS + self._slots))
        self._index: EvictionIndex | PrefixKeyedIndex = (
            make_index(self.policy, cost) if self._keyed is None else self._keyed
        )
        self._parent: dict[int, int | None] = {}
        self._children: dict[int | None, dict[int, None]] = {None: {}}
        self._proposed: set[int] = set()
        self._walking = False
        self._walk_began = 0.0
        self._host_only: set[int] = set()
        self._condemned: dict[int, None] = {}
        self._spares: dict[int, None] = {}  # oldest first
        self._offered: set[int] = set()  # spares that the open walk proposed

    def reset(self) -> None:
        """Start over with an empty tree; what was counted stays."""
        if len(self):
            self.counts.add(_EVICTED_BY_RESET, len(self))
        self._start_over()

    # What happens to states.

    def set_prefix(self, state: int, prefix: PrefixKey, *, end: bool) -> None:
        """A state is put next: it ends this prefix, maybe a prompt."""
        if self._keyed is not None:
            self._keyed.name(state, self._prefixes.note_key(prefix), end=end)

    def put(
        self,
        state: int,
        depth: int,
        nearest_first: Iterable[int],
        *,
        is_leaf: bool,
        spare: bool = False,
    ) -> None:
        """A state was cached at `depth`; its ancestor nodes come nearest first.

        A `spare` one is the first to go, until it is resumed from or cached as another kind.

        A node without children cannot have states below it, so none are looked for. Cached again
        or loaded back from the host is a use.
        """
        if not spare:
            self._spares.pop(state, None)
        if state in self._host_only:
            self._host_only.discard(state)
            self._index.unpin(state)
            return
        if state in self._parent:
            self._index.touch(state)
            return
        if spare:
            self._spares[state] = None
        parents = self._parent
        parent = next((node for node in nearest_first if node in parents), None)
        siblings = self._children[parent]
        children = [] if is_leaf or not siblings else self._find_below(state, list(siblings))
        self._index.insert(state, depth, parent, children)
        parents[state] = parent
        siblings[state] = None
        below = self._children[state] = {}
        for child in children:
            parents[child] = state
            del siblings[child]
            below[child] = None

    def resumed(self, state: int) -> None:
        """A request was admitted that resumes at this node, if that holds a state."""
        self._spares.pop(state, None)

    def on_match(self, state: int) -> bool:
        """A match ended at this node; return whether it holds a state."""
        if state not in self._parent:
            return False
        if self.matches_are_uses:
            self._index.touch(state)
        return True

    def on_prompt(
        self, tokens: Sequence[int], namespace: bytes, hit: int, offered: Sequence[int]
    ) -> None:
        """A request was admitted that resumes at the node `hit`, if that holds a state.

        States will be offered after the first `offered` tokens, if they lie beyond its hit.
        """
        self.resumed(hit)
        if self._keyed is None:
            return
        keys, depths, admitted = self._prefixes.path(tokens, namespace, offered)
        # The last token of a prompt is always computed.
        resumable = bisect_right(depths, len(tokens) - 1)
        self._keyed.on_prompt(keys, depths, resumable, admitted)
        if hit in self:
            self._keyed.touch(hit)

    def on_release(self, state: int) -> None:
        """The last request holding this node let go. SGLang's own order does not count that."""
        if state not in self._parent:
            return
        if self.releases_are_uses:
            self._index.touch(state)
        elif self._keyed is not None:
            self._keyed.stamp(state)

    def drop(self, state: int) -> None:
        """The engine dropped the state of this node: the open walk's proposal, or by itself."""
        if state not in self._parent:
            return
        if state in self._proposed:
            self._index.evicted(state)
            self._proposed.discard(state)
            self.counts.add(_EVICTED_BY_POLICY)
        else:
            self._index.erase(state)
            offered = state in self._offered
            self.counts.add(_EVICTED_BY_POLICY if offered else _EVICTED_BY_ENGINE)
        self._spares.pop(state, None)
        self._host_only.discard(state)
        self._condemned.pop(state, None)
        parent = self._parent.pop(state)
        siblings = self._children[parent]
        del siblings[state]
        for child in self._children.pop(state):
            self._parent[child] = parent
            siblings[child] = None

    def move_to_host(self, state: int, depth: int) -> None:
        """The engine dropped the device copy of the state of this node; the host copy stays."""
        if state not in self._parent or state in self._host_only:
            return
        if state in self._proposed:
            self._index.evicted(state)
            self._proposed.discard(state)
            self._index.insert(state, depth, self._parent[state], list(self._children[state]))
        self._spares.pop(state, None)
        self.counts.add(_EVICTED_TO_HOST)
        self._index.pin(state)
        self._host_only.add(state)

    def drop_node(self, node: int) -> None:
        """SGLang removed a node for want of KV, whose state, if it had one, was dropped before."""
        if self._keyed is not None and not self._walking:
            self._keyed.lost(node)

    # The walk.

    def begin_walk(self) -> None:
        """Start one eviction pass."""
        self._walk_began = time.perf_counter()
        self._index.begin_walk()
        self._walking = True
        self._proposed.clear()
        self._offered.clear()

    def condemn(self, state: int) -> bool:
        """The state of this node must go: it goes before all others; False if there is none."""
        if state not in self:
            return False
        self._condemned[state] = None
        return True

    def has_condemned(self, is_locked: Callable[[int], bool]) -> bool:
        """Whether a condemned state can go now."""
        return any(self._can_go(state, is_locked) for state in self._condemned)

    def _can_go(self, state: int, is_locked: Callable[[int], bool]) -> bool:
        return state not in self._host_only and not is_locked(state)

    def next_victim(self, is_locked: Callable[[int], bool]) -> int | None:
        """Return a state that is not locked and was not proposed in this walk.

        One that was condemned, then the oldest spare one; the clock does not move for them. With
        none left the cheapest.
        """
        for condemned in self._condemned:
            if self._can_go(condemned, is_locked):
                del self._condemned[condemned]
                return condemned
        for spare in self._spares:
            if spare not in self._offered and not is_locked(spare):
                self._offered.add(spare)
                return spare
        while (state := self._index.next_victim()) is not None:
            if state not in self._spares and not is_locked(state):
                self._proposed.add(state)
                return state
        return None

    def end_walk(self) -> None:
        """End the pass; proposals the engine did not act on stay as they were."""
        self._proposed.clear()
        self._offered.clear()
        self._walking = False
        self._index.end_walk()
        self.counts.walked(time.perf_counter() - self._walk_began)

    # What is there.

    def has_spare(self, is_locked: Callable[[int], bool]) -> bool:
        """Whether there is a spare state that is not locked."""
        return not all(is_locked(state) for state in self._spares)

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

    def host_only(self) -> Set[int]:
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
        if self._keyed is None:
            return {}
        return learned_numbers(self._keyed.index, len(self._prefixes))

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
        if not self._spares.keys() <= self._parent.keys() - self._host_only:
            raise RuntimeError("spare states that are not on the device")
