"""Block policies: which free block of one shared pool goes first. On integers, for the replay.

A new one is a class here or in a file of its own, and a row of `BLOCK_POLICIES`.

Blocks are numbered from 0. A free block may still be cached under a key (KV of a prefix point, or a
part of a state); it can be hit until it is handed out. Every call is O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from statecache.errors import SettingsError

__all__ = [
    "BLOCK_POLICIES",
    "BlockPolicyFactory",
    "BlockPolicySpec",
    "DuplicatesFirst",
    "FifoBlockPolicy",
    "ReuseBlockPolicy",
    "block_policy_names",
    "block_policy_summaries",
    "current_block_policy",
    "earlier_block_policy",
    "make_block_policy",
]

# Ratios of ages, probation to protected, at which a block of either kind goes.
_LEARNT_RATIOS = tuple(map(Fraction, ("1", "7/5", "2", "14/5", "4")))
_LEARN_EVERY = 64  # lookups

_Queue = OrderedDict[int, None]

# Makes the policy of a pool from its blocks, and what holds its keys and uses (`FifoBlockPolicy`).
BlockPolicyFactory: TypeAlias = Callable[
    [int, Mapping[int, Sequence[int]], Sequence[int]], "FifoBlockPolicy"
]


class FifoBlockPolicy:
    """First in, first out, but blocks without a key go before all others.

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

    def computed(self, block: int, *, protected: bool) -> None:
        """A block was handed out, to a request that is `protected` (`ReuseBlockPolicy`) or not."""

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
    """As `FifoBlockPolicy`, but of several blocks under one key all but one go first.

    Where blocks are not deduplicated, computing a missed region again leaves duplicates.
    """

    def __init__(self, blocks: int, cached: Mapping[int, Sequence[int]], uses: Sequence[int]):
        super().__init__(blocks, cached, uses)
        self._duplicates: _Queue = OrderedDict()

    def queues(self) -> list[_Queue]:
        """Return the duplicates, then the others."""
        return [self._duplicates, self._main]

    def give(self, block: int, key: int) -> None:
        """Queue `block` as a duplicate if another is in use, else the free others."""
        same = self._cached[key]
        if len(same) > 1:
            others = [other for other in same if other != block]
            if any(map(self._uses.__getitem__, others)):
                self._append(self._duplicates, block)
                return
            for other in others:
                if self._home[other] is not self._duplicates:
                    del self._home[other][other]
                    self._append(self._duplicates, other)
        self._append(self._queue_of(block), block)

    def _queue_of(self, block: int) -> _Queue:
        del block
        return self._main

    def _take_cached(self) -> int:
        if self._duplicates:
            return self._duplicates.popitem(last=False)[0]
        return self._take_main()

    def _take_main(self) -> int:
        return super()._take_cached()


