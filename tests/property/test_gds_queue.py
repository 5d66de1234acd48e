"""The order `gds` against its definition in plain lists, block for block, over random events."""

import random

from statecache import CostModel, StateIndex
from statecache._blocks import GdsQueue
from support.block_pool import Pool

TOTAL = 24
GROUPS = [b"a", b"b"]
NAMES = [b"%d" % i for i in range(6)]
KEYS = [name + ending for name in NAMES for ending in (*GROUPS, b"kv")]
COST = (1.0, 0.0)


class Plain:
    """Blocks by id; a state is [its number, when it was last freed, its free blocks]."""

    def __init__(self, pool):
        self.pool = pool
        self.index = StateIndex("gds", CostModel(*COST))
        self.free = [block.block_id for block in pool.blocks]
        self.others, self.of_states = [], []
        self.time, self.states, self.gone = {}, {}, []
        self.apart = set()
        self.clock = TOTAL

    def key(self, block_id):
        return self.pool.blocks[block_id].block_hash

    def state_of(self, key):
        return self.states.get(key[:-1]) if key is not None and key[-1:] in GROUPS else None

    def is_whole(self, state):
        return {self.key(block)[-1:] for block in state[2]} == set(GROUPS)

    def committed(self, number, name):
        self.index.pin(number)
        self.states[name] = [number, 0, []]

    def put_back(self, block_id):
        self.clock += 1
        self.time[block_id] = self.clock
        key = self.key(block_id)
        state = self.state_of(key)
        if key is None or key in self.apart:
            self.free.append(block_id)
        elif state is None:
            self.others.append(block_id)
        else:
            was = self.is_whole(state)
            self.of_states.append(block_id)
            state[1] = self.clock
            state[2].append(block_id)
            if self.is_whole(state) and not was:
                self.index.unpin(state[0])

    def release(self, state):
        for block_id in sorted(state[2]):
            self.of_states.remove(block_id)
            self.free.append(block_id)
        del self.states[next(name for name, one in self.states.items() if one is state)]
        self.gone.append(state[0])

    def cheapest(self):
        self.index.begin_walk()
        number = self.index.next_victim()
        self.index.end_walk()
        return next((one for one in self.states.values() if one[0] == number), None)

    def next(self):
        if self.free:
            return self.free.pop(0)
        state = self.cheapest()
        if state and (not self.others or state[1] < self.time[self.others[0]]):
            assert self.index.evict(1) == [state[0]]
        elif self.others:
            return self.others.pop(0)
        else:
            state = self.state_of(self.key(self.of_states[0]))
            self.index.erase(state[0])
        self.release(state)
        return self.free.pop(0)

    def take(self, count):
        taken = [self.next() for _ in range(count)]
        for at, block_id in enumerate(taken):
            key = self.key(block_id)
            left = [b for b in self.pool.blocks if b.block_hash == key]
            state = self.state_of(key)
            if state and all(b.block_id in taken[: at + 1] for b in left):
                self.index.erase(state[0])
                self.release(state)
        return taken

    def hit(self, block_id):
        if block_id in self.of_states:
            state = self.state_of(self.key(block_id))
            was = self.is_whole(state)
            self.of_states.remove(block_id)
            state[2].remove(block_id)
            if was and not self.is_whole(state):
                self.index.pin(state[0])
        else:
            (self.free if block_id in self.free else self.others).remove(block_id)

    def emptied(self, block_id):
        if block_id in self.of_states:
            state = self.state_of(self.key(block_id))
            self.index.erase(state[0])
            self.release(state)
        elif block_id in self.others:
            self.others.remove(block_id)
            self.free.append(block_id)


class Pair:
    """A queue with its index and the plain order, driven with the same events."""

    def __init__(self):
        self.pool = Pool(TOTAL)
        self.index = StateIndex("gds", CostModel(*COST))
        self.queue = self.pool.queue = GdsQueue(self.pool.cached, self.index, GROUPS)
        self.plain = Plain(self.pool)
        self.queue.append_n(self.pool.blocks)
        self.used, self.last, self.evicted = [], 0, 0

    def allocate(self, rng):
        count = rng.randint(1, min(3, self.queue.num_free_blocks))
        expected = self.plain.take(count)
        taken = self.pool.allocate(count)
        assert [block.block_id for block in taken] == expected
        self.used += taken
        for block in taken:
            if rng.random() < 0.8:
                self.pool.set_hash(block, rng.choice(KEYS))

    def hit(self, key):
        block = self.pool.any_block(key)
        if block is not None and block.ref_cnt == 0:
            self.plain.hit(block.block_id)
            self.pool.touch(block)
            self.used.append(block)

    def free(self, blocks):
        for block in blocks:
            self.used.remove(block)
        self.plain.free[:0] = [b.block_id for b in blocks if b.block_hash is None]
        for block in blocks:
            if block.block_hash is not None:
                self.plain.put_back(block.block_id)
        self.pool.free(blocks)

    def commit(self, rng, name):
        gone = self.queue.take_gone()
        assert gone == self.plain.gone
        self.evicted += len(gone)
        self.plain.gone = []
        if name in self.plain.states:
            return
        self.last += 1
        depth = rng.randint(1, 9)
        for index in (self.index, self.plain.index):
            index.insert(self.last, depth)
        self.plain.committed(self.last, name)
        self.queue.committed(self.last, name)

    def evict(self, block):
        if block.block_hash is not None:
            if block.ref_cnt == 0:
                self.plain.emptied(block.block_id)
            self.pool.evict(block)

    def event(self, rng):
        kind = rng.choice(("allocate", "hit", "free", "free", "commit", "evict", "apart"))
        if kind == "allocate" and self.queue.num_free_blocks:
            self.allocate(rng)
        elif kind == "hit":
            self.hit(rng.choice(KEYS))
        elif kind == "free" and self.used:
            self.free(rng.sample(self.used, rng.randint(1, min(4, len(self.used)))))
        elif kind == "commit":
            self.commit(rng, rng.choice(NAMES))
        elif kind == "evict" and rng.random() < 0.1:
            self.evict(rng.choice(self.pool.blocks))
        elif kind == "apart" and rng.random() < 0.1:
            key = rng.choice(KEYS)
            self.plain.apart ^= {key}
            self.pool.cached.set_has_checkpoint(key, key in self.plain.apart)

    def check(self):
        order = [block.block_id for block in self.queue.get_all_free_blocks()]
        assert order == self.plain.free + self.plain.others + self.plain.of_states
        assert len(self.index) == len(self.plain.index) == len(self.plain.states)


def test_the_queue_equals_its_definition_over_200_000_events(share):
    """Ten seeds; every block handed out is compared, the whole order after every 5th event."""
    evicted = 0
    for seed in range(10):
        pair, rng = Pair(), random.Random(seed)
        for step in range(int(20_000 * share)):
            pair.event(rng)
            if step % 5 == 0:
                pair.check()
        evicted += pair.evicted
    assert evicted > 100
