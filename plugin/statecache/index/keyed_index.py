"""A policy that needs prompts, for an engine that numbers its states.

An engine's own number of a state is gone with the state. Such a policy must know the same prefix
again after it was evicted, so its ids are keys: hashes of the whole prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from statecache._index import CostModel
from statecache.index.policies import GHOSTS, make_index

__all__ = ["GHOSTS", "LruKeySet", "PrefixKey", "PrefixKeyedIndex", "TokenPrefixes", "key_of"]

_STRIDE = 256  # tokens between two places where prefixes are looked for
_TOKEN_BYTES = 8


def key_of(digest: bytes) -> int:
    """Return the key that the first 8 bytes of a digest make."""
    return int.from_bytes(digest[:8], "little", signed=True)


class PrefixKeyedIndex:
    """An index of a policy that needs prompts, called with the engine's numbers of states.

    `name` says which prefix a number stands for, before the state is inserted or cached again.
    """

    def __init__(self, policy: str, cost: CostModel, slots: int, ghosts: int = GHOSTS) -> None:
        self.index = make_index(policy, cost, slots, ghosts)
        self._most_gone = ghosts + slots
        self._key: dict[int, int] = {}  # by number, of resident states
        self._number: dict[int, int] = {}  # by key
        self._gone: dict[int, int] = {}  # keys by number, oldest first
        self._named: tuple[int, int, bool] | None = None

    def name(self, state: int, key: int, *, end: bool) -> None:
        """`state`, which is inserted or touched next, ends the prefix `key`; maybe of a prompt."""
        self._named = (state, key, end)

    def insert(
        self, state: int, depth: int, parent: int | None = None, children: Iterable[int] = ()
    ) -> None:
        """Make a state resident that has a name."""
        key, end = self._name_of(state)
        above = None if parent is None else self._key[parent]
        self.index.insert(key, depth, above, [self._key[child] for child in children], end=end)
        self._gone.pop(state, None)
        self._key[state] = key
        self._number[key] = state

    def _name_of(self, state: int) -> tuple[int, bool]:
        named, self._named = self._named, None
        if named is not None and named[0] == state:
            return named[1], named[2]
        return self._key[state] if state in self._key else self._gone[state], False

    def touch(self, state: int) -> None:
        """A state was resumed, or cached again: as a prompt's end if it was named so.

        Its key stays: an engine may take two prefixes for one that have names of their own.
        """
        _, end = self._name_of(state)
        self.index.touch(self._key[state], end=end)

    def stamp(self, state: int) -> None:
        """The last request that held a state let go: a stamp, but no use."""
        self.pin(state)
        self.unpin(state)

    def pin(self, state: int) -> None:
        """Hold a state."""
        self.index.pin(self._key[state])

    def unpin(self, state: int) -> None:
        """Undo one pin."""
        self.index.unpin(self._key[state])

    def erase(self, state: int) -> None:
        """Forget a state; it becomes a ghost."""
        self.index.erase(self._key[state])
        self._left(state)

    def evicted(self, state: int) -> None:
        """Confirm a proposal."""
        self.index.evicted(self._key[state])
        self._left(state)

    def evict(self, n: int) -> list[int]:
        """Evict up to `n` states, lowest first."""
        gone = [self._number[key] for key in self.index.evict(n)]
        for state in gone:
            self._left(state)
        return gone

    def _left(self, state: int) -> None:
        key = self._key.pop(state)
        del self._number[key]
        self._gone[state] = key
        if len(self._gone) > self._most_gone:
            del self._gone[next(iter(self._gone))]

    def lost(self, state: int) -> None:
        """The KV of a state that left before is gone, too: nobody can resume there."""
        key = self._gone.pop(state, None)
        if key is not None:
            self.index.drop([key])

    def drop(self, keys: Iterable[int]) -> None:
        """The KV at the end of these prefixes is gone; none of them is resident."""
        self.index.drop(keys)

    def on_prompt(
        self, keys: Sequence[int], depths: Sequence[int], resumable: int, admitted: Sequence[int]
    ) -> None:
        """A prompt was admitted: as `StateIndex.on_prompt`."""
        self.index.on_prompt(keys, depths, resumable, admitted)

    def begin_walk(self) -> None:
        """Start one eviction pass."""
        self.index.begin_walk()

    def next_victim(self) -> int | None:
        """Propose the lowest state."""
        key = self.index.next_victim()
        return None if key is None else self._number[key]

    def end_walk(self) -> None:
        """End the pass."""
        self.index.end_walk()

    def priority(self, state: int) -> float:
        """Return the rank of `state`."""
        return self.index.rank(self._key[state])

    @property
    def watermark(self) -> float:
        """The clock of the index."""
        return self.index.watermark

    def check(self) -> None:
        """Verify the index and the names; raise `RuntimeError`."""
        self.index.check()
        if self._number != {key: state for state, key in self._key.items()}:
            raise RuntimeError("numbers and keys of the states disagree")
        if len(self.index) != len(self._key) or self._key.keys() & self._gone.keys():
            raise RuntimeError("states and their names disagree")

    def __len__(self) -> int:
        return len(self._key)


class LruKeySet:
    """Keys that were offered for caching, the latest `most`: what a path has points of."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[int, None] = {}

    def add(self, key: int) -> int | None:
        """Note a key as the latest; return the one that is forgotten for it."""
        if key in self._keys:
            del self._keys[key]
        self._keys[key] = None
        if len(self._keys) <= self._most:
            return None
        oldest = next(iter(self._keys))
        del self._keys[oldest]
        return oldest

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


