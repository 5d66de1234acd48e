"""A state that is not what its slot should hold is no match, on SGLang's real cache layer."""

import logging
from array import array
from hashlib import blake2b

import pytest
import torch
from cache_layer import CORES, MAMBA, Traffic, plugin
from scheduled import admit, finish, request, take_back
from test_int8 import fill_state, restore, state_of
from test_namespaces import Hashed

from statecache.index import keyed_index
from statecache_sglang import reporting

SLOTS = 6
FIRST, SECOND = list(range(30)), [900 + n for n in range(30)]


def traffic_of(core, rate=0.0, **options) -> Traffic:
    with plugin(policy="gds", checkpoints="int8", checkpoint_slots=SLOTS, verify=rate):
        return Traffic(core, slots=4, **options)


def cache(traffic, tokens, seed):
    """A request whose state at the end of `tokens` is cached; returns the slot of that state."""
    req = admit(traffic, tokens)
    fill_state(traffic, int(req.kv.mamba_pool_idx), seed)
    finish(traffic, req, len(tokens))
    return int(
        traffic.core.get_component_device_value(traffic.match(tokens).best_match_node, MAMBA)
    )


def swap_records(traffic, slot, other):
    """What each slot is known to hold, as if the other state had been stored in it."""
    records = traffic.requests.mamba_ckpt_pool.records._records
    records[slot], records[other] = records[other], records[slot]


def flip(traffic, slot):
    (*_, row) = traffic.requests.mamba_ckpt_pool._pool._rows(slot)
    row[-1].view(torch.uint8).reshape(-1)[3] ^= 16


def numbers(traffic):
    counted = reporting.sample(traffic.cache)
    name = "restore_mismatches|"
    return {key.removeprefix(name): n for key, n in counted.items() if key.startswith(name)}


def plant(traffic, what):
    """Cache FIRST, with a wrong state."""
    slot = cache(traffic, FIRST, seed=1)
    if what == "prefix":
        swap_records(traffic, slot, cache(traffic, SECOND, seed=2))
    elif what == "depth":
        swap_records(traffic, slot, cache(traffic, [*FIRST, *range(50, 60)], seed=2))
    elif what == "bytes":
        flip(traffic, slot)
    else:
        traffic.requests.mamba_ckpt_pool.records.erase([slot])
    return slot


PLANTED = ("prefix", "depth", "bytes", "empty")


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("what", "rate"),
    [(what, rate) for what in PLANTED for rate in (0, 1) if rate or what != "bytes"],
)
def test_a_planted_wrong_state_is_no_match_and_is_dropped(core, what, rate, caplog):
    """Records are compared at any rate, bytes at rate 1."""
    caplog.set_level(logging.ERROR, logger="statecache")
    traffic = traffic_of(core, rate=rate)
    slot = plant(traffic, what)
    again = request([*FIRST, 7])
    again.init_next_round_input(traffic.cache)
    assert again.prefix_len == 0
    assert again.kv.mamba_cow_src_index is None
    assert not again.kv.holds_mamba
    assert numbers(traffic) == {what: 1}
    assert reporting.sample(traffic.cache)["anomalies"] == 1
    assert f"({what})" in caplog.text
    assert slot not in traffic.state_slots()
    assert len(traffic.state_slots()) + traffic.requests.mamba_ckpt_pool.available_size() == SLOTS
    assert traffic.core.scheduler_side.faults.active
    # Computed and cached again, it serves.
    cache(traffic, FIRST, seed=3)
    again.init_next_round_input(traffic.cache)
    assert again.prefix_len == 30
    assert numbers(traffic) == {what: 1}
    traffic.core.scheduler_side.registry.check()
    traffic.sane()


@pytest.mark.parametrize("core", CORES)
def test_at_rate_0_bytes_are_not_looked_at(core, monkeypatch):
    traffic = traffic_of(core)
    monkeypatch.setattr(traffic.requests.mamba_ckpt_pool._pool, "checksums", None)
    monkeypatch.setattr(traffic.requests.mamba_ckpt_pool._pool, "relative_errors", None)
    plant(traffic, "bytes")
    assert admit(traffic, [*FIRST, 7]).prefix_len == 30
    counted = reporting.sample(traffic.cache)
    assert counted["anomalies"] == 0
    assert "verified_stores" not in counted


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("rate", [0, 0.01, 1])
def test_what_a_closer_look_does_for_each_request(core, rate, monkeypatch):
    """300 prompts, each asked and then gone on with: two sums and one look at the error of int8.

    That is for its share; hashes and copies are the same at any rate: the 30 tokens of a state are
    hashed for its record, and for the request that resumes from it.
    """
    traffic = traffic_of(core, rate=rate)
    slots = traffic.requests.mamba_ckpt_pool
    done = {"checksums": 0, "relative_errors": 0}

    def counted(name, original):
        def call(*args):
            done[name] += 1
            return original(*args)

        return call

    for name in done:
        monkeypatch.setattr(slots._pool, name, counted(name, getattr(slots._pool, name)))
    monkeypatch.setattr(keyed_index, "blake2b", Hashed)
    monkeypatch.setattr(Hashed, "bytes", 0)
    picked = 0
    for number in range(300):
        tokens = [number * 100 + at for at in range(30)]
        finish(traffic, admit(traffic, tokens), 30)
        again = admit(traffic, [*tokens, 7])
        assert again.prefix_len == 30
        restore(traffic, again)
        traffic.cache.unlock(again.lock)
        take_back(traffic, again)
        traffic.requests.free(again)
        digest = blake2b(array("q", tokens).tobytes(), digest_size=8).digest()
        picked += int.from_bytes(digest, "little") < rate * 2**64
    assert (rate == 0) == (picked == 0)
    assert done == {"checksums": 2 * picked, "relative_errors": picked}
    assert (slots.stored, slots.restored) == (300, 300)
    assert Hashed.bytes == 300 * 2 * 30 * 8


