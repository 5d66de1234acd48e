"""First in, first out against a plain list, block for block, over random events."""

import random

from statecache._blocks import FifoQueue
from support.block_pool import Pool

TOTAL = 24
KEYS = [b"%dkv" % i for i in range(30)]


class Plain:
    """First in, first out, as in the free queue of vLLM; keys that are apart go to the front."""

    def __init__(self, pool):
        self.free = [block.block_id for block in pool.blocks]
        self.apart = set()

    def let_go(self, blocks):
        self.free[:0] = [block.block_id for block in blocks if block.block_hash is None]
        for block in blocks:
            if block.block_hash in self.apart:
                self.free.insert(0, block.block_id)
            elif block.block_hash is not None:
                self.free.append(block.block_id)


def random_event(rng, pool, plain, used):
    kind = rng.choice(("allocate", "hit", "free", "free", "evict", "apart"))
    if kind == "allocate" and plain.free:
        count = rng.randint(1, min(3, len(plain.free)))
        taken = pool.allocate(count)
        assert [block.block_id for block in taken] == plain.free[:count]
        del plain.free[:count]
        used += taken
        for block in taken:
            if rng.random() < 0.8:
                pool.set_hash(block, rng.choice(KEYS))
    elif kind == "hit":
        block = pool.any_block(rng.choice(KEYS))
        if block is not None and block.ref_cnt == 0:
            plain.free.remove(block.block_id)
            pool.touch(block)
            used.append(block)
    elif kind == "free" and used:
        blocks = rng.sample(used, rng.randint(1, min(4, len(used))))
        for block in blocks:
            used.remove(block)
        plain.let_go(blocks)
        pool.free(blocks)
    elif kind == "evict" and rng.random() < 0.1:
        pool.evict(rng.choice(pool.blocks))  # which moves no block
    elif kind == "apart" and rng.random() < 0.1:
        key = rng.choice(KEYS)
        plain.apart ^= {key}
        pool.cached.set_has_checkpoint(key, key in plain.apart)
    if not used and rng.random() < 0.1:
        pool.reset()  # which moves none either


def run(seed, steps):
    rng = random.Random(seed)
    pool = Pool(TOTAL)
    pool.queue = FifoQueue(pool.cached)
    pool.queue.append_n(pool.blocks)
    plain, used = Plain(pool), []
    for _ in range(steps):
        random_event(rng, pool, plain, used)
        assert [b.block_id for b in pool.queue.get_all_free_blocks()] == plain.free
    assert pool.queue.num_free_blocks == len(plain.free)


def test_the_queue_equals_its_definition_over_200_000_events(share):
    """Ten seeds; the whole order is compared after every event."""
    for seed in range(10):
        run(seed, int(20_000 * share))
