"""The offline reference: worked by hand, then never below an online policy on many workloads."""

import random

import msgspec
import pytest

from replay_support import replay_prompts, trace_of
from statecache.generate import AgentWorkload, agent_lines
from statecache.plan import PrefixTree, kv_timeline, make_plan
from statecache.replay import replay
from statecache.trace import Request


def hits(prompts: str, slots: int, policy: str, kv_blocks: int | None = None) -> int:
    ids = [[ord(letter) for letter in prompt] for prompt in prompts.split()]
    return replay_prompts(ids, policy, slots, kv_blocks=kv_blocks).hit_tokens // 512


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
def test_it_is_never_below_an_online_policy(seed: int, kv_blocks: int | None) -> None:
    rng = random.Random(seed)
    tree = PrefixTree.of(trace_of(random_prompts(rng)))
    kv = kv_timeline(tree, kv_blocks and 512 * kv_blocks)
    for admission in ("dense", "ends"):
        plan = make_plan(tree, kv, admission, 512 * rng.choice([2, 4, 16]))
        for slots in (1, 2, 3, 5, 8, 13, 21, 1000):
            online = max(replay(plan, policy, slots).hit_tokens for policy in ("lru", "gds"))
            assert replay(plan, "clairvoyant", slots).hit_tokens >= online, (admission, slots)


@pytest.mark.parametrize("kv_tokens", [None, 1_000_000])
def test_it_is_never_below_on_generated_agents(kv_tokens: int | None) -> None:
    lines = agent_lines(AgentWorkload(sessions=24, turns=20, seed=5))
    requests = [msgspec.json.decode(line, type=Request) for line in lines]
    trace = trace_of([request.hash_ids for request in requests])
    tree = PrefixTree.of(trace)
    kv = kv_timeline(tree, kv_tokens)
    for admission in ("dense", "ends"):
        plan = make_plan(tree, kv, admission)
        for slots in (4, 16, 64, 256):
            online = max(replay(plan, policy, slots).hit_tokens for policy in ("lru", "gds"))
            assert replay(plan, "clairvoyant", slots).hit_tokens >= online, (admission, slots)
