"""Reported of other caches, tried on SGLang's real cache layer: clients that go, no memory left."""

import random
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from cache_layer import CORES, STATE_BYTES, Traffic, plugin
from marks import has_mark, write_mark
from scheduled import adder, admit, ask, release, request, take_back
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import release_req
from sglang.srt.managers.scheduler import Scheduler
from test_int8 import restore
from test_int8_budget import left_of, state_slots
from test_slot_shortage import free_slots

SLOTS = 24
POOLS = {"active": {}, "int8": {"int8": True, "int8_slots": 8}, "learned": {"policy": "learned"}}
ROWS = 8  # requests at once
both_cores = pytest.mark.parametrize("core", CORES)
every_pool = pytest.mark.parametrize("pool", POOLS)


@pytest.fixture
def made():
    """Make a cache with the plugin, which stays in place until the test ends."""
    with ExitStack() as stack:

        def make(core, pool, **options):
            stack.enter_context(plugin(**{"policy": "gds", **POOLS[pool]}))
            return Traffic(core, **options)

        yield make


def words(rng, count):
    return [rng.randrange(3, 300) for _ in range(count)]


class Crowd:
    """Requests on one cache, and what they hold of it. Each starts from the state of its prefix."""

    def __init__(self, traffic):
        self.traffic = traffic
        self.running = []
        self.refused = self.resumed = self.admitted = 0

    def admit(self, req):
        """Admit a request as the scheduler does, or leave it as it was."""
        traffic = self.traffic
        if len(self.running) == ROWS:
            return False
        req.init_next_round_input(traffic.cache)
        admission = adder(traffic)
        ask(admission, req)
        if req not in admission.can_run_list:
            take_back(traffic, req)
            self.refused += 1
            return False
        if not req.kv.holds_mamba and not free_slots(traffic):  # as SGLang does with a batch
            traffic.evict(states=1)
        assert traffic.requests.alloc([req]) is not None
        tokens, hit = req.full_untruncated_fill_ids, req.prefix_len
        row = traffic.requests.req_to_token[req.kv.req_pool_idx]
        row[:hit] = traffic.cache.path_device_indices(req.last_node)[:hit]
        fresh = traffic.kv_slots(len(tokens) - hit)
        row[hit : len(tokens)] = fresh.to(row.dtype)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(tokens)
        if hit:
            start = int(req.kv.mamba_pool_idx)
            if traffic.requests.mamba_ckpt_pool is None:
                start = int(req.kv.mamba_cow_src_index)
            else:
                restore(traffic, req)
            assert has_mark(traffic, start, list(tokens[:hit]))
            self.resumed += 1
        self.admitted += 1
        self.running.append(req)
        return True

    def compute(self, req, to):
        """A chunk of the prompt is through, up to `to`."""
        tokens = list(req.full_untruncated_fill_ids[:to])
        write_mark(self.traffic, int(req.kv.mamba_pool_idx), tokens)
        self.traffic.cache.checkpoint(req, up_to=to)

    def decode(self, req, token):
        """One token more; whether there was KV for it."""
        fresh = self.traffic.kv_slots(1)
        if fresh is None:
            return False
        at = req.kv.kv_allocated_len
        self.traffic.requests.req_to_token[req.kv.req_pool_idx, at] = int(fresh)
        req.output_ids.append(token)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = at + 1
        return True

    def end(self, req, *, cached):
        self.running.remove(req)
        tokens = req.kv.kv_allocated_len
        if cached:
            prompt = [*req.origin_input_ids, *req.output_ids]
            write_mark(self.traffic, int(req.kv.mamba_pool_idx), prompt[:tokens])
        release(self.traffic, req, tokens, cached=cached)

    def retract(self, req):
        self.running.remove(req)
        traffic = self.traffic
        assert release_req(
            req=req,
            remaing_req_count=len(self.running),
            req_to_token_pool=traffic.requests,
            token_to_kv_pool_allocator=traffic.allocator,
            tree_cache=traffic.cache,
            hisparse_coordinator=None,
        )

    def add_up(self):
        """Free, cached and held by requests are all there is, in each pool."""
        traffic, core = self.traffic, self.traffic.core
        traffic.sane()
        cached = core.all_mamba_values_flatten().numel()
        assert cached + traffic.state_pool.available_size() == traffic.slots - (
            len(self.running) if traffic.requests.mamba_ckpt_pool is None else 0
        )
        if traffic.requests.mamba_ckpt_pool is not None:
            states = traffic.requests.mamba_pool.size
            assert free_slots(traffic) + len(self.running) == states
        held = sum(req.kv.kv_allocated_len - req.kv.cache_protected_len for req in self.running)
        kv = core.all_values_flatten().numel()
        assert kv + held + traffic.allocator.available_size() == traffic.kv_tokens
        side = core.scheduler_side
        assert side.faults.anomalies == 0
        assert len(side.registry) == cached
        side.registry.check()

    def nothing_is_held(self):
        assert self.running == []
        self.add_up()
        assert self.traffic.cache.mamba_protected_size() == 0
        counted = self.traffic.core.scheduler_side.counts.numbers
        assert counted["requests"] == self.admitted
        assert counted.get("hit_requests", 0) == self.resumed
        checkpoints = self.traffic.requests.mamba_ckpt_pool
        assert checkpoints is None or checkpoints.restored == self.resumed


