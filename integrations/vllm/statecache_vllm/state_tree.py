"""Which states are resident, on which paths, and which of them is the cheapest to lose.

A path is the sequence of block hashes of a request, one for each block; a block hash stands for all
tokens up to its end, with cache salt, adapter and multimodal inputs in it. A state is named by the
hash at its end. Between two states only the hashes of the blocks in between are kept, so that the
tree is no larger than what it describes.
"""

from __future__ import annotations

from collections.abc import Sequence

from statecache import StateIndex
from statecache.settings import Settings

__all__ = ["StateTree"]

Hash = bytes


class _State:
    __slots__ = ("children", "depth", "parent", "segment")

    def __init__(self, depth: int, parent: int | None, segment: tuple[Hash, ...]) -> None:
        self.depth = depth
        self.parent = parent
        self.segment = segment  # hashes below the parent, this state's own last
        self.children: dict[int, None] = {}


class StateTree:
    """Resident states as the index sees them. Depths are blocks here, tokens in the index."""

    def __init__(self, settings: Settings, block_tokens: int) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._last = 0
        self.clear()

    def clear(self) -> None:
        """Forget every state. Numbers are never used twice."""
        self._index = StateIndex(self._settings.policy, self._settings.cost_model())
        self._states: dict[int, _State] = {}
        self._at: dict[Hash, int] = {}
        self._through: dict[Hash, dict[int, None]] = {}  # states whose segment holds a hash

    @property
    def index(self) -> StateIndex:
        """The index. Who evicts from it without this tree calls `dropped`; not after `clear`."""
        return self._index

    def find(self, block_hash: Hash) -> int | None:
        """Return the state that ends with this block, if there is one."""
        return self._at.get(block_hash)

    def hash_of(self, state: int) -> Hash:
        """Return the hash at the end of `state`."""
        return self._states[state].segment[-1]

    def put(self, path: Sequence[Hash]) -> int:
        """A state was set at the end of `path`; set again is a use. Returns its number."""
        own, depth = path[-1], len(path)
        found = self._at.get(own)
        if found is not None:
            self._index.touch(found)
            return found
        above = next((at for at in range(depth - 1, 0, -1) if path[at - 1] in self._at), 0)
        parent = self._at[path[above - 1]] if above else None
        below = list(self._through.get(own, ()))
        self._last += 1
        state = self._last
        self._index.insert(state, depth * self._block_tokens, parent, below)
        made = self._states[state] = _State(depth, parent, tuple(path[above:]))
        self._at[own] = state
        for child in below:
            self._hang(child, state, depth - above)
        if parent is not None:
            self._states[parent].children[state] = None
        for block_hash in made.segment:
            self._through.setdefault(block_hash, {})[state] = None
        return state

    def _hang(self, child: int, state: int, cut: int) -> None:
        record = self._states[child]
        if record.parent is not None:
            del self._states[record.parent].children[child]
        for block_hash in record.segment[:cut]:
            del self._through[block_hash][child]
        record.parent = state
        record.segment = record.segment[cut:]
        self._states[state].children[child] = None

    def use(self, state: int) -> None:
        """`state` was restored or hit."""
        self._index.touch(state)

    def pin(self, state: int) -> None:
        """Keep `state` from being evicted."""
        self._index.pin(state)

    def unpin(self, state: int) -> None:
        """Undo one `pin`."""
        self._index.unpin(state)

    def peek(self) -> int | None:
        """Return the state that `evict` would take."""
        self._index.begin_walk()
        victim = self._index.next_victim()
        self._index.end_walk()
        return victim

    def evict(self) -> int | None:
        """Drop the cheapest state that is not pinned; return it, or None when all are."""
        gone = self._index.evict(1)
        if not gone:
            return None
        self.dropped(gone[0])
        return gone[0]

    def erase(self, state: int) -> None:
        """Drop `state`, pinned or not."""
        self._index.erase(state)
        self.dropped(state)

    def depending_on(self, block_hash: Hash) -> list[int]:
        """Return the states that are worth nothing without this block, deepest branches last."""
        found = list(self._through.get(block_hash, ()))
        for state in found:
            found.extend(self._states[state].children)
        return found

    def dropped(self, state: int) -> None:
        """The index knows `state` no longer: its children hang below its parent."""
        record = self._states.pop(state)
        del self._at[record.segment[-1]]
        for block_hash in record.segment:
            through = self._through[block_hash]
            del through[state]
            through.update(record.children)
            if not through:
                del self._through[block_hash]
        if record.parent is not None:
            siblings = self._states[record.parent].children
            del siblings[state]
            siblings.update(record.children)
        for child in record.children:
            below = self._states[child]
            below.parent = record.parent
            below.segment = record.segment + below.segment

    def __contains__(self, state: int) -> bool:
        return state in self._states

    def __len__(self) -> int:
        return len(self._states)

    def depth_of(self, state: int) -> int:
        """Return the depth of `state` in blocks."""
        return self._states[state].depth

    def parent_of(self, state: int) -> int | None:
        """Return the nearest shallower state on the path of `state`."""
        return self._states[state].parent

    def check(self) -> None:
        """Verify the index and that both sides know the same tree; raise `RuntimeError`."""
        self._index.check()
        if len(self._index) != len(self._states) or len(self._at) != len(self._states):
            raise RuntimeError("the index and the tree know different states")
        through: dict[Hash, dict[int, None]] = {}
        for state, record in self._states.items():
            above = 0 if record.parent is None else self._states[record.parent].depth
            if len(record.segment) != record.depth - above:
                raise RuntimeError(f"state {state} has a segment of the wrong length")
            for block_hash in record.segment:
                through.setdefault(block_hash, {})[state] = None
        if {key: set(value) for key, value in through.items()} != {
            key: set(value) for key, value in self._through.items() if value
        }:
            raise RuntimeError("blocks and the states below them disagree")
