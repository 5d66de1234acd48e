"""Which states SGLang's real cache holds after requests worked out by hand, with `branch-points`.

A has 30 tokens. B has the first 20 of them, so its KV is cached up to 20, and 10 of its own.
"""

import random

import pytest
import schedule_loop
from cache_layer import CORES, Traffic, plugin
from schedule_loop import Loop
from scheduled import adder, ask, request

from statecache.engine.settings import Settings
from statecache.engine.spec import engine_named
from statecache.errors import SettingsError

A = list(range(1, 31))
B = A[:20] + list(range(101, 111))
BRANCH_POINTS = {"policy": "gds", "admission": "branch-points"}


def serve(run: Loop, tokens: list[int]) -> tuple[int, list[int]]:
    """One request by itself; return its hit and where its chunks ended."""
    return schedule_loop.serve(run.traffic, tokens, run.chunk)


def depths(run: Loop, tokens: list[int]) -> list[int]:
    """After how many tokens of this prompt there is a state."""
    return [n for n in range(1, len(tokens) + 1) if run.traffic.hit(tokens[:n]) == n]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", ["gds", "learned"])
def test_where_states_are(core, policy):
    """By itself SGLang keeps one at the end of each chunk of 12; a fork is no place of its own.

    With branch-points they are there too, and the chunk of B in which its KV ended ends there; the
    next one ends where that would have, at 24.
    """
    for admission, ends, of_b in (
        ("engine", [24, 30], [12, 24, 30]),
        ("branch-points", [20, 24, 30], [12, 20, 24, 30]),
    ):
        with plugin(policy=policy, admission=admission):
            run = Loop(Traffic(core), 12)
            assert serve(run, A) == (0, [12, 24, 30])
            assert depths(run, A) == [12, 24, 30]
            assert serve(run, B) == (12, ends)
            assert depths(run, B) == of_b
            run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_a_chunk_ends_at_the_fork_and_the_next_prompt_resumes_there(core):
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core), 100)
        assert serve(run, A) == (0, [30])
        assert serve(run, B) == (0, [20, 30])
        assert depths(run, B) == [20, 30]
        assert serve(run, A[:20] + [200] * 5) == (20, [25])
        run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_a_branch_point_beyond_the_first_chunk_gets_its_state(core):
    """Siblings of a head of 400, chunks of 100: the second resumes at 300 at the latest."""
    head = list(range(405))
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core), 100)
        found = [serve(run, [*head, *[1_000 + n] * 20]) for n in range(8)]
        assert found[0] == (0, [100, 200, 300, 400, 425])
        assert found[1] == (400, [405, 425])
        assert found[2:] == [(405, [425])] * 6
        # Nothing but KV: the states are gone. The branch point lies in the fourth chunk.
        run.traffic.evict(states=64)
        assert run.traffic.state_slots() == []
        assert serve(run, [*head, 7])[0] == 0
        run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_siblings_of_a_head_that_ends_with_a_chunk(core):
    """As reported, 16,384 tokens in chunks of 8,192; here a 32nd of it."""
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core), 256)
        hits = [serve(run, [*range(512), *[1_000 + n] * 40])[0] for n in range(8)]
        assert hits == [0] + [512] * 7


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("tokens", "hits"), [(24, [0, 12, 23, 23]), (30, [0, 24, 29, 29])])
def test_an_exact_resend_resumes_where_sglang_alone_does_and_then_at_its_last_token(
    core, tokens, hits
):
    """The last token is always computed. Multiples of the chunk are no other case."""
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core), 12)
        assert [serve(run, A[:tokens])[0] for _ in hits] == hits
    with plugin(policy="gds"):
        run = Loop(Traffic(core), 12)
        assert [serve(run, A[:tokens])[0] for _ in hits] == [0] + [hits[1]] * 3


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("cut", [3, 10, 40])
def test_a_template_that_rewrites_the_end_of_a_turn(core, cut):
    """Turn n + 1 is turn n less its last tokens and 60 more: within a chunk and the turn."""
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core, slots=32), 100)
        tokens = list(range(350))
        serve(run, tokens)
        for turn in range(10):
            tokens = [*tokens[:-cut], *range((turn + 1) * 10_000, (turn + 1) * 10_000 + 60)]
            hit, _ = serve(run, tokens)
            assert len(tokens) - hit <= 100 + 60 + cut
            assert run.traffic.hit(tokens[: -60 - cut]) <= hit
        run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_the_end_of_a_chunk_takes_free_slots_only(core):
    """Six slots: four ends of prompts, one of the request, one for the first of five chunks."""
    ends = [[1_000 * n + i for i in range(10)] for n in range(1, 5)]
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core, slots=6), 12)
        for tokens in ends:
            serve(run, tokens)
        long = list(range(60))
        assert serve(run, long) == (0, [12, 24, 36, 48, 60])
        assert depths(run, long) == [12, 60]
        assert [depths(run, tokens) for tokens in ends] == [[10]] * 4
        # A fifth prompt takes the slot of the chunk's end, and no prompt's.
        serve(run, [9_000] * 10)
        assert depths(run, long) == [60]
        assert [depths(run, tokens) for tokens in ends] == [[10]] * 4
        run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_a_chunk_end_that_was_resumed_from_is_spare_no_longer(core):
    with plugin(**BRANCH_POINTS):
        run = Loop(Traffic(core), 12)
        serve(run, A)
        assert serve(run, [*A[:13], 7])[0] == 12
        # 24 is spare; 12 counts as the ends at 14 and 30 and the branch point at 13 do.
        run.traffic.evict(states=1)
        assert depths(run, A) == [12, 13, 30]
        run.traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_int8_keeps_chunk_ends_the_same_way(core):
    """Five slots: three ends of prompts, two for the ends of chunks, of which the newest stay.

    Each takes the place of the one before the last, which the request holds. 60 takes that of 36.
    """
    ends = [[1_000 * n + i for i in range(10)] for n in range(1, 4)]
    with plugin(**BRANCH_POINTS, checkpoints="int8", checkpoint_slots=5):
        run = Loop(Traffic(core), 12)
        for tokens in ends:
            serve(run, tokens)
        long = list(range(60))
        assert serve(run, long) == (0, [12, 24, 36, 48, 60])
        assert depths(run, long) == [48, 60]
        serve(run, [9_000] * 10)
        assert depths(run, long) == [60]
        assert [depths(run, tokens) for tokens in ends] == [[10]] * 3
        assert serve(run, [*long, 7])[0] == 60
        run.traffic.check()


