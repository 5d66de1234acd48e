"""The order `reuse` against its definition, block for block, over random events."""

import random

from statecache._blocks import ReuseQueue
from support.block_pool import Pair

TOTAL = 24
KEYS = [b"%dkv" % i for i in range(20)] + [b"%dstate" % i for i in range(10)]


def queue_of(pool):
    return ReuseQueue(pool.cached, b"kv")


def test_the_queue_equals_its_definition_over_200_000_events(share):
    """Ten seeds, in half of them nobody listens; every block handed out is compared.

    The whole order is compared after every 10th event.
    """
    seen = set()
    for seed in range(10):
        pair = Pair(queue_of, TOTAL, listens=seed % 2 == 0)
        rng = random.Random(seed)
        for step in range(int(20_000 * share)):
            pair.random_event(rng, KEYS)
            if step % 10 == 0:
                pair.check()
            seen.add(pair.queue.ratio)
        pair.free(list(dict.fromkeys(pair.used)))
    assert len(seen) > 1, "the ratio was never learnt"
