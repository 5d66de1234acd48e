"""The tree of resident states, and which slot of the checkpoint pool holds which."""

import random

import pytest

from statecache.engine.settings import Settings
from statecache_vllm.checkpoints import CheckpointManager
from statecache_vllm.state_tree import StateTree

BLOCK = 16


def settings(**given):
    return Settings.from_given({"kv_cache_plugin": "statecache", **given}, {})


def path(text):
    """A hash for each letter, which stands for all letters before it too."""
    return [text[: i + 1].encode() for i in range(len(text))]


def tree(*paths):
    made = StateTree(settings(), BLOCK)
    return made, {text: made.put(path(text)) for text in paths}


def test_the_nearest_shallower_state_is_found_on_the_own_path_only():
    made, states = tree("ab", "abcd", "abXY")
    assert made.parent_of(states["ab"]) is None
    assert made.parent_of(states["abcd"]) == states["ab"]
    assert made.parent_of(states["abXY"]) == states["ab"]
    assert made.depth_of(states["abXY"]) == 4
    made.check()


def test_a_state_set_between_two_others_takes_what_is_below_it():
    made, states = tree("abcdef", "abcX")
    middle = made.put(path("abc"))
    assert [made.parent_of(states[text]) for text in states] == [middle, middle]
    made.check()
    made.erase(middle)
    assert [made.parent_of(states[text]) for text in states] == [None, None]
    made.check()


def test_a_state_on_another_branch_takes_nothing():
    made, states = tree("abcd")
    made.put(path("abX"))
    assert made.parent_of(states["abcd"]) is None


def test_without_a_block_everything_below_it_is_worthless():
    made, states = tree("ab", "abcd", "abcdef", "abX", "q")
    assert set(made.depending_on(b"abc")) == {states["abcd"], states["abcdef"]}
    assert set(made.depending_on(b"a")) == {states[t] for t in ("ab", "abcd", "abcdef", "abX")}
    assert made.depending_on(b"zz") == []


def test_the_cheapest_state_goes_first():
    """Gains: 16 tokens from 0 for a; 48 from 16 for abcd. LRU would take abcd, set first."""
    made = StateTree(settings(), BLOCK)
    deep = made.put(path("abcd"))
    shallow = made.put(path("a"))
    assert made.peek() == shallow
    assert made.evict() == shallow
    assert made.parent_of(deep) is None


def test_nothing_is_kept_of_what_led_to_a_state_that_is_gone():
    made, states = tree("abcdef", "abcXYZ", "q")
    assert len(made._run_with) == 10
    made.erase(states["abcXYZ"])
    assert sorted(made._run_with) == sorted([*path("abcdef"), b"q"])
    made.check()
    made.erase(states["abcdef"])
    made.erase(states["q"])
    assert made._run_with == {}
    assert made.put(path("ab")) == 4
    assert made.parent_of(4) is None


def test_random_states_are_known_as_a_plain_search_finds_them():
    rng = random.Random(0)
    made = StateTree(settings(), BLOCK)
    known = {}
    for _ in range(1500):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 7)))
        if rng.random() < 0.6 or not known:
            known[text] = made.put(path(text))
        elif rng.random() < 0.5:
            made.erase(known.pop(rng.choice(sorted(known))))
        else:
            gone = made.evict()
            known = {t: state for t, state in known.items() if state != gone}
        made.check()
        for t, state in known.items():
            above = [t[:n] for n in range(len(t) - 1, 0, -1) if t[:n] in known]
            assert made.parent_of(state) == (known[above[0]] if above else None)
        block = text[: rng.randint(1, len(text))]
        below = {state for t, state in known.items() if t.startswith(block)}
        found = made.depending_on(block.encode())
        assert set(found) == below
        depths = {state: len(t) for t, state in known.items()}
        above = [
            (at, dependent)
            for at, dependent in enumerate(found)
            if made.parent_of(dependent) in below
        ]
        assert all(found.index(made.parent_of(dependent)) < at for at, dependent in above)
        deepest = sorted((t for t in known if text.startswith(t)), key=len, reverse=True)
        assert list(made.on(path(text))) == [known[t] for t in deepest]
        assert [made.depth_of(ancestor) for ancestor in made.on(path(text))] == [
            depths[s] for s in made.on(path(text))
        ]


class Changes(dict):
    def __call__(self, block_hash, resident):
        self[block_hash] = resident


