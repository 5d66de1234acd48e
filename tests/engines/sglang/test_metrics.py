"""The metrics of SGLang's real cache layer, and those a real server shows."""

import sys
import time

import pytest
from cache_layer import CORES, MAMBA, Traffic, plugin
from scheduled import admit, request
from server import running
from sglang.srt.managers.schedule_policy import PrefillAdder
from test_slot_shortage import SLOTS, fill_with_pinned
from tiny_model import make_tiny_model

from statecache.tools.doctor_server import look_at_server
from statecache_sglang import reporting
from statecache_sglang.seams import scheduler as scheduler_seams
from support.exposition import read, wait_for


def numbered(start: int, tokens: int = 10) -> list[int]:
    return list(range(start, start + tokens))


@pytest.mark.parametrize("core", CORES)
def test_the_numbers_are_those_of_the_cache(core):
    """6 slots: 8 states of 10 tokens, so the index drops 2; one of the rest is locked."""
    start = time.perf_counter()
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=6)
    for number in range(8):
        traffic.run(numbered(1_000 * number))
    traffic.hold(numbered(7_000))
    found = reporting.sample(traffic.cache)
    assert found["active|gds"] == 1
    assert found["evictions|policy"] == 2
    assert "evictions|engine" not in found
    assert (found["slots|active"], found["slots_free|active"]) == (6, 0)
    assert (found["states_resident|active"], found["states_pinned|active"]) == (6, 1)
    assert sum(number for key, number in found.items() if key.startswith("walk_seconds|")) == 2
    assert 0 < found["walk_seconds_sum"] < time.perf_counter() - start
    assert found["anomalies"] == 0


@pytest.mark.parametrize("core", CORES)
def test_what_learned_remembers_is_shown(core):
    """4 slots, 6 states of 10 tokens: 2 were dropped with their KV and are remembered as ghosts.

    Then KV goes for its own sake, with a state: nobody can resume there, so it is no ghost.
    """
    with plugin(policy="learned"):
        traffic = Traffic(core, slots=4)
    for number in range(6):
        traffic.run(numbered(1_000 * number))
    found = reporting.sample(traffic.cache)
    assert found["active|learned"] == 1
    assert found["learned_ghosts"] == 2
    assert found["learned_points"] == found["learned_prefixes"] == 6
    assert [found[f"learned_follows|{order}"] for order in ("learned", "gds", "lru")] == [1, 0, 0]
    traffic.evict(kv_tokens=10)
    found = reporting.sample(traffic.cache)
    assert (found["evictions|engine"], found["states_resident|active"]) == (1, 3)
    assert found["learned_ghosts"] == 2
    traffic.check()


@pytest.mark.parametrize("core", CORES)
def test_states_that_the_engine_drops_or_a_flush_loses_have_reasons_of_their_own(core):
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=6)
    for number in range(4):
        traffic.run(numbered(1_000 * number))
    traffic.evict(kv_tokens=10)
    found = reporting.sample(traffic.cache)
    assert (found["evictions|engine"], found["states_resident|active"]) == (1, 3)
    traffic.flush()
    found = reporting.sample(traffic.cache)
    assert (found["evictions|engine"], found["evictions|reset"]) == (1, 3)
    assert found["states_resident|active"] == 0


@pytest.mark.parametrize("core", CORES)
def test_what_there_is_no_slot_for_is_counted_with_its_reason(core):
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    req = admit(traffic, numbered(50_000, 30))
    fill_with_pinned(traffic, SLOTS - 1)
    traffic.cache.checkpoint(req, up_to=30)
    other = request([1_000 + i for i in range(10)] + [7])
    other.init_next_round_input(traffic.cache)
    found = reporting.sample(traffic.cache)
    assert (found["skips|not_cached"], found["skips|not_reused"]) == (1, 1)


@pytest.mark.parametrize("core", CORES)
def test_a_request_counts_what_its_match_found(core):
    """States at 30 and 40; the inner one goes and its KV stays: 35 tokens have KV and no state."""
    with plugin(policy="gds"):
        traffic = Traffic(core, slots=SLOTS)
    traffic.run(numbered(0, 30))
    traffic.run(numbered(0, 40))
    counts = traffic.core.scheduler_side.counts

    def ask() -> int:
        req = request(numbered(0, 35) + numbered(900, 15))
        req.init_next_round_input(traffic.cache)
        reporting.admitted(traffic.cache, req)
        return req.prefix_len

    assert ask() == 30
    assert (counts.numbers["hit_tokens"], counts.numbers["missed_by_state_tokens"]) == (30, 5)
    traffic.hold(numbered(0, 40))
    assert traffic.evict(states=1) == 1
    assert ask() == 0
    assert counts.numbers == {
        **{key: n for key, n in counts.numbers.items() if key.startswith("evictions")},
        "requests": 2,
        "prompt_tokens": 100,
        "hit_requests": 1,
        "hit_tokens": 30,
        "missed_by_state_requests": 2,
        "missed_by_state_tokens": 5 + 35,
    }