# Clients that go.


@both_cores
@pytest.mark.parametrize("pool", ["active", "int8"])
def test_a_fan_out_whose_clients_go_at_any_moment_leaves_nothing_behind(made, core, pool, share):
    """500 requests in groups of 16, aborted: queued, admitted, in a chunk, at an end, decoding."""
    crowd = Crowd(made(core, pool, slots=SLOTS, kv_tokens=600))
    rng = random.Random(7)
    stages = ["queued", "admitted", "chunk", "end", "decoding"]
    gone = dict.fromkeys(stages, 0)
    while sum(gone.values()) < 500 * share:
        head = words(rng, rng.randint(10, 60))
        waiting = [request(head + words(rng, rng.randint(2, 30))) for _ in range(16)]
        while waiting or crowd.running:
            while waiting and crowd.admit(waiting[0]):
                waiting.pop(0)
            crowd.add_up()
            if waiting and rng.random() < 0.3:
                req = waiting.pop(rng.randrange(len(waiting)))
                req.init_next_round_input(crowd.traffic.cache)
                take_back(crowd.traffic, req)
                gone["queued"] += 1
            if crowd.running:
                req = rng.choice(crowd.running)
                stage = rng.choice(stages[1:])
                tokens = len(req.origin_input_ids)
                if stage == "chunk" and tokens - req.prefix_len > 1:
                    crowd.compute(req, rng.randint(req.prefix_len + 1, tokens - 1))
                elif stage in ("end", "decoding"):
                    crowd.compute(req, tokens)
                if stage == "decoding":
                    for _ in range(rng.randint(1, 5)):
                        crowd.decode(req, 5)
                crowd.add_up()
                # What decodes is cached as it is aborted, what is in its prompt is not.
                crowd.end(req, cached=stage == "decoding")
                gone[stage] += 1
            crowd.add_up()
        crowd.nothing_is_held()
    assert min(gone.values()) > 5 * share
    assert crowd.resumed > 0


def scheduler_of(traffic, queue, limit=None, by_priority=False):
    """SGLang's scheduler with this queue, and nothing running."""
    scheduler = object.__new__(Scheduler)
    scheduler.__dict__.update(
        waiting_queue=queue,
        tree_cache=traffic.cache,
        chunked_req=None,
        mm_receiver=None,
        dllm_config=None,
        rust_server=None,
        enable_hisparse=False,
        running_batch=None,
        last_batch=None,
        enable_continuous_input_polling=False,
        disaggregation_mode=DisaggregationMode.NULL,
        beam_coordinator=SimpleNamespace(retire_group=_nothing),
        grammar_manager=SimpleNamespace(abort_requests=_nothing),
        ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=_nothing)),
        max_queued_requests=limit,
        enable_priority_scheduling=by_priority,
        schedule_low_priority_values_first=False,
    )
    return scheduler


def _nothing(*_):
    """In the place of the socket."""


