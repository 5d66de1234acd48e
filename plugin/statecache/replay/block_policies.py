"""Orders in which the free blocks of one shared pool are handed out: on integers, for the replay.

Blocks are numbered from 0. A free block may still be cached under a key (KV of a prefix point, or a
part of a state); it can be hit until it is handed out. Every call is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import TYPE_CHECKING

from statecache.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["ORDERS", "DuplicatesFirst", "ReuseBlockPolicy", "FifoBlockPolicy", "make_order"]

ORDERS = ("stock", "copies", "reuse")

# Ratios of ages, unproven to proven, at which a block of either kind goes.
_LEARNT_RATIOS = tuple(map(Fraction, ("1", "7/5", "2", "14/5", "4")))
_LEARN_EVERY = 64  # lookups

_Queue = OrderedDict[int, None]


class FifoBlockPolicy:
    """An engine's own order: first in, first out, but blocks without a key go before all others.

    `cached` maps a key to the blocks that hold it, `uses` a block to how many requests hold it;
    both belong to the pool, which keeps them up to date.
    """

    def __init__(self, blocks: int, cached: Mapping[int, Sequence[int]], uses: Sequence[int]):
        self._cached = cached
        self._uses = uses
        self._bare = list(range(blocks))[::-1]  # the last one goes first
        self._main: _Queue = OrderedDict()
        self._home: list[_Queue] = [self._main] * blocks  # where a free cached block is

    def __len__(self) -> int:
        return len(self._bare) + sum(map(len, self.queues()))

    def queues(self) -> list[_Queue]:
        """Return the queues of cached blocks, oldest first in each."""
        return [self._main]

    def free_blocks(self) -> list[int]:
        """Return every free block: bare ones, then queue by queue."""
        return self._bare[::-1] + [block for queue in self.queues() for block in queue]

    def looked_up(self, missing: Iterable[int]) -> None:
        """A request was looked up; `missing` are its KV keys past the resident prefix."""

    def take(self) -> int:
        """Hand out a block; there must be a free one."""
        return self._bare.pop() if self._bare else self._take_cached()

    def hit(self, block: int) -> None:
        """A cached block is used again; it may be free or not."""
        if not self._uses[block]:
            del self._home[block][block]

    def computed(self, block: int, *, proven: bool) -> None:
        """A block was handed out to a request that is `proven` or not (see `ReuseBlockPolicy`)."""

    def lost(self, block: int, key: int) -> None:
        """A block was handed out that was the last one under the KV key `key`."""

    def give_bare(self, block: int) -> None:
        """Take back a block without a key: it goes next."""
        self._bare.append(block)

    def give(self, block: int, key: int) -> None:
        """Take back a block cached under `key`."""
        del key
        self._append(self._main, block)

    def _take_cached(self) -> int:
        return self._main.popitem(last=False)[0]

    def _append(self, queue: _Queue, block: int) -> None:
        queue[block] = None
        self._home[block] = queue


class DuplicatesFirst(FifoBlockPolicy):
    """As stock, but of several blocks under one key all but one go first.

    Where blocks are not deduplicated, computing a missed region again leaves second copies.
    """

    def __init__(self, blocks: int, cached: Mapping[int, Sequence[int]], uses: Sequence[int]):
        super().__init__(blocks, cached, uses)
        self._copies: _Queue = OrderedDict()

    def queues(self) -> list[_Queue]:
        """Return the copies, then the others."""
        return [self._copies, self._main]

    def give(self, block: int, key: int) -> None:
        """Queue `block` as a copy if another one is in use; else make the free others copies."""
        same = self._cached[key]
        if len(same) > 1:
            others = [other for other in same if other != block]
            if any(map(self._uses.__getitem__, others)):
                self._append(self._copies, block)
                return
            for other in others:
                if self._home[other] is not self._copies:
                    del self._home[other][other]
                    self._append(self._copies, other)
        self._append(self._queue_of(block), block)

    def _queue_of(self, block: int) -> _Queue:
        del block
        return self._main

    def _take_cached(self) -> int:
        if self._copies:
            return self._copies.popitem(last=False)[0]
        return self._take_main()

    def _take_main(self) -> int:
        return super()._take_cached()


class ReuseBlockPolicy(DuplicatesFirst):
    """Copies first, then two queues: blocks of requests that resumed far go later.

    A block is proven when it was hit, or computed by a request that resumed from at least 3/4 of
    its prompt. Ages count lookups since a block was let go. Of the oldest block of either kind, the
    unproven one goes if its age times the ratio reaches the age of the proven one. The ratio is
    fixed, or learnt: dropped KV is remembered until as many blocks as the pool has were handed out,
    and the kind that is asked for again more often a drop goes later.
    """

    def __init__(
        self,
        blocks: int,
        cached: Mapping[int, Sequence[int]],
        uses: Sequence[int],
        ratio: Fraction | None = None,
    ):
        super().__init__(blocks, cached, uses)
        self._total = blocks
        self._unproven: _Queue = OrderedDict()
        self._proven = bytearray(blocks)
        self._let_go = [0] * blocks
        self._fixed = ratio
        self._step = 0
        self.ratio = ratio or _LEARNT_RATIOS[0]
        self._clock = 0
        self._handed_out = 0
        self._ghosts: dict[int, tuple[int, int]] = {}  # key: proven, handed out by then
        self._asked_again = [0, 0]  # unproven, proven
        self._dropped = [0, 0]

    def queues(self) -> list[_Queue]:
        """Return the copies, the proven and the unproven."""
        return [self._copies, self._main, self._unproven]

    def looked_up(self, missing: Iterable[int]) -> None:
        """Count what was dropped not long ago, and learn every 64 lookups."""
        self._clock += 1
        for key in missing:
            ghost = self._ghosts.pop(key, None)
            if ghost and self._handed_out - ghost[1] < self._total:
                self._asked_again[ghost[0]] += 1
        if self._clock % _LEARN_EVERY == 0 and self._fixed is None:
            self._learn()

    def take(self) -> int:
        """Hand out a block; there must be a free one."""
        self._handed_out += 1
        return super().take()

    def hit(self, block: int) -> None:
        """Use a cached block again: it is proven now."""
        super().hit(block)
        self._proven[block] = 1

    def computed(self, block: int, *, proven: bool) -> None:
        """Note the kind of a block handed out."""
        self._proven[block] = proven

    def lost(self, block: int, key: int) -> None:
        """Remember what was dropped."""
        kind = self._proven[block]
        self._ghosts[key] = (kind, self._handed_out)
        self._dropped[kind] += 1

    def _queue_of(self, block: int) -> _Queue:
        self._let_go[block] = self._clock
        return self._main if self._proven[block] else self._unproven

    def _take_main(self) -> int:
        if not self._main or (self._unproven and self._unproven_goes()):
            return self._unproven.popitem(last=False)[0]
        return self._main.popitem(last=False)[0]

    def _unproven_goes(self) -> bool:
        now = self._clock + 1
        unproven_age = now - self._let_go[next(iter(self._unproven))]
        proven_age = now - self._let_go[next(iter(self._main))]
        return self.ratio.numerator * unproven_age >= self.ratio.denominator * proven_age

    def _learn(self) -> None:
        (again, again_proven), (dropped, dropped_proven) = self._asked_again, self._dropped
        if again or again_proven:
            gain, loss = again_proven * dropped, again * dropped_proven
            if not dropped_proven:
                step = -1
            elif not dropped:
                step = 1
            else:
                step = (gain > loss) - (gain < loss)
            self._step = min(max(self._step + step, 0), len(_LEARNT_RATIOS) - 1)
            self.ratio = _LEARNT_RATIOS[self._step]
        self._asked_again = [again // 2, again_proven // 2]
        self._dropped = [dropped // 2, dropped_proven // 2]


def make_order(
    name: str, ratio: Fraction | None = None
) -> Callable[[int, Mapping[int, Sequence[int]], Sequence[int]], FifoBlockPolicy]:
    """Return what makes the order `name` for a pool; `ratio` fixes that of `reuse`."""
    if name not in ORDERS:
        raise SettingsError(f"unknown order {name!r}: use {', '.join(ORDERS)}")
    if name == "reuse":
        return lambda blocks, cached, uses: ReuseBlockPolicy(blocks, cached, uses, ratio)
    return FifoBlockPolicy if name == "stock" else DuplicatesFirst