@pytest.mark.parametrize("core", CORES)
def test_a_wrong_state_that_another_request_holds_is_dropped_when_it_lets_go(core):
    traffic = traffic_of(core, rate=1)
    cache(traffic, SECOND, seed=2)
    slot = cache(traffic, FIRST, seed=1)
    traffic.hold(FIRST)
    flip(traffic, slot)
    again = request([*FIRST, 7])
    again.init_next_round_input(traffic.cache)
    assert again.prefix_len == 0
    assert slot in traffic.state_slots()
    assert len(traffic.state_slots()) == 2
    traffic.let_go()
    again.statecache_compared = None
    again.init_next_round_input(traffic.cache)
    assert again.prefix_len == 0
    assert slot not in traffic.state_slots()
    assert len(traffic.state_slots()) == 1
    assert numbers(traffic) == {"bytes": 2}
    assert traffic.hit([*SECOND, 7]) == 30


@pytest.mark.parametrize("core", CORES)
def test_a_condemned_state_goes_before_any_other(core):
    """By the policy it would be the last one: it is the deepest, and the latest used."""
    traffic = traffic_of(core)
    for number in range(3):
        cache(traffic, [100 + number] * 20, seed=number)
    slot = cache(traffic, [7] * 60, seed=9)
    side = traffic.core.scheduler_side
    side.registry.condemn(traffic.match([7] * 60).best_match_node)
    before = side.registry.watermark
    assert traffic.evict(states=1) == 1
    assert slot not in traffic.state_slots()
    assert len(traffic.state_slots()) == 3
    assert side.registry.watermark == before
    traffic.core.scheduler_side.registry.check()


@pytest.mark.parametrize("core", CORES)
def test_namespaces_keep_their_records_apart(core):
    """The record of one salt does not fit the same tokens under another."""
    traffic = traffic_of(core)
    records = traffic.requests.mamba_ckpt_pool.records
    for salt in ("a", "b"):
        salted = request(list(FIRST), cache_salt=salt)
        salted.init_next_round_input(traffic.cache)
        salted.lock = traffic.cache.lock(salted.last_node)
        assert traffic.requests.alloc([salted]) is not None
        fresh = traffic.kv_slots(30)
        row = traffic.requests.req_to_token[salted.kv.req_pool_idx]
        row[:30] = fresh.to(row.dtype)
        finish(traffic, salted, 30)
    a, b = (record.prefix for record in records._records.values())
    assert a.depth == b.depth == 30
    assert a.key != b.key


@pytest.mark.parametrize("core", CORES)
def test_a_waiting_request_has_its_state_compared_once(core):
    traffic = traffic_of(core, rate=1)
    cache(traffic, FIRST, seed=1)
    waiting = request([*FIRST, 7])
    for _ in range(3):
        waiting.init_next_round_input(traffic.cache)
        assert waiting.prefix_len == 30
    counted = reporting.sample(traffic.cache)
    assert counted["verified_stores"] == counted["verified_restores"] == 1
    assert counted["int8_error_layers|temporal"] == 2
    assert 0 < counted["int8_error_max|temporal"] < 0.05
    assert 0 < counted["int8_error_sum|temporal"] <= 2 * counted["int8_error_max|temporal"]


@pytest.mark.parametrize("core", CORES)
def test_with_track_buffers_the_record_is_of_the_tracked_depth(core):
    """The state is that of the last tracked token, not of the last one of the request."""
    traffic = traffic_of(core, rate=1, extra_buffer=True)
    running = admit(traffic, list(range(40)))
    fill_state(traffic, int(running.kv.mamba_pool_idx), seed=4)
    running.kv.mamba_last_track_seqlen = 30
    traffic.cache.checkpoint(running, up_to=40)
    (record,) = traffic.requests.mamba_ckpt_pool.records._records.values()
    assert record.prefix.depth == 30
    assert traffic.hit(list(range(40))) == 30


@pytest.mark.parametrize("core", CORES)
def test_a_right_state_comes_back_at_rate_1(core):
    traffic = traffic_of(core, rate=1)
    first = admit(traffic, FIRST)
    fill_state(traffic, int(first.kv.mamba_pool_idx), seed=1)
    _, conv = state_of(traffic, int(first.kv.mamba_pool_idx))
    finish(traffic, first, 30)
    again = admit(traffic, [*FIRST, 7])
    restore(traffic, again)
    _, now = state_of(traffic, int(again.kv.mamba_pool_idx))
    assert all(torch.equal(found, was) for found, was in zip(now, conv, strict=True))


def test_tokens_of_a_request_are_what_a_key_is_made_of():
    """8 bytes each: what `TokenPrefixes.key` reads of them."""
    made = request(FIRST)
    made.init_next_round_input(None)
    assert isinstance(made.full_untruncated_fill_ids, array)
    assert made.full_untruncated_fill_ids.itemsize == 8
