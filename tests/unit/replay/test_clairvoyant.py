"""The offline reference: worked by hand, then against the online policies on fixed workloads."""

import random

import msgspec
import pytest

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import ReplayRow, replay
from statecache.trace.format import Request
from statecache.trace.generate_agent import AgentWorkload, agent_lines
from support.replay_support import replay_prompts, trace_of


def play(prompts: str, slots: int, policy: str, kv_blocks: int | None = None) -> ReplayRow:
    ids = [[ord(letter) for letter in prompt] for prompt in prompts.split()]
    return replay_prompts(ids, policy, slots, kv_blocks=kv_blocks)


def hits(prompts: str, slots: int, policy: str, kv_blocks: int | None = None) -> int:
    return play(prompts, slots, policy, kv_blocks).hit_tokens // 512


def test_it_keeps_what_will_be_used_and_sets_nothing_else() -> None:
    # One slot: ab is wanted again, the three in between are not. Online policies lose it.
    assert hits("ab cd ef gh abx", 1, "clairvoyant") == 2
    assert hits("ab cd ef gh abx", 1, "lru") == 0
    assert hits("ab cd ef gh abx", 1, "gds") == 0


def test_it_weighs_tokens_saved_against_time_held() -> None:
    # One slot, to be given at request 1: abcdef saves 6 two requests later, gh saves 2 at once.
    assert hits("abcdef gh ghi abcdefx", 1, "clairvoyant") == 6


def test_a_state_with_a_deeper_one_on_the_same_way_is_worth_nothing() -> None:
    # Two slots after abcd: ab is passed by abcdx too, but abcd serves it; ef is worth the slot.
    assert hits("ab abcd ef abcdx efx", 2, "clairvoyant") == 2 + 4 + 2


def test_a_state_is_worth_what_it_saves_beyond_the_next_one() -> None:
    # Two slots, after xyz: abcdef saves 2 more than abcd at request 4 (1 a request waited for),
    # xyz 3 at request 3 (3), abcd 4 at request 5 (1.33). So abcdef goes, and abcd serves twice.
    assert hits("abcd abcdef xyz xyzw abcdefg abcdh", 2, "clairvoyant") == 4 + 3 + 4 + 4


def test_a_rewind_is_foreseen() -> None:
    # One slot: only abx comes again, after abcd, which goes on from ab itself.
    assert hits("ab abcd abx", 1, "clairvoyant") == 2 + 2


def test_it_foresees_that_the_kv_goes() -> None:
    # One slot, 8 blocks, full after hi. jk drops f and e, and with f the state of abcdef. abcdefx
    # brings that KV back for abcdefy, but not the state: waiting for it would only lose hi.
    prompts = "abcdef hi jk hiz abcdefx abcdefy"
    assert hits(prompts, 1, "clairvoyant", kv_blocks=8) == 2


def test_only_states_that_were_kept_count_as_evicted() -> None:
    # Two slots: ab goes for ef after ef's request, as above. One slot: gh is offered, never kept.
    assert play("ab abcd ef abcdx efx", 2, "clairvoyant").evicted_states == 1
    assert play("abcdef gh ghi abcdefx", 1, "clairvoyant").evicted_states == 0


def test_a_state_whose_kv_goes_before_its_use_is_not_set() -> None:
    # One slot, 5 blocks. efg drops b, a and x; abz brings ab's KV back for abw, but no state. Had
    # ab been set, cd would have to evict it.
    row = play("ab cd cdx efg abz abw", 1, "clairvoyant", kv_blocks=5)
    assert (row.hit_tokens // 512, row.evicted_states) == (2, 0)


def test_a_use_after_the_kv_went_is_worth_nothing() -> None:
    # Two slots, 12 blocks, full after xyz. mnop drops i, h, g and f, so state abcdef; abcdefj
    # brings f back for abcdefk, but no state. So after xy, abcdef is worth nothing: abcdefgh serves
    # the use before. For the 6 blocks of abcdefk, five requests later, it would outweigh xy's 2 in
    # two requests, and xyz would miss.
    prompts = "abcdef abcdefgh xy abcdefghi xyz mnop abcdefj abcdefk"
    assert hits(prompts, 2, "clairvoyant", kv_blocks=12) == 6 + 8 + 2


def random_prompts(rng: random.Random) -> list[list[int]]:
    """Sessions that grow, rewind and fork, interleaved."""
    sessions = [[rng.randrange(3)] for _ in range(rng.randint(2, 12))]
    fresh = iter(range(100, 100_000))
    prompts = []
    for _ in range(rng.randint(50, 200)):
        session = rng.choice(sessions)
        if rng.random() < 0.15:
            del session[rng.randint(1, len(session)) :]
        session += [next(fresh) for _ in range(rng.randint(1, 5))]
        prompts.append(list(session))
    return prompts


@pytest.mark.parametrize("kv_blocks", [None, 400])
@pytest.mark.parametrize("seed", range(40))
def test_it_is_not_below_lru_or_gds_on_these_seeds(seed: int, kv_blocks: int | None) -> None:
    rng = random.Random(seed)
    tree = PrefixTree.of(trace_of(random_prompts(rng)))
    kv = kv_timeline(tree, kv_blocks and 512 * kv_blocks)
    for admission in ("dense", "ends"):
        schedule = make_schedule(tree, kv, admission, 512 * rng.choice([2, 4, 16]))
        for slots in (1, 2, 3, 5, 8, 13, 21, 1000):
            online = max(replay(schedule, policy, slots).hit_tokens for policy in ("lru", "gds"))
            assert replay(schedule, "clairvoyant", slots).hit_tokens >= online, (admission, slots)


@pytest.mark.parametrize("kv_tokens", [None, 1_000_000])
def test_it_is_not_below_lru_or_gds_on_generated_agents(kv_tokens: int | None) -> None:
    lines = agent_lines(AgentWorkload(sessions=24, turns=20, seed=5))
    requests = [msgspec.json.decode(line, type=Request) for line in lines]
    trace = trace_of([request.hash_ids for request in requests])
    tree = PrefixTree.of(trace)
    kv = kv_timeline(tree, kv_tokens)
    for admission in ("dense", "ends"):
        schedule = make_schedule(tree, kv, admission)
        for slots in (4, 16, 64, 256):
            online = max(replay(schedule, policy, slots).hit_tokens for policy in ("lru", "gds"))
            assert replay(schedule, "clairvoyant", slots).hit_tokens >= online, (admission, slots)