def checkpoints(slots):
    return CheckpointManager(settings(), slots, BLOCK, Changes())


def stored(made, text):
    state, _ = made.prepare_store(path(text))
    made.complete_store([state], [])
    return state


def test_a_state_is_published_when_the_workers_have_stored_it():
    made = checkpoints(2)
    state, slot = made.prepare_store(path("ab"))
    assert made.lookup(path("abc"), 0) is None
    made.complete_store([state], [])
    assert made.lookup(path("abc"), 0) == (state, slot)
    assert made.lookup(path("abc"), 2) is None, "not deeper than what is cached anyway"
    assert made.prepare_store(path("ab")) is None, "it has its slot"
    assert made._on_change == {b"ab": True}
    made.check()


def test_a_refused_state_is_forgotten_and_its_slot_is_free():
    made = checkpoints(1)
    state, slot = made.prepare_store(path("ab"))
    made.complete_store([state], [state])
    assert made.lookup(path("ab"), 0) is None
    assert made.counts.refused == 1
    assert made.prepare_store(path("cd"))[1] == slot
    made.check()


def test_a_state_that_one_worker_refuses_while_another_has_not_told_is_forgotten():
    """The other one's word that it is stored comes later, when the slot holds another state."""
    made = checkpoints(1)
    state, slot = made.prepare_store(path("ab"))
    made.complete_store([], [state])
    assert (made.counts.refused, made.pinned) == (1, 0)
    other, again = made.prepare_store(path("cd"))
    assert again == slot
    made.complete_store([state], [])
    assert (made.counts.stored, made.pinned) == (0, 1)
    made.complete_store([other], [])
    assert made.lookup(path("cd"), 0) == (other, slot)
    assert made.lookup(path("ab"), 0) is None
    made.check()


def test_a_slot_that_waits_for_its_store_is_not_given_away():
    made = checkpoints(1)
    made.prepare_store(path("ab"))
    assert made.prepare_store(path("cd")) is None
    assert made.counts.skipped == 1
    made.check()


def test_the_cheapest_state_makes_room_and_its_blocks_are_duplicates_no_more():
    made = checkpoints(2)
    stored(made, "abcdef")
    stored(made, "x")
    stored(made, "yz")
    assert made._on_change == {b"abcdef": True, b"x": False, b"yz": True}
    assert made.counts.evicted == 1
    made.check()


def test_a_state_whose_kv_is_gone_gives_its_slot_back():
    made = checkpoints(3)
    for text in ("ab", "abcd", "q"):
        stored(made, text)
    made.drop_below(b"abc")
    assert len(made) == 2
    made.drop_below(b"a")
    assert (len(made), made.counts.worthless) == (1, 2)
    made.check()


def test_what_is_reported_late_about_a_dropped_state_changes_nothing():
    made = checkpoints(1)
    state, _ = made.prepare_store(path("ab"))
    made.drop_below(b"ab")
    again, _ = made.prepare_store(path("ab"))
    assert again != state
    made.complete_store([state], [state])
    assert made.lookup(path("ab"), 0) is None
    made.complete_store([again], [])
    assert made.lookup(path("ab"), 0)[0] == again
    made.check()


@pytest.mark.parametrize("waiting", [False, True])
def test_after_a_reset_nothing_is_left(waiting):
    made = checkpoints(2)
    stored(made, "ab")
    if waiting:
        made.prepare_store(path("cd"))
    made.clear()
    assert (len(made), made.lookup(path("ab"), 0)) == (0, None)
    assert set(made._on_change.values()) == {False}
    made.check()


def test_random_traffic_loses_no_slot():
    rng = random.Random(1)
    made = checkpoints(4)
    open_stores = []
    for _ in range(2000):
        text = "".join(rng.choice("abc") for _ in range(rng.randint(1, 4)))
        match rng.choice(("store", "store", "report", "gone", "find")):
            case "store":
                planned = made.prepare_store(path(text))
                if planned is not None:
                    open_stores.append(planned[0])
            case "report" if open_stores:
                state = open_stores.pop(0)
                made.complete_store([state], [state] if rng.random() < 0.2 else [])
            case "gone" if rng.random() < 0.3:
                made.drop_below(rng.choice(path(text)))
            case "find":
                found = made.lookup(path(text), 0)
                if found is not None:
                    made.restored(found[0])
        made.check()
    assert made.counts.stored > 100
    assert made.counts.evicted > 100