def test_a_slot_of_the_int8_pool_is_counted_when_stored_and_restored():
    with plugin(policy="gds", int8=True, int8_slots=5):
        traffic = Traffic("rust", slots=SLOTS)
    pool, active = traffic.state_pool, traffic.requests.mamba_allocator.alloc(1)
    slot = pool.alloc(1)
    pool.store_from_active(None, active, slot)
    pool.load_to_active(None, slot, active)
    found = reporting.sample(traffic.cache)
    assert (found["checkpoint_stores|int8"], found["checkpoint_restores|int8"]) == (1, 1)
    # 2 layers of 2 x 16 x 16 int8 values, 2 x 16 scales of 2 bytes and 64 x 3 values of 2.
    assert found["checkpoint_stored_bytes|int8"] == 2 * (512 + 64 + 384)
    assert (found["slots|checkpoint"], found["slots_free|checkpoint"]) == (5, 4)


def test_where_sglangs_metrics_are_off_nothing_is_set_up(monkeypatch):
    """Without --enable-metrics not even prometheus_client is loaded."""
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=6)
    monkeypatch.setattr(scheduler_seams, "PrometheusClasses", None)  # must not be reached
    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    for _ in range(3):
        reporting.report(traffic.cache)
    assert traffic.core.scheduler_side.reporter is not None
    assert "prometheus_client" not in sys.modules


def test_a_report_that_fails_takes_nothing_down(monkeypatch, caplog):
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=6)
    monkeypatch.setattr(scheduler_seams, "exporter", lambda: 1 / 0)
    for _ in range(3):
        reporting.report(traffic.cache)
    reporting.report(Traffic("rust", slots=6).cache)  # a cache that is SGLang's own
    assert traffic.core.scheduler_side.faults.active
    assert [record.getMessage() for record in caplog.records] == [
        "statecache: metrics failed; they are wrong from now on"
    ]


def test_admission_counts_only_what_is_admitted(monkeypatch):
    """`PrefillAdder.add_one_req` puts an admitted request at the end of its list."""
    with plugin(policy="gds"):
        traffic = Traffic("rust", slots=SLOTS)
        seen = []
        monkeypatch.setattr(reporting, "admitted", lambda *seen_now: seen.append(seen_now))
        adder = PrefillAdder.__new__(PrefillAdder)
        adder.tree_cache, adder.can_run_list = traffic.cache, []
        adder.new_chunked_req = adder.rem_chunk_tokens = None
        adder.prefill_max_requests = 0  # so SGLang answers "not now" before anything else
        refused = request(numbered(0))
        refused.init_next_round_input(traffic.cache)
        adder.add_one_req(refused, False, None)
        assert seen == []
    assert MAMBA in traffic.cache.components


LONG = [4 + (13 * i) % 250 for i in range(200)]


def stranger(number: int) -> list[int]:
    return [4 + (number * 17 + i * (number % 7 + 1)) % 250 for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("metrics-model"))


def test_a_real_server_shows_them(model, tmp_path, forked):
    """A prompt of 200 tokens, its state driven out by 30 strangers; it goes on, twice."""
    flags = ("--kv-cache-plugin", "statecache", "--statecache-policy", "lru", "--enable-metrics")
    with running(model, tmp_path / "log", *flags, **forked) as server:
        url = f"http://127.0.0.1:{server.port}"
        start = wait_for(url, lambda found: ("active", "lru") in found)
        assert start["active", "lru"] == 1
        assert start["requests_total", ""] == 0
        cached = [server.generate(LONG)["cached"]]
        cached += [server.generate(stranger(number))["cached"] for number in range(30)]
        longer = [*LONG, 5, 6]
        cached += [server.generate(prompt)["cached"] for prompt in (longer, [*longer, 7, 8])]
        found = wait_for(url, lambda found: found["requests_total", ""] == 33)
        assert look_at_server(url) == (
            "ok",
            f"{url}/metrics: the plugin is active (engine sglang, policy lru)",
            "sglang",
        )
    assert found["requests_total", ""] == 33
    assert found["prompt_tokens_total", ""] == 200 + 30 * 12 + 202 + 204
    assert cached[-2:] == [0, 202]
    assert found["hit_tokens_total", ""] == sum(cached)
    assert found["hit_requests_total", ""] == sum(tokens > 0 for tokens in cached)
    # All of its KV was still there when the state was missed, or it had left with the state. The
    # 201st token is in it if the model answered what comes next.
    assert found["missed_by_state_tokens_total", ""] in (0, 200, 201)
    assert found["evictions_total", "policy"] > 0
    assert found["walk_seconds_count", ""] > 0
    assert found["slots", "active"] == 24
    resident = found["states_resident", "active"]
    assert resident + found["slots_free", "active"] == 24
    assert found["anomalies_total", ""] == 0


def test_a_real_server_without_the_plugin_shows_none(model, tmp_path, forked):
    with running(model, tmp_path / "log", "--enable-metrics", **forked) as server:
        url = f"http://127.0.0.1:{server.port}"
        assert read(url) == {}
        assert look_at_server(url)[0] == "problem"