@both_cores
@every_pool
@pytest.mark.parametrize("how", ["request", "all", "timeout", "limit", "limit by priority"])
def test_a_request_aborted_in_the_queue_gives_its_slot_back_at_once(made, core, pool, how):
    """It was matched: it holds a slot for the copy of a state, in int8, too; a full queue's do not.

    SGLang takes the slot back from what it could not admit; what waits behind keeps it until then.
    """
    traffic = made(core, pool, slots=4)
    prompt = list(range(100, 130))
    first = admit(traffic, prompt)
    write_mark(traffic, int(first.kv.mamba_pool_idx), prompt)
    release(traffic, first, 30, cached=True)
    free = free_slots(traffic)
    assert free == (4 if pool == "int8" else 3)
    waiting = request([*prompt, 7])
    waiting.init_next_round_input(traffic.cache)
    assert (waiting.prefix_len, waiting.kv.holds_mamba) == (30, True)
    assert free_slots(traffic) == free - 1
    waiting.time_stats.wait_queue_entry_time = 1e-9
    waiting.priority = 1
    if how.startswith("limit"):
        take_back(traffic, waiting)
        scheduler = scheduler_of(traffic, [waiting], 1, by_priority=how != "limit")
        newer = request(prompt)
        newer.priority = 2
        assert scheduler._abort_on_queued_limit(newer) == (how == "limit")
        assert scheduler.waiting_queue == ([waiting] if how == "limit" else [])
    else:
        scheduler = scheduler_of(traffic, [waiting])
        aborts = {"request": [AbortReq(rid=waiting.rid)], "all": [AbortReq(abort_all=True)]}
        with envs.SGLANG_REQ_WAITING_TIMEOUT.override(1e-6):
            for abort in aborts.get(how) or scheduler._poll_timeout_aborts():
                scheduler.abort_request(abort)
        assert scheduler.waiting_queue == []
    assert free_slots(traffic) == free
    assert not waiting.kv.holds_mamba
    assert traffic.cache.mamba_protected_size() == 0
    traffic.check()
    assert traffic.requests.mamba_allocator.alloc(free) is not None


# Memory that runs out.


@both_cores
@every_pool
@pytest.mark.parametrize("slots", [6, 24])
def test_a_storm_of_retractions_leaves_each_request_to_its_own_state(made, core, pool, slots):
    """Answers that outgrow the KV of 260 tokens, while others pin cached states.

    Of 6 slots none is free most of the time, of 24 some are. Who is retracted comes back, from a
    state of its own prefix; each that was given a state to start from was admitted with it, or gave
    it back.
    """
    traffic = made(core, pool, slots=slots, kv_tokens=260)
    crowd = Crowd(traffic)
    rng = random.Random(2)
    heads = [words(rng, 30) for _ in range(3)]
    for head in heads:
        assert crowd.admit(request(head))
        crowd.end(crowd.running[0], cached=True)
    waiting = [request(rng.choice(heads) + words(rng, rng.randint(1, 12))) for _ in range(60)]
    left = {req.rid: rng.randint(10, 60) for req in waiting}
    retracted = full = no_slot = 0
    while waiting or crowd.running:
        while waiting and crowd.admit(waiting[0]):
            req = waiting.pop(0)
            crowd.compute(req, len(req.full_untruncated_fill_ids))
        no_slot += free_slots(traffic) == 0
        crowd.add_up()
        for req in list(crowd.running):
            if req not in crowd.running:
                continue
            while not crowd.decode(req, rng.randrange(3, 300)):
                full += 1
                last = crowd.running[-1]
                if last is req and len(crowd.running) == 1:
                    left[req.rid] = 0
                    break
                crowd.retract(last)
                waiting.insert(0, last)
                retracted += 1
                crowd.add_up()
                if last is req:
                    break
            if req in crowd.running:
                left[req.rid] -= 1
                if left[req.rid] <= 0:
                    crowd.end(req, cached=True)
        crowd.add_up()
        if rng.random() < 0.2 and len(traffic.held) < 2:
            traffic.hold(rng.choice(heads))
        elif traffic.held:
            traffic.let_go()
    while traffic.held:
        traffic.let_go()
    assert min(retracted, full, crowd.refused, crowd.resumed) >= 5
    assert slots > 6 or no_slot > 100
    crowd.nothing_is_held()


# Sizes.


@pytest.mark.parametrize("slots", [1, 2, 419])
def test_the_bytes_that_are_announced_are_those_of_the_pool(caplog, slots):
    """One slot more, which SGLang reserves, scales included; as much is taken off the budget."""
    with (
        caplog.at_level("INFO", logger="statecache"),
        plugin(policy="gds", int8=True, int8_slots=slots),
    ):
        traffic = Traffic("rust", slots=64)
        with state_slots(64):
            left = left_of(traffic, 10_000_000)
    pool = traffic.requests.mamba_ckpt_pool
    allocated = sum(row.nbytes for row in pool._pool._rows(0)) * (slots + 1)
    right = (slots + 1) * STATE_BYTES["at rest"]
    assert allocated == right
    assert left == 10_000_000 - 65 * STATE_BYTES["running"] - right
    said = [record.getMessage() for record in caplog.records]
    assert f"statecache: int8 checkpoint pool of {slots} states, {right} bytes" in said
    assert (traffic.slots, pool.available_size()) == (slots, slots)
    assert pool.alloc(slots).tolist() == list(range(1, slots + 1))
