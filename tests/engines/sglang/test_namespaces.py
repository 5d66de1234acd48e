"""Requests of one namespace reuse nothing of another, in the cache and in what the plugin names."""

from array import array
from itertools import product

import pytest
from cache_layer import CORES, Traffic, plugin
from schedule_loop import Loop, serve

from statecache.index import keyed_index
from statecache.trace.recorder import BlockIds
from statecache_sglang import reporting
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
    return scheduler_seams.namespace_of(req)


# To SGLang 0.5.23 these four are one namespace (docs/upstream), here they are four.
SPELLINGS = [
    {"extra_key": "abc"},
    {"extra_key": "ab", "lora_id": "c"},
    {"extra_key": "a", "lora_id": "bc"},
    {"lora_id": "abc"},
]


def test_a_name_says_which_part_of_a_key_is_the_adapter():
    with plugin(policy="learned"):
        run = Loop(Traffic("rust", rows=32, longest=2_000), 4_000)
        reqs = [run.add(TOKENS, **spelling) for spelling in SPELLINGS]
        assert len({req.extra_key for req in reqs}) == 1
        assert len({name(req) for req in reqs}) == 4
        ids = BlockIds(b"key")
        recorded = [ids.of(scheduler_seams.ended(req, req.origin_input_ids))[0] for req in reqs]
        assert len(set(recorded)) == 4
        run.step()
        assert run.traffic.core.scheduler_side.counts.numbers.get("head_waits", 0) == 0


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", ["gds", "learned"])
@pytest.mark.parametrize(("first", "second"), list(product(range(4), repeat=2)))
def test_a_state_that_another_adapter_left_is_refused(core, policy, first, second):
    """SGLang finds it; the slot says whose it is. It is an anomaly, and the prompt is computed."""
    with plugin(policy=policy, checkpoints="int8", checkpoint_slots=8):
        run = Loop(Traffic(core, rows=32, longest=2_000), 2_000)
        run.add(TOKENS, **SPELLINGS[first])
        run.run()
        asked = run.add([*TOKENS, 1], **SPELLINGS[second])
        run.run()
        same = first == second
        assert run.hits[asked.rid] == (1_200 if same else 0)
        counted = reporting.sample(run.traffic.cache)
        assert counted.get("restore_mismatches|prefix", 0) == counted["anomalies"] == (not same)
        again = run.add([*TOKENS, 1, 2], **SPELLINGS[second])
        run.run()
        assert run.hits[again.rid] == 1_201
        run.traffic.core.scheduler_side.registry.check()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("empty", "states"), [({"extra_key": ""}, 2), ({"cache_salt": ""}, 1)])
def test_an_empty_key_is_a_namespace_and_an_empty_salt_none_as_sglang_has_it(core, empty, states):
    """A record fits wherever SGLang finds a state, and no key is two states' at once."""
    with plugin(policy="learned", checkpoints="int8", checkpoint_slots=8):
        run = Loop(Traffic(core, rows=32, longest=2_000), 2_000)
        for more in ({}, empty):
            run.add(TOKENS, **more)
            run.run()
        assert len(run.traffic.core.scheduler_side.registry) == states
        for more in ({}, empty):
            made = run.add([*TOKENS, 1], **more)
            run.run()
            assert run.hits[made.rid] == 1_200
        run.traffic.check()


class Hashed:
    """A hash that counts the bytes it is given."""

    bytes = 0

    def __init__(self, data=b"", **options):
        self._hash = options.pop("hash", None) or keyed_index_blake2b(**options)
        self.update(data)

    def update(self, data):
        Hashed.bytes += len(data)
        self._hash.update(data)

    def digest(self):
        return self._hash.digest()

    def copy(self):
        return Hashed(hash=self._hash.copy())


keyed_index_blake2b = keyed_index.blake2b


@pytest.mark.parametrize(
    ("given", "hashed"),
    [
        ({"policy": "gds"}, 0),
        ({"policy": "gds", "checkpoints": "int8", "checkpoint_slots": 8}, 1_024),
        ({"policy": "learned"}, 1_024 + 256 + 1_024),
        (
            {"policy": "learned", "checkpoints": "int8", "checkpoint_slots": 8},
            1_024 + 256 + 1_024,
        ),
    ],
)
def test_how_many_tokens_of_a_prompt_are_hashed(given, hashed, monkeypatch):
    """All once for the state at its end, whoever asks for the key.

    At admission learned looks for the points it knows: all once, and the last stride once more for
    the end.
    """
    tokens = list(range(1_024))
    with plugin(**given):
        traffic = Traffic("rust", rows=32, longest=2_000)
        monkeypatch.setattr(keyed_index, "blake2b", Hashed)
        Hashed.bytes = 0
        serve(traffic, tokens, 2_000)
        assert Hashed.bytes == 8 * hashed