def prompts(seed: int) -> list[list[int]]:
    """New ones, resends, forks and continuations."""
    rng = random.Random(seed)
    fresh = iter(range(1_000, 1_000_000))
    known: list[list[int]] = []
    for _ in range(60):
        kind = rng.random()
        if not known or kind < 0.15:
            tokens = [next(fresh) for _ in range(rng.randint(1, 80))]
        else:
            tokens = rng.choice(known)
            if kind > 0.35:
                cut = rng.randint(1, len(tokens)) if kind < 0.7 else len(tokens)
                tokens = tokens[:cut] + [next(fresh) for _ in range(rng.randint(1, 40))]
        known.append(tokens[:300])
    return known


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("chunk", [12, 40])
def test_with_free_slots_it_never_caches_less_than_sglang_alone(core, chunk):
    """Chunks of later requests begin elsewhere: one may be behind, by less than a chunk."""
    for seed in range(3):
        hits = {}
        for admission in ("engine", "branch-points"):
            with plugin(policy="gds", admission=admission):
                run = Loop(Traffic(core, slots=1_000), chunk)
                hits[admission] = [serve(run, tokens)[0] for tokens in prompts(seed)]
                run.traffic.check()
        assert sum(hits["branch-points"]) >= sum(hits["engine"])
        both = zip(hits["branch-points"], hits["engine"], strict=True)
        assert all(ours > alone - chunk for ours, alone in both)


@pytest.mark.parametrize("core", CORES)
def test_the_last_state_of_a_long_prompt_stays(core):
    """Four slots, one of them the request's, and 15 chunks: the end can be resumed from."""
    with plugin(policy="gds"):
        run = Loop(Traffic(core, slots=4), 2)
        serve(run, A)
        assert depths(run, A)[-1] == 30


def test_a_request_that_does_not_fit_leaves_the_budget_as_it_was():
    with plugin(**BRANCH_POINTS):
        traffic = Traffic("rust")
        serve(Loop(traffic, 100), A)
        waiting = request(B)
        waiting.init_next_round_input(traffic.cache)
        full = adder(traffic, 100)
        full.prefill_max_requests = 0  # "not now"
        ask(full, waiting)
        assert (full.can_run_list, full.rem_chunk_tokens) == ([], 100)


def test_dense_is_refused():
    given = Settings.from_given({"kv_cache_plugin": "statecache", "admission": "dense"}, {})
    given.require_engine(engine_named("vllm"))
    with pytest.raises(SettingsError, match="dense is for vllm only: SGLang caches a state at the"):
        given.require_engine(engine_named("sglang"))
