"""A small block pool and a plain reference of the order `reuse`, to drive queues without an engine.

The pool does what vLLM 0.32's `BlockPool` does around its free queue: hashes keep all copies, a
block handed out loses its hash, blocks without a hash are put back first.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from statecache._blocks import BlockHashIndex


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    block_id: int
    block_hash: bytes | None = None
    ref_cnt: int = 0
    is_null: bool = False
    pool: Pool | None = None


class Pool:
    def __init__(self, total):
        self.blocks = [Block(i) for i in range(total)]
        self.cached = BlockHashIndex(self.blocks)
        self.queue = None

    def set_hash(self, block, key):
        block.block_hash = key
        self.cached.insert(key, block)

    def drop_hash(self, block):
        key, block.block_hash = block.block_hash, None
        assert self.cached.pop(key, block.block_id) is block

    def any_block(self, key):
        return self.cached.get_one_block(key)

    def allocate(self, n):
        taken = self.queue.popleft_n(n)
        for block in taken:
            if block.block_hash is not None:
                self.drop_hash(block)
            block.ref_cnt = 1
        return taken

    def touch(self, *blocks):
        self.queue.touch(blocks)

    def free(self, blocks):
        released = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                released.append(block)
        self.queue.prepend_n([b for b in released if b.block_hash is None])
        self.queue.append_n([b for b in released if b.block_hash is not None])

    def evict(self, block):
        if block.block_hash is not None:
            self.drop_hash(block)
            self.queue.unhashed(block)

    def reset(self):
        self.cached.clear()
        for block in self.blocks:
            block.block_hash = None
        self.queue.reset()


class ReferenceReuse:
    """The order as its definition reads, in lists and with searches. Blocks are named by id.

    The keys that are watched end with "kv".
    """

    RATIOS = ((1, 1), (7, 5), (2, 1), (14, 5), (4, 1))

    def __init__(self, pool):
        self.pool = pool
        self.free, self.copies, self.old, self.new = [], [], [], []
        self.protected = dict.fromkeys(range(len(pool.blocks)), False)
        self.stamp = {}
        self.clock = self.allocations = self.j = 0
        self.ghosts = {}
        self.gu = self.gp = self.eu = self.ep = 0
        self.apart, self.lost = set(), []
        self.going = []  # handed out in this call: gone, although their hash still stands

    def lists(self):
        return (self.free, self.copies, self.old, self.new)

    def looked_up(self, missing):
        self.clock += 1
        for key in missing:
            protected, at = self.ghosts.pop(key, (False, None))
            if at is not None and self.allocations - at < len(self.pool.blocks):
                if protected:
                    self.gp += 1
                else:
                    self.gu += 1
        if self.clock % 64:
            return
        if self.gu + self.gp > 0:
            if self.ep == 0:
                self.j -= 1
            elif self.eu == 0 or self.gp * self.eu > self.gu * self.ep:
                self.j += 1
            elif self.gp * self.eu < self.gu * self.ep:
                self.j -= 1
            self.j = max(0, min(4, self.j))
        self.gu, self.gp, self.eu, self.ep = (n // 2 for n in (self.gu, self.gp, self.eu, self.ep))

    def others(self, block):
        return [
            b
            for b in self.pool.blocks
            if b is not block and b.block_hash == block.block_hash and b not in self.going
        ]

    def is_free(self, block):
        return any(block.block_id in ids for ids in self.lists())

    def append(self, block):
        if block.block_hash is None or block.block_hash in self.apart:
            self.free.append(block.block_id)
            return
        self.stamp[block.block_id] = self.clock
        others = self.others(block)
        if any(not self.is_free(b) for b in others):
            self.copies.append(block.block_id)
            return
        for b in others:
            for ids in (self.old, self.new):
                if b.block_id in ids:
                    ids.remove(b.block_id)
                    self.copies.append(b.block_id)
        (self.old if self.protected[block.block_id] else self.new).append(block.block_id)

    def prepend_n(self, blocks):
        self.free[:0] = [b.block_id for b in blocks]

    def remove(self, block):
        next(ids for ids in self.lists() if block.block_id in ids).remove(block.block_id)
        self.protected[block.block_id] = True

    def popleft(self, *, start_protected):
        kept = None
        if self.free:
            taken = self.free.pop(0)
        elif self.copies:
            taken = self.copies.pop(0)
        else:
            kept = self._older()
            taken = kept.pop(0)
        self.allocations += 1
        block = self.pool.blocks[taken]
        last = block.block_hash is not None and not self.others(block)
        if last:
            self.lost.append(block.block_hash)
        if kept is not None and last and block.block_hash.endswith(b"kv"):
            self.ghosts.pop(block.block_hash, None)
            self.ghosts[block.block_hash] = (self.protected[taken], self.allocations)
            if self.protected[taken]:
                self.ep += 1
            else:
                self.eu += 1
        self.protected[taken] = start_protected
        self.going.append(block)
        return taken

    def _older(self):
        if not self.old or not self.new:
            return self.old or self.new
        more, less = self.RATIOS[self.j]
        new_age = self.clock - self.stamp[self.new[0]] + 1
        old_age = self.clock - self.stamp[self.old[0]] + 1
        return self.new if more * new_age >= less * old_age else self.old

    def unhashed(self, block):
        for ids in (self.copies, self.old, self.new):
            if block.block_id in ids:
                ids.remove(block.block_id)
                self.free.append(block.block_id)

    def reset(self):
        everything = [i for ids in self.lists() for i in ids]
        for ids in self.lists():
            ids.clear()
        self.free += everything
        self.ghosts.clear()


class Pair:
    """A queue and the reference, driven with the same events and compared after each.

    Where nobody `listens` for lost keys, a queue need not ask the pool of every block. `pool` is
    an engine's own, by the methods of `Pool`.
    """

    def __init__(self, queue_of, total, *, listens=True, pool=None):
        self.pool = Pool(total) if pool is None else pool
        self.queue = self.pool.queue = queue_of(self.pool)
        self.reference = ReferenceReuse(self.pool)
        blocks = [block for block in self.pool.blocks if not block.is_null]
        self.queue.append_n(blocks)
        self.lost = []
        self.listens = listens
        if listens:
            self.queue.lost = self.lost.append
        for block in blocks:
            self.reference.append(block)
        self.used: list[Block] = []

    def allocate(self, n, *, protected=False):
        self.queue.start_protected = protected
        expected = [self.reference.popleft(start_protected=protected) for _ in range(n)]
        taken = self.pool.allocate(n)
        self.reference.going.clear()
        assert [b.block_id for b in taken] == expected
        assert self.lost == (self.reference.lost if self.listens else [])
        self.used += taken
        return taken

    def touch(self, key):
        block = self.pool.any_block(key)
        uses = block.ref_cnt
        if uses == 0:
            self.reference.remove(block)
        self.reference.protected[block.block_id] = True
        self.pool.touch(block)
        assert block.ref_cnt == uses + 1
        self.used.append(block)
        return block

    def free(self, blocks: Sequence[Block]):
        for block in blocks:
            self.used.remove(block)
        going = [b for b in blocks if b.ref_cnt == 1]
        self.reference.prepend_n([b for b in going if b.block_hash is None])
        for block in going:
            if block.block_hash is not None:
                self.reference.append(block)
        self.pool.free(blocks)

    def looked_up(self, missing):
        self.reference.looked_up(missing)
        self.queue.looked_up([key.removesuffix(b"kv") for key in missing])

    def put_apart(self, key):
        self.pool.cached.set_has_checkpoint(key, True)
        self.reference.apart.add(key)

    def no_longer_apart(self, key):
        self.pool.cached.set_has_checkpoint(key, False)
        self.reference.apart.remove(key)

    def evict(self, block):
        if block.block_hash is not None:
            self.pool.evict(block)
            self.reference.unhashed(block)

    def reset(self):
        self.reference.reset()
        self.pool.reset()

    def check(self):
        assert [b.block_id for b in self.queue.get_all_free_blocks()] == [
            i for ids in self.reference.lists() for i in ids
        ]
        free = [b for b in self.pool.blocks if b.ref_cnt == 0 and not b.is_null]
        assert self.queue.num_free_blocks == len(free)
        assert self.queue.ratio == self.reference.j

    def random_event(self, rng: random.Random, keys: Sequence[bytes]):
        free = self.queue.num_free_blocks
        match rng.choices(
            ("allocate", "hash", "touch", "free", "look", "evict", "apart", "reset"),
            (30, 30, 12, 26, 8, 1, 1, 0.02),
        )[0]:
            case "allocate" if free:
                n = rng.randint(1, min(free, 3))
                for block in self.allocate(n, protected=rng.random() < 0.4):
                    if rng.random() < 0.8:
                        self.pool.set_hash(block, rng.choice(keys))
            case "hash":
                bare = [b for b in self.used if b.block_hash is None]
                if bare:
                    self.pool.set_hash(rng.choice(bare), rng.choice(keys))
            case "touch" if len(self.pool.cached):
                self.touch(rng.choice(sorted({b.block_hash for b in self.pool.blocks} - {None})))
            case "free" if self.used:
                chosen = dict.fromkeys(rng.choices(self.used, k=rng.randint(1, 4)))
                self.free(list(chosen))
            case "look":
                self.looked_up(rng.sample(keys, 4))
            case "evict":
                self.evict(rng.choice(self.pool.blocks))
            case "apart":
                key = rng.choice(keys)
                if key in self.reference.apart:
                    self.no_longer_apart(key)
                elif len(self.reference.apart) < 3:
                    self.put_apart(key)
            case "reset" if not self.used:
                self.reset()
