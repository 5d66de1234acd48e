"""Which states are resident, on which paths, and which of them is the cheapest to lose.

A path is the sequence of block hashes of a request, one for each block; a block hash stands for all
tokens up to its end, with cache salt, adapter and multimodal inputs in it. A state is named by the
hash at its end. The tree is no larger than what it describes: it holds the blocks on the paths of
resident states, in runs that end at a state or where paths part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from statecache import StateIndex
from statecache.engine.metrics import learned_numbers
from statecache.engine.settings import Settings
from statecache.index.keyed_index import GHOSTS, LruKeySet, PrefixKeyedIndex, key_of
from statecache.index.policies import find_policy

__all__ = ["StateTree"]

Hash = bytes


class _Run:
    """Blocks that follow each other, and the state at their end, if there is one."""

    __slots__ = ("above", "below", "depth", "hashes", "state")

    def __init__(self, above: _Run | None, hashes: tuple[Hash, ...], depth: int) -> None:
        self.above = above
        self.hashes = hashes
        self.depth = depth  # of the last block
        self.state: int | None = None
        self.below: dict[_Run, None] = {}


class StateTree:
    """Resident states as the index sees them. Depths are blocks here, tokens in the index."""

    def __init__(self, settings: Settings, block_tokens: int, slots: int = 1) -> None:
        self._settings = settings
        self._block_tokens = block_tokens
        self._slots = slots
        self._last = 0
        self.clear()

    def clear(self) -> None:
        """Forget every state. Numbers are never used twice."""
        cost, policy = self._settings.cost_model(), self._settings.policy
        self._learned: PrefixKeyedIndex | None = None
        if find_policy(policy).needs_prompts:
            self._learned = PrefixKeyedIndex(policy, cost, self._slots)
            self._known = LruKeySet(4 * (GHOSTS + self._slots))
        self._index: StateIndex | PrefixKeyedIndex = (
            StateIndex(policy, cost) if self._learned is None else self._learned
        )
        self._root = _Run(None, (), 0)
        self._run_at: dict[int, _Run] = {}  # by state
        self._run_with: dict[Hash, _Run] = {}

    @property
    def index(self) -> StateIndex | PrefixKeyedIndex:
        """The index. Who evicts from it without this tree calls `dropped`; not after `clear`."""
        return self._index

    def find(self, block_hash: Hash) -> int | None:
        """Return the state that ends with this block, if there is one."""
        run = self._run_with.get(block_hash)
        return run.state if run is not None and run.hashes[-1] == block_hash else None

    def on(self, path: Sequence[Hash]) -> Iterator[int]:
        """Yield the states on `path`, the deepest one first."""
        known = self._blocks_known(path)
        run = self._run_with[path[known - 1]] if known else self._root
        if run.depth > known:
            run = run.above or run
        return self._states_from(run)

    def hash_of(self, state: int) -> Hash:
        """Return the hash at the end of `state`."""
        return self._run_at[state].hashes[-1]

    def put(self, path: Sequence[Hash], *, end: bool = True) -> int:
        """A state was set at the end of `path`; set again is a use. Returns its number.

        `end` says that this is the end of a prompt.
        """
        found = self.find(path[-1])
        if found is None:
            self._last += 1
        if self._learned is not None:
            self._name(self._last if found is None else found, path[-1], end=end)
        if found is not None:
            self._index.touch(found)
            return found
        run = self._end_of(path)
        parent = next(self._states_from(run), None)
        below = self._nearest_below(run)
        self._index.insert(self._last, run.depth * self._block_tokens, parent, below)
        run.state = self._last
        self._run_at[self._last] = run
        return self._last

    def _name(self, state: int, block_hash: Hash, *, end: bool) -> None:
        if self._learned is not None:
            key = key_of(block_hash)
            self._known.add(key)
            self._learned.name(state, key, end=end)

    def requested(
        self, path: Sequence[Hash], tokens: int, offered: Sequence[int], resident: int
    ) -> None:
        """A prompt of so many tokens was admitted; `learned` alone asks.

        `path` are its full blocks; states will be offered at the ends of its first `offered`
        blocks, wherever it resumes. Its KV was there for `resident` tokens.
        """
        if self._learned is None:
            return
        admitted = {key_of(path[depth - 1]): None for depth in offered}
        for key in admitted:
            self._known.add(key)
        points = [
            (key, (number + 1) * self._block_tokens)
            for number, key in enumerate(map(key_of, path))
            if key in self._known
        ]
        keys, depths = [key for key, _ in points], [depth for _, depth in points]
        # The last token of a prompt is always computed.
        reached = bisect_right(depths, min(tokens - 1, resident))
        self._learned.on_prompt(keys, depths, reached, list(admitted))

    def lost(self, block_hash: Hash) -> None:
        """The KV of a block left the cache; the state at its end, if there was one, is gone."""
        if self._learned is not None:
            self._learned.drop([key_of(block_hash)])

    def sample(self) -> dict[str, float]:
        """Return what the policy itself has for the metrics."""
        if self._learned is None:
            return {}
        return learned_numbers(self._learned.index, len(self._known))

    def _blocks_known(self, path: Sequence[Hash]) -> int:
        """Return how many blocks of `path` are in the tree; with a block all before it are."""
        low, high = 0, len(path)
        while low < high:
            middle = (low + high + 1) // 2
            if path[middle - 1] in self._run_with:
                low = middle
            else:
                high = middle - 1
        return low

    def _end_of(self, path: Sequence[Hash]) -> _Run:
        """Return the run that ends with `path`, made or split off if need be."""
        known = self._blocks_known(path)
        run = self._run_with[path[known - 1]] if known else self._root
        if run.depth > known:
            run = self._split(run, len(run.hashes) - (run.depth - known))
        return run if known == len(path) else self._hang(run, tuple(path[known:]))

    def _hang(self, above: _Run, hashes: tuple[Hash, ...]) -> _Run:
        run = _Run(above, hashes, above.depth + len(hashes))
        above.below[run] = None
        self._run_with.update(dict.fromkeys(hashes, run))
        return run

    def _split(self, run: _Run, cut: int) -> _Run:
        """Return a new run with the first `cut` blocks of `run`, which hangs below it then."""
        above = run.above or self._root
        del above.below[run]
        upper = self._hang(above, run.hashes[:cut])
        run.hashes = run.hashes[cut:]
        run.above = upper
        upper.below[run] = None
        return upper

    @staticmethod
    def _states_from(run: _Run | None) -> Iterator[int]:
        while run is not None:
            if run.state is not None:
                yield run.state
            run = run.above

    @staticmethod
    def _nearest_below(run: _Run) -> list[int]:
        """Return the states below the end of `run` with no other state between."""
        found, runs = [], list(run.below)
        while runs:
            run = runs.pop()
            if run.state is None:
                runs.extend(run.below)
            else:
                found.append(run.state)
        return found

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
        evicted = self._index.evict(1)
        if not evicted:
            return None
        self.dropped(evicted[0])
        return evicted[0]

    def erase(self, state: int) -> None:
        """Drop `state`, pinned or not."""
        self._index.erase(state)
        self.dropped(state)

    def depending_on(self, block_hash: Hash) -> list[int]:
        """Return the states that are worth nothing without this block, each before those below."""
        run = self._run_with.get(block_hash)
        found, runs = [], [] if run is None else [run]
        while runs:
            run = runs.pop()
            if run.state is not None:
                found.append(run.state)
            runs.extend(run.below)
        return found

    def dropped(self, state: int) -> None:
        """The index knows `state` no longer: what only led to it goes."""
        run = self._run_at.pop(state)
        run.state = None
        while run.above is not None and run.state is None and not run.below:
            for block_hash in run.hashes:
                del self._run_with[block_hash]
            del run.above.below[run]
            run = run.above
        if run.above is not None and run.state is None and len(run.below) == 1:
            self._join(run.above, run, next(iter(run.below)))

    def _join(self, above: _Run, upper: _Run, lower: _Run) -> None:
        """Make one run of two, of the longer one."""
        kept, joined = (upper, lower) if len(upper.hashes) > len(lower.hashes) else (lower, upper)
        self._run_with.update(dict.fromkeys(joined.hashes, kept))
        del above.below[upper]
        above.below[kept] = None
        kept.hashes = upper.hashes + lower.hashes
        kept.above, kept.below = above, lower.below
        kept.depth, kept.state = lower.depth, lower.state
        for below in kept.below:
            below.above = kept
        if kept.state is not None:
            self._run_at[kept.state] = kept

    def __contains__(self, state: int) -> bool:
        return state in self._run_at

    def __len__(self) -> int:
        return len(self._run_at)

    def depth_of(self, state: int) -> int:
        """Return the depth of `state` in blocks."""
        return self._run_at[state].depth

    def parent_of(self, state: int) -> int | None:
        """Return the nearest shallower state on the path of `state`."""
        return next(self._states_from(self._run_at[state].above), None)

    def check(self) -> None:
        """Verify the index and that both sides know the same tree; raise `RuntimeError`."""
        self._index.check()
        if len(self._index) != len(self._run_at):
            raise RuntimeError("the index and the tree know different states")
        with_hash: dict[Hash, _Run] = {}
        states, runs = {}, [self._root]
        while runs:
            run = runs.pop()
            runs.extend(run.below)
            with_hash.update(dict.fromkeys(run.hashes, run))
            if run.state is not None:
                states[run.state] = run
            above = run.above
            if above is None:
                continue
            if run not in above.below or run.depth != above.depth + len(run.hashes):
                raise RuntimeError(f"a run of {len(run.hashes)} blocks hangs at the wrong place")
            if run.state is None and len(run.below) < 2:
                raise RuntimeError(f"a run of {len(run.hashes)} blocks ends for no reason")
        if states != self._run_at or with_hash != self._run_with:
            raise RuntimeError("runs are not known by their blocks and states")