class ReuseBlockPolicy(DuplicatesFirst):
    """Duplicates first, then two queues: blocks of requests that resumed far go later.

    A block is protected when it was hit, or computed by a request that resumed from at least 3/4 of
    its prompt, else on probation. Ages count lookups since a block was let go. Of the oldest blocks
    of either kind, the one on probation goes if its age times the ratio reaches the age of the
    protected one. The ratio is fixed, or learnt: dropped KV is remembered until as many blocks as
    the pool has were handed out, and the kind that is asked for again more often a drop goes later.
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
        self._probation: _Queue = OrderedDict()
        self._protected = bytearray(blocks)
        self._let_go = [0] * blocks
        self._fixed = ratio
        self._step = 0
        self.ratio = ratio or _LEARNT_RATIOS[0]
        self._clock = 0
        self._handed_out = 0
        self._ghosts: dict[int, tuple[int, int]] = {}  # key: protected, handed out by then
        self._asked_again = [0, 0]  # probation, protected
        self._dropped = [0, 0]

    def queues(self) -> list[_Queue]:
        """Return the duplicates, the protected blocks and those on probation."""
        return [self._duplicates, self._main, self._probation]

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
        """Use a cached block again: it is protected now."""
        super().hit(block)
        self._protected[block] = 1

    def computed(self, block: int, *, protected: bool) -> None:
        """Note the kind of a block handed out."""
        self._protected[block] = protected

    def lost(self, block: int, key: int) -> None:
        """Remember what was dropped."""
        kind = self._protected[block]
        self._ghosts[key] = (kind, self._handed_out)
        self._dropped[kind] += 1

    def _queue_of(self, block: int) -> _Queue:
        self._let_go[block] = self._clock
        return self._main if self._protected[block] else self._probation

    def _take_main(self) -> int:
        if not self._main or (self._probation and self._probation_goes()):
            return self._probation.popitem(last=False)[0]
        return self._main.popitem(last=False)[0]

    def _probation_goes(self) -> bool:
        now = self._clock + 1
        probation_age = now - self._let_go[next(iter(self._probation))]
        protected_age = now - self._let_go[next(iter(self._main))]
        return self.ratio.numerator * probation_age >= self.ratio.denominator * protected_age

    def _learn(self) -> None:
        (again, again_protected), (dropped, dropped_protected) = self._asked_again, self._dropped
        if again or again_protected:
            gain, loss = again_protected * dropped, again * dropped_protected
            if not dropped_protected:
                step = -1
            elif not dropped:
                step = 1
            else:
                step = (gain > loss) - (gain < loss)
            self._step = min(max(self._step + step, 0), len(_LEARNT_RATIOS) - 1)
            self.ratio = _LEARNT_RATIOS[self._step]
        self._asked_again = [again // 2, again_protected // 2]
        self._dropped = [dropped // 2, dropped_protected // 2]


@dataclass(frozen=True, kw_only=True)
class BlockPolicySpec:
    """A row of the table; `old_names` go on working for one release."""

    name: str
    summary: str
    make: BlockPolicyFactory
    old_names: tuple[str, ...] = ()


BLOCK_POLICIES: tuple[BlockPolicySpec, ...] = (
    BlockPolicySpec(
        name="fifo",
        summary="first in, first out, as an engine does by itself",
        make=FifoBlockPolicy,
        old_names=("stock",),
    ),
    BlockPolicySpec(
        name="duplicates",
        summary="duplicates first, then as fifo",
        make=DuplicatesFirst,
        old_names=("copies",),
    ),
    BlockPolicySpec(
        name="reuse",
        summary="duplicates first, then what was never reused",
        make=ReuseBlockPolicy,
    ),
)


def block_policy_names() -> tuple[str, ...]:
    """Return the names of the table, in its order."""
    return tuple(spec.name for spec in BLOCK_POLICIES)


def block_policy_summaries() -> str:
    """Return each block policy with its summary, as a help text shows them."""
    return "; ".join(f"{spec.name}: {spec.summary}" for spec in BLOCK_POLICIES)


def current_block_policy(name: str) -> str:
    """Return today's name of a block policy; a name that is none as it is."""
    return next((spec.name for spec in BLOCK_POLICIES if name in spec.old_names), name)


def earlier_block_policy(name: str) -> str:
    """Return what a block policy of the table was called before, its name if that is the same."""
    return next((s.old_names[0] for s in BLOCK_POLICIES if s.name == name and s.old_names), name)


def make_block_policy(name: str, ratio: Fraction | None = None) -> BlockPolicyFactory:
    """Return what makes the block policy `name` for a pool; `ratio` fixes that of `reuse`.

    Raises `SettingsError` for a name that the table has not.
    """
    current = current_block_policy(name)
    for spec in BLOCK_POLICIES:
        if spec.name == current:
            return spec.make if ratio is None else partial(ReuseBlockPolicy, ratio=ratio)
    names = ", ".join(block_policy_names())
    raise SettingsError(f"unknown block policy {name!r}: use {names}")
