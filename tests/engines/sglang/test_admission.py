"""Which states SGLang's real cache holds after requests worked out by hand, with `branch-points`.

A has 30 tokens. B has the first 20 of them, so its KV is cached up to 20, and 10 of its own.
"""

import pytest
from cache_layer import CORES, Traffic, plugin
from scheduled import adder, request

from statecache.engine.settings import Settings
from statecache.engine.spec import engine_named
from statecache.errors import SettingsError

A = list(range(1, 31))
B = A[:20] + list(range(101, 111))


def serve(traffic, tokens, chunk):
    """Prefill as the scheduler does, chunk by chunk; return where each chunk ended."""
    req = request(tokens)
    req.init_next_round_input(traffic.cache)
    first = adder(traffic, chunk)
    first.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert first.can_run_list == [req]
    rows = traffic.requests.alloc([req])
    assert rows is not None
    row = traffic.requests.req_to_token[req.kv.req_pool_idx]
    hit = req.prefix_len
    row[:hit] = traffic.cache.path_device_indices(req.last_node)[:hit]
    ends = []
    at = hit
    while at < len(tokens):
        end = min(req.extend_end if not ends else at + chunk, len(tokens))
        fresh = traffic.kv_slots(end - at)
        row[at:end] = fresh.to(row.dtype)
        traffic.cache.checkpoint(req, up_to=end)
        ends.append(end)
        at = end
    req.finished_reason = object()
    traffic.cache.checkpoint(req, up_to=len(tokens))
    traffic.cache.unlock(req.lock)
    traffic.requests.free(req)
    return hit, ends


def depths(traffic, tokens):
    """After how many tokens of this prompt there is a state."""
    return [n for n in range(1, len(tokens) + 1) if traffic.hit(tokens[:n]) == n]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("policy", ["gds", "learned"])
def test_where_states_are(core, policy):
    """By itself SGLang keeps one at the end of each chunk of 12, and none at a branch point.

    B resumes from 12 there. With branch-points it resumes from nothing, and its branch point lies
    beyond the first chunk, where no chunk can be made to end: the second request of its kind meets
    it.
    """
    for admission, of_a, hit, ends, of_b in (
        ("engine", [12, 24, 30], 12, [24, 30], [12, 24, 30]),
        ("branch-points", [30], 0, [12, 24, 30], [30]),
    ):
        with plugin(policy=policy, admission=admission):
            traffic = Traffic(core)
            assert serve(traffic, A, 12) == (0, [12, 24, 30])
            assert depths(traffic, A) == of_a
            assert serve(traffic, B, 12) == (hit, ends)
            assert depths(traffic, B) == of_b
            traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_a_chunk_ends_at_the_branch_point_and_the_next_prompt_resumes_there(core):
    with plugin(policy="gds", admission="branch-points"):
        traffic = Traffic(core)
        assert serve(traffic, A, 100) == (0, [30])
        assert serve(traffic, B, 100) == (0, [20, 30])
        assert depths(traffic, B) == [20, 30]
        assert serve(traffic, A[:20] + [200] * 5, 100) == (20, [25])
        traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_the_last_state_of_a_long_prompt_stays(core):
    """Four slots, one of them the request's, and 15 chunks: the end can be resumed from."""
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=4)
        serve(traffic, A, 2)
        assert depths(traffic, A)[-1] == 30


def test_a_request_that_does_not_fit_leaves_the_budget_as_it_was():
    with plugin(policy="gds", admission="branch-points"):
        traffic = Traffic("rust")
        serve(traffic, A, 100)
        waiting = request(B)
        waiting.init_next_round_input(traffic.cache)
        full = adder(traffic, 100)
        full.prefill_max_requests = 0  # "not now"
        full.add_one_req(waiting, has_chunked_req=False, truncation_align_size=None)
        assert (full.can_run_list, full.rem_chunk_tokens) == ([], 100)


def test_dense_is_refused():
    given = Settings.from_given({"kv_cache_plugin": "statecache", "admission": "dense"}, {})
    given.require_engine(engine_named("vllm"))
    with pytest.raises(SettingsError, match="dense is for vllm only: SGLang caches a state at the"):
        given.require_engine(engine_named("sglang"))
