"""What the plugin drops, one after the other, against the references, on vLLM's real pool.

20,000 operations each: the order `reuse` against its definition, `stock` against vLLM's own queue,
and the states of the checkpoint pool against the reference index, under the real scheduler.
"""

import random
from collections.abc import Iterator

import pytest
import test_block_hash_index
from scheduled import Run, traffic
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from statecache import ReferenceCost, ReferenceIndex, StateIndex
from statecache._blocks import BlockHashIndex, ReuseQueue
from statecache_vllm import seams, state_tree
from support.block_pool import Pair

OPERATIONS = 20_000
TOTAL = 24
KEYS = [b"%dkv" % i for i in range(20)] + [b"%dstate" % i for i in range(10)]


class Block(KVCacheBlock):
    """A block that is itself alone, whatever another one holds: `Pair` looks for blocks."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class RealPool:
    """vLLM's `BlockPool` with the plugin's map and queue, by the names that `Pair` uses."""

    def __init__(self, monkeypatch, total):
        monkeypatch.setattr(block_pool, "KVCacheBlock", Block)
        self.pool = block_pool.BlockPool(total, enable_caching=True, hash_block_size=16)
        self.blocks = self.pool.blocks
        self.cached = BlockHashIndex(self.blocks)
        self.pool.free_block_queue.popleft_n(total - 1)
        seams.set_block_map(self.pool, self.cached)
        self.allocate, self.free = self.pool.get_new_blocks, self.pool.free_blocks
        self.any_block = self.cached.get_one_block

    @property
    def queue(self):
        return self.pool.free_block_queue

    @queue.setter
    def queue(self, queue):
        seams.set_free_queue(self.pool, queue)

    def touch(self, *blocks):
        self.queue.touch(blocks)

    def set_hash(self, block, key):
        self.pool._insert_block_hash(key, block, num_tokens=16)

    def evict(self, block):
        self.pool.evict_blocks({block.block_id})
        self.queue.unhashed(block)

    def reset(self):
        self.cached.clear()
        for block in self.blocks:
            block.reset_hash()
        self.queue.reset()


@pytest.mark.parametrize("listens", [False, True])
def test_reuse_drops_what_its_definition_drops(monkeypatch, share, listens):
    pool = RealPool(monkeypatch, TOTAL)
    pair = Pair(lambda own: ReuseQueue(own.cached, b"kv"), TOTAL, listens=listens, pool=pool)
    rng = random.Random(7)
    for step in range(int(OPERATIONS * share)):
        pair.random_event(rng, KEYS)
        if step % 10 == 0:
            pair.check()


def test_stock_drops_what_vllms_own_queue_drops(share):
    """Five blocks, some of them free, and whatever the pool does with a full and a free one."""
    pools = test_block_hash_index.pools()
    rng, used, taken = random.Random(8), [[], []], 0
    for number in range(int(OPERATIONS * share)):
        event = rng.random()
        count = rng.randint(1, 3)
        chosen = rng.sample(range(len(used[0])), min(len(used[0]), count))
        log = []
        for pool, mine in zip(pools, used, strict=True):
            if event < 0.5 and pool.get_num_free_blocks() >= count:
                fresh = pool.get_new_blocks(count)
                if event < 0.4:
                    pool._insert_block_hash(b"%d" % (number % 9), fresh[0], num_tokens=16)
                mine += fresh
                log.append([block.block_id for block in fresh])
            elif event < 0.6:
                found = pool.cached_block_hash_to_block.get_one_block(b"%d" % (number % 9))
                if found is not None:
                    pool.touch([found])
                    mine.append(found)
                log.append(found and found.block_id)
            else:
                gone = [mine[at] for at in chosen]
                mine[:] = [block for at, block in enumerate(mine) if at not in chosen]
                pool.free_blocks(gone)
                log.append([block.block_id for block in gone])
        assert log[0] == log[1]
        taken += event < 0.5
    assert taken > OPERATIONS * share / 4
    orders = [pool.free_block_queue.get_all_free_blocks() for pool in pools]
    assert len({tuple(block.block_id for block in order) for order in orders}) == 1


class BothIndexes:
    """The native index and the reference, asked the same."""

    calls = 0
    evicted: list[int]

    def __init__(self, policy, cost):
        same = ReferenceCost(cost.linear, cost.quadratic)
        self._both = StateIndex(policy, cost), ReferenceIndex(policy, same)

    def __getattr__(self, name):
        def both(*args, **named):
            BothIndexes.calls += 1
            args = [list(given) if isinstance(given, Iterator) else given for given in args]
            native, reference = (getattr(index, name)(*args, **named) for index in self._both)
            assert native == reference
            if name == "evict":
                BothIndexes.evicted += native
            return native

        return both

    def __len__(self):
        native, reference = map(len, self._both)
        assert native == reference
        return native

    def __contains__(self, state):
        native, reference = (state in index for index in self._both)
        assert native == reference
        return native


@pytest.mark.parametrize("policy", ["lru", "gds"])
def test_the_states_that_go_are_those_of_the_reference(monkeypatch, model, share, policy):
    monkeypatch.setattr(state_tree, "StateIndex", BothIndexes)
    BothIndexes.calls, BothIndexes.evicted = 0, []
    pool = {"checkpoints": "native", "checkpoint_slots": 16, "policy": policy}
    for seed in range(100):
        run = Run(model, blocks=70, plugin={**pool, "checkpoint_interval": 16})
        for _ in traffic(run, seed, 1000):
            if BothIndexes.calls > OPERATIONS * share:
                break
        assert run.scheduler_side.faults.anomalies == 0
        if BothIndexes.calls > OPERATIONS * share:
            break
    assert BothIndexes.calls > OPERATIONS * share
    assert len(BothIndexes.evicted) > OPERATIONS * share / 50
