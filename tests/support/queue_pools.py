"""Small pools of blocks with a native queue each."""

from statecache._blocks import FifoQueue, ReuseQueue
from support.block_pool import Pool


def pool_of(total, queue_of, *more):
    pool = Pool(total)
    pool.queue = queue_of(pool.cached, *more)
    pool.queue.append_n(pool.blocks)
    return pool


def reuse(total):
    return pool_of(total, ReuseQueue, b"kv")


def fifo(total):
    return pool_of(total, FifoQueue)


def cached(pool, *keys, protected=None):
    """Blocks that a request computed and let go, the last one first."""
    if protected is not None:
        pool.queue.start_protected = protected
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.set_hash(block, key)
    pool.free(blocks[::-1])
    return [block.block_id for block in blocks]


def order(pool):
    return [block.block_id for block in pool.queue.get_all_free_blocks()]