class PrefixKey(NamedTuple):
    """The key of the first `depth` tokens, and that of the whole strides before the last one."""

    depth: int
    key: int
    stride: int


class TokenPrefixes:
    """Keys of prefixes of tokens, and which prefixes of a prompt are known.

    Where a known prefix ends is noted with the key of the whole strides before it, so a look-up
    costs a hash of the tokens, one step a stride, and one a known end.
    """

    def __init__(self, most: int) -> None:
        self._known = LruKeySet(most)
        self._place: dict[int, tuple[int, int]] = {}  # by key: key of its stride, depth
        self._depths: dict[int, dict[int, int]] = {}  # by stride: how many keys at each depth

    @staticmethod
    def key(tokens: Sequence[int], depth: int, space: bytes) -> int:
        """Return the key of the first `depth` tokens, an array of 8-byte integers."""
        return TokenPrefixes.prefix_key(tokens, depth, space).key

    @staticmethod
    def prefix_key(tokens: Sequence[int], depth: int, space: bytes) -> PrefixKey:
        """Return both keys of the first `depth` tokens, at least one; they are hashed once."""
        data = memoryview(tokens).cast("B")  # type: ignore[arg-type]
        whole = (depth - 1) // _STRIDE * _STRIDE * _TOKEN_BYTES
        digest = blake2b(data[:whole], key=space, digest_size=8)
        stride = key_of(digest.digest())
        digest.update(data[whole : depth * _TOKEN_BYTES])
        return PrefixKey(depth, key_of(digest.digest()), stride)

    def path(
        self, tokens: Sequence[int], space: bytes, offered: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the keys and depths of the known prefixes and of those `offered`, and the latter.

        Depths offered ascend and lie within the prompt; they are known from now on.
        """
        data = memoryview(tokens).cast("B")  # type: ignore[arg-type]
        digest = blake2b(key=space, digest_size=8)
        wanted = set(offered)
        keys: list[int] = []
        depths: list[int] = []
        for base in range(0, len(tokens), _STRIDE):
            stride = key_of(digest.digest())
            last = min(base + _STRIDE, len(tokens))
            here = set(self._depths.get(stride, ()))
            here |= {depth for depth in wanted if base < depth <= last}
            for depth in sorted(here):
                if depth > last:
                    continue
                at = digest.copy()
                at.update(data[base * _TOKEN_BYTES : depth * _TOKEN_BYTES])
                key = key_of(at.digest())
                if depth in wanted:
                    self._note(key, stride, depth)
                if key in self._known:
                    keys.append(key)
                    depths.append(depth)
            digest.update(data[base * _TOKEN_BYTES : last * _TOKEN_BYTES])
        return (
            keys,
            depths,
            [key for key, depth in zip(keys, depths, strict=True) if depth in wanted],
        )

    def note(self, tokens: Sequence[int], depth: int, space: bytes) -> int:
        """Return the key of the first `depth` tokens, known from now on."""
        return self.note_key(self.prefix_key(tokens, depth, space))

    def note_key(self, prefix: PrefixKey) -> int:
        """As `note`, of a prefix that was hashed before."""
        self._note(prefix.key, prefix.stride, prefix.depth)
        return prefix.key

    def _note(self, key: int, stride: int, depth: int) -> None:
        if key not in self._known:
            self._place[key] = (stride, depth)
            counts = self._depths.setdefault(stride, {})
            counts[depth] = counts.get(depth, 0) + 1
        forgotten = self._known.add(key)
        if forgotten is None:
            return
        stride, depth = self._place.pop(forgotten)
        counts = self._depths[stride]
        counts[depth] -= 1
        if not counts[depth]:
            del counts[depth]
        if not counts:
            del self._depths[stride]

    def __len__(self) -> int:
        return len(self._known)
