"""`learned` as the engines call it: states by number, prefixes by key."""

from __future__ import annotations

from array import array

import pytest

from statecache import CostModel
from statecache.engine.settings import Settings
from statecache.index.keyed_index import LruKeySet, PrefixKeyedIndex, TokenPrefixes
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import serve
from statecache.trace.format import BLOCK_TOKENS, read_trace
from statecache.trace.generate_mixed import MixedWorkload, mixed_lines
from statecache_vllm.checkpoints import CheckpointManager


def numbers(count: int, start: int = 0) -> array[int]:
    return array("q", range(start, start + count))


def test_known_prefixes_of_a_prompt_are_found_wherever_they_end() -> None:
    """256 tokens are a stride: ends at its edges, inside, and two in one."""
    prefixes = TokenPrefixes(100)
    tokens = numbers(600)
    for depth in (1, 256, 257, 300, 512, 600):
        assert prefixes.note(tokens, depth, b"") == prefixes.key(tokens, depth, b"")
    keys, depths, offered = prefixes.path(numbers(599), b"", [])
    assert depths == [1, 256, 257, 300, 512]
    assert keys == [prefixes.key(tokens, depth, b"") for depth in depths]
    assert offered == []


def test_other_tokens_and_another_namespace_are_other_prefixes() -> None:
    prefixes = TokenPrefixes(100)
    prefixes.note(numbers(300), 300, b"")
    prefixes.note(numbers(300), 10, b"")
    changed = numbers(300)
    changed[20] = -1
    assert prefixes.path(changed, b"", [])[1] == [10]
    assert prefixes.path(numbers(300), b"other", [])[1] == []


def test_what_is_offered_is_on_the_path_and_known_afterwards() -> None:
    prefixes = TokenPrefixes(100)
    prefixes.note(numbers(40), 20, b"")
    keys, depths, offered = prefixes.path(numbers(40), b"", [30, 40])
    assert depths == [20, 30, 40]
    assert offered == keys[1:]
    assert prefixes.path(numbers(50), b"", [])[1] == [20, 30, 40]


def test_the_oldest_prefix_is_forgotten_and_nothing_stays_of_it() -> None:
    prefixes = TokenPrefixes(2)
    prefixes.note(numbers(400), 300, b"")
    prefixes.note(numbers(400), 310, b"")
    prefixes.note(numbers(400), 300, b"")  # the latest again
    prefixes.note(numbers(400), 5, b"")
    assert prefixes.path(numbers(400), b"", [])[1] == [5, 300]
    prefixes.note(numbers(400), 6, b"")
    prefixes.note(numbers(400), 7, b"")
    assert len(prefixes) == len(prefixes._place) == 2
    assert len(prefixes._depths) == 1


def test_a_key_offered_again_is_the_latest() -> None:
    known = LruKeySet(2)
    assert [known.add(key) for key in (1, 2, 1, 3)] == [None, None, None, 2]
    assert [key in known for key in (1, 2, 3)] == [True, False, True]


def test_a_state_keeps_its_prefix_when_its_number_changes() -> None:
    """State 1 is evicted and back as state 2: the ghost is gone, for it is the same prefix."""
    index = PrefixKeyedIndex("learned", CostModel(1, 0), slots=4)
    index.name(1, 77, end=True)
    index.insert(1, 512)
    assert index.evict(1) == [1]
    assert index.index.ghosts == 1
    index.name(2, 77, end=True)
    index.insert(2, 512)
    assert index.index.ghosts == 0
    assert index.evict(1) == [2]
    index.check()


def test_a_resident_state_keeps_its_key_whatever_it_is_named_next() -> None:
    """An engine that takes two prefixes for one caches the second on the node of the first."""
    index = PrefixKeyedIndex("learned", CostModel(), 4)
    index.name(1, 100, end=True)
    index.insert(1, 10)
    index.name(1, 200, end=True)
    index.touch(1)
    index.check()
    index.erase(1)
    assert len(index) == 0


def test_what_lost_its_kv_is_no_ghost() -> None:
    index = PrefixKeyedIndex("learned", CostModel(1, 0), slots=4)
    for state in (1, 2):
        index.name(state, 70 + state, end=True)
        index.insert(state, 512)
        index.erase(state)
    index.lost(1)
    index.lost(1)
    assert index.index.ghosts == 1
    index.drop([72])
    assert index.index.ghosts == 0


def test_names_of_states_that_left_are_bounded() -> None:
    index = PrefixKeyedIndex("learned", CostModel(1, 0), slots=2, ghosts=3)
    for state in range(20):
        index.name(state, state, end=False)
        index.insert(state, 512)
        index.erase(state)
    assert len(index._gone) == 5
    index.check()


@pytest.mark.parametrize("admission", ["dense", "ends"])
@pytest.mark.parametrize("kv_tokens", [None, 600 * BLOCK_TOKENS])
def test_the_checkpoints_of_vllm_hit_and_evict_what_the_replay_does(
    tmp_path_factory: pytest.TempPathFactory, admission: str, kv_tokens: int | None
) -> None:
    """The same requests through the replay, and as vLLM's scheduler calls the checkpoints."""
    workload = MixedWorkload(requests=400, sessions=20, subagents=3, most_blocks=60, seed=5)
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    file.write_bytes(b"".join(mixed_lines(workload)))
    tree = PrefixTree.of(read_trace(str(file)))
    kv = kv_timeline(tree, kv_tokens)
    schedule = make_schedule(tree, kv, admission, chunk_tokens=8 * BLOCK_TOKENS)
    expected = serve(schedule, "learned", 16, CostModel())
    given = Settings.from_given({"kv_cache_plugin": "statecache", "policy": "learned"}, {})
    checkpoints = CheckpointManager(given, 16, BLOCK_TOKENS, lambda _hash, _resident: None)
    hits = []
    served = [r for r, resident in enumerate(kv.resident) if resident >= 0]
    for r, request in zip(served, schedule.requests, strict=True):
        path = [node.to_bytes(8, "little") for node in tree.paths[r]]
        resident = request.resident_tokens // BLOCK_TOKENS
        ends = [schedule.depths[c] // BLOCK_TOKENS for c in request.admitted]
        checkpoints.tree.requested(path, request.prompt_tokens, ends, resident * BLOCK_TOKENS)
        hit = checkpoints.lookup(path[:resident], 0)
        depth = 0
        if hit is not None:
            depth = checkpoints.tree.depth_of(hit[0])
            checkpoints.restored(hit[0])
            checkpoints.tree.pin(hit[0])
        hits.append(depth * BLOCK_TOKENS)
        for node in kv.dropped[r]:
            checkpoints.drop_below(node.to_bytes(8, "little"))
        for end in ends:
            if end > depth:
                made = checkpoints.prepare_store(path[:end], end=end == ends[-1])
                checkpoints.complete_store([made[0]] if made else [], [])
        if hit is not None and hit[0] in checkpoints.tree:
            checkpoints.tree.unpin(hit[0])
        checkpoints.check()
    assert hits == expected[0]
    assert checkpoints.counts.evicted == expected[1] > 50
    assert checkpoints.tree.sample()["learned_points"] > 0
