"""Requests of one namespace reuse nothing of another, in the cache and in what the plugin names."""

from array import array
from itertools import product

import pytest
from cache_layer import Traffic, plugin
from schedule_loop import Loop

from statecache.trace.recorder import BlockIds
from statecache_sglang.scheduler_side import namespace_of
from statecache_sglang.seams import scheduler as scheduler_seams

NAMESPACES = {
    "base": {},
    "salt X": {"cache_salt": "X"},
    "adapter X": {"lora_id": "X"},
    "adapter X, salt X": {"lora_id": "X", "cache_salt": "X"},
    "adapter X, reloaded": {"lora_id": "X2"},  # SGLang gives it a new id
}
TOKENS = list(range(1_200))


@pytest.mark.parametrize(("first", "second"), list(product(NAMESPACES, repeat=2)))
def test_the_second_reuses_what_the_first_left_only_if_it_is_the_same(first, second):
    """KV and states; points of learned; the head that is waited for; ids that are recorded."""
    same = first == second
    with plugin(policy="learned"):
        run = Loop(Traffic("rust", rows=32, longest=2_000), 2_000)
        left = run.add(TOKENS, **NAMESPACES[first])
        run.run()
        asked = run.add([*TOKENS, 1], **NAMESPACES[second])
        side = run.traffic.core.scheduler_side
        known = side.registry._prefixes.path(array("q", TOKENS), name(asked), [])[1]
        assert known == ([1_200] if same else [])
        run.run()
        assert run.hits[asked.rid] == (1_200 if same else 0)
        run.traffic.check()
        ids = BlockIds(b"key")
        recorded = [
            set(ids.of(scheduler_seams.ended(r, r.origin_input_ids))) for r in (left, asked)
        ]
        assert bool(recorded[0] & recorded[1]) is same

        run = Loop(Traffic("rust", rows=32, longest=2_000), 2_000)
        run.add([*TOKENS, 2], **NAMESPACES[first])
        run.add([*TOKENS, 3], **NAMESPACES[second])
        run.step()
        waits = run.traffic.core.scheduler_side.counts.numbers.get("head_waits", 0)
        assert waits == same


def name(req) -> bytes:
    return namespace_of(req.extra_key, req.cache_salt, req.lora_id)


def test_a_name_says_which_part_of_a_key_is_the_adapter():
    """To SGLang 0.5.23 these four are one namespace (docs/upstream), here they are four."""
    spellings = [
        {"extra_key": "abc"},
        {"extra_key": "ab", "lora_id": "c"},
        {"extra_key": "a", "lora_id": "bc"},
        {"lora_id": "abc"},
    ]
    with plugin(policy="learned"):
        run = Loop(Traffic("rust", rows=32, longest=2_000), 4_000)
        reqs = [run.add(TOKENS, **spelling) for spelling in spellings]
        assert len({req.extra_key for req in reqs}) == 1
        assert len({name(req) for req in reqs}) == 4
        ids = BlockIds(b"key")
        recorded = [ids.of(scheduler_seams.ended(req, req.origin_input_ids))[0] for req in reqs]
        assert len(set(recorded)) == 4
        run.step()
        assert run.traffic.core.scheduler_side.counts.numbers.get("head_waits", 0) == 0
