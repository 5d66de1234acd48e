"""What the block policy `reuse` hears of lookups; its hits are counted as vLLM counts them."""

import random

from scheduled import Run, words

from statecache._blocks import ReuseQueue


def heard_by_the_order(monkeypatch):
    """What a `ReuseQueue` is told: missing keys, whose blocks come next."""
    heard = {"looked_up": [], "start_protected": []}

    def listening(name, original, note):
        def call(queue, what):
            heard[name].append(note(what))
            return original(queue, what)

        return call

    monkeypatch.setattr(ReuseQueue, "looked_up", listening("looked_up", ReuseQueue.looked_up, list))
    fresh = ReuseQueue.start_protected
    listener = listening("start_protected", fresh.fset, bool)
    monkeypatch.setattr(ReuseQueue, "start_protected", property(fresh.fget, listener))
    return heard


def test_the_order_reuse_hears_of_hits_and_of_what_is_missing(monkeypatch, model):
    """Blocks of 16: ten asked for, then the same and one more, then again after pressure."""
    heard = heard_by_the_order(monkeypatch)
    run = Run(model, blocks=40, plugin={})
    prompt = words(random.Random(5), 161)
    assert run.ask(prompt) == 0
    assert True not in heard["start_protected"]
    assert run.ask([*prompt, *range(16)]) == 160
    # Ten of eleven blocks were found, in the attention group and in the last of each state.
    assert True in heard["start_protected"]
    assert heard["start_protected"][-1] is False
    assert heard["looked_up"] == [[], []]  # nothing had been dropped so far
    for other in range(4):
        run.ask(words(random.Random(10 + other), 320))
    assert run.ask(prompt) == 0
    assert len(heard["looked_up"][-1]) == 10


def test_the_missing_keys_are_those_of_whole_blocks(monkeypatch, model):
    """Blocks of 32 tokens with a hash every 16: of five blocks one is there and four are gone."""
    heard = heard_by_the_order(monkeypatch)
    run = Run(model, blocks=40, block=32, hash_block=16, plugin={})
    prompt = words(random.Random(5), 161)
    run.ask(words(random.Random(6), 800))
    run.ask(words(random.Random(7), 800))  # something was dropped
    run.ask(prompt[:33])
    hashes = run.scheduler.requests[run.add(prompt)].block_hashes
    run.finish()
    assert len(hashes) == 10
    assert heard["looked_up"][-1] == [hashes[at] for at in (3, 5, 7, 9)]


def test_a_request_that_resumes_from_little_is_not_proven(monkeypatch, model):
    """7 of 10 whole blocks are less than three quarters, 8 are not."""
    for whole, proven in ((7, False), (8, True)):
        heard = heard_by_the_order(monkeypatch)
        run = Run(model, blocks=80, plugin={})
        prompt = words(random.Random(5), 161)
        run.ask(prompt[: 16 * whole + 1])
        heard["start_protected"].clear()
        assert run.ask(prompt) == 16 * whole
        assert (True in heard["start_protected"]) == proven
        monkeypatch.undo()


def test_a_request_that_waits_is_a_lookup_of_the_order_once(monkeypatch, model):
    """Two requests of 25 of 39 blocks: the second one is looked up in each step it waits."""
    heard = heard_by_the_order(monkeypatch)
    run = Run(model, blocks=40, plugin={})
    lookups = []
    original = run.scheduler.kv_cache_manager.get_computed_blocks

    def looking(request, *limit):
        lookups.append(request.request_id)
        return original(request, *limit)

    run.scheduler.kv_cache_manager.get_computed_blocks = looking
    names = [run.add(words(random.Random(seed), 350), tokens=8) for seed in (1, 2)]
    run.finish()
    assert lookups.count(names[1]) > 2
    assert len(heard["looked_up"]) == 2


def test_a_hit_is_counted_as_vllms_own_touch_counts_it(model):
    """Uses of each block, what is free, and what vLLM's collector of metrics hears.

    The null block is none that is used, from vLLM 0.33 on.
    """

    class Collector:
        def __init__(self):
            self.accessed = []

        def on_block_accessed(self, block):
            self.accessed.append(block.block_id)

    vllms, pool = Run(model, blocks=40).pool, Run(model, blocks=40, plugin={}).pool
    free = pool.get_num_free_blocks()
    heard, uses = [], []
    for own in (vllms, pool):
        own.metrics_collector = collector = Collector()
        once, two, null = own.blocks[5], own.blocks[6], own.null_block
        nulls = null.ref_cnt
        own.touch([null, once, null, two])
        own.touch((two,))
        heard.append(collector.accessed)
        uses.append((once.ref_cnt, two.ref_cnt, null.ref_cnt - nulls))
    assert pool.get_num_free_blocks() == free - 2
    assert heard[0] == heard[1]
    assert uses[0] == uses[1]
    assert (heard[0], uses[0]) in (([0, 5, 0, 6, 6], (1, 2, 2)), ([5, 6, 6], (1, 2, 0)))
