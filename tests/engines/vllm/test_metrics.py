"""The metrics of vLLM's real scheduler, and those a real server shows."""

import random

import pytest
import test_server
from engine import document
from prometheus_client import REGISTRY
from scheduled import Run, traffic, without_states, words
from test_server import ask, serve
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from statecache.tools.doctor_server import look_at_server
from statecache_vllm.connector import StateCacheConnector
from statecache_vllm.reporting import StateStats
from support.exposition import read, wait_for

POOL = {"checkpoints": "native", "checkpoint_slots": 4}


def sampled(run: Run) -> dict[str, float]:
    return run.scheduler_side.report._sample()


def test_a_request_counts_what_it_reused_and_a_miss_for_want_of_a_state(model):
    """100 tokens are 6 blocks of 16: 96 are reused, and missed once their states are gone."""
    rng = random.Random(1)
    run = Run(model, blocks=200, plugin={})
    prompt = words(rng, 100)
    assert [run.ask(prompt), run.ask(prompt)] == [0, 96]
    without_states(run)
    assert run.ask(prompt) == 0
    found = sampled(run)
    assert found["requests"] == 3
    assert found["prompt_tokens"] == 300
    assert (found["hit_requests"], found["hit_tokens"]) == (1, 96)
    assert (found["missed_by_state_requests"], found["missed_by_state_tokens"]) == (1, 96)
    assert found["active|reuse"] == 1
    assert found["slots|blocks"] == 199
    assert found["anomalies"] == 0


def test_the_checkpoint_pool_counts_stores_restores_evictions_and_bytes(model):
    rng = random.Random(2)
    run = Run(model, blocks=200, plugin=POOL)
    prompt = words(rng, 100)
    run.ask(prompt)
    without_states(run)
    assert run.ask(prompt) == 96
    for _ in range(6):
        run.ask(words(rng, 50))
    found, checkpoints = sampled(run), run.scheduler_side.checkpoints
    assert found["checkpoint_restores|native"] == 1
    assert found["checkpoint_stores|native"] == checkpoints.counts.stored > 4
    # 3 groups of one layer: 3 x 512 values of 2 bytes and 4 x 64 x 64 of 4.
    assert found["checkpoint_restored_bytes|native"] == 3 * (3 * 512 * 2 + 4 * 64 * 64 * 4)
    assert found["evictions|policy"] == checkpoints.counts.evicted > 0
    assert sum(n for key, n in found.items() if key.startswith("walk_seconds|")) == (
        checkpoints.counts.evicted
    )
    assert (found["slots|checkpoint"], found["states_resident|checkpoint"]) == (4, 4)
    assert (found["slots_free|checkpoint"], found["states_pinned|checkpoint"]) == (0, 0)
    assert found["active|reuse+learned"] == 1


def test_a_part_that_handed_over_is_not_active_and_its_counts_stay(model):
    rng = random.Random(3)
    run = Run(model, blocks=200, plugin=POOL)
    run.ask(words(rng, 100))
    before = sampled(run)
    run.scheduler_side.parts.end_checkpoints()
    after = sampled(run)
    assert (before["active|reuse+learned"], after["active|reuse+learned"]) == (1, 0)
    assert after["checkpoint_stores|native"] == before["checkpoint_stores|native"] > 0


def test_changes_of_every_step_add_up_to_the_numbers(model):
    """Whatever the steps in which they were sent; nothing is left after the last request."""
    run = Run(model, blocks=60, plugin=POOL)
    sent, messages = StateStats(), 0
    connector, collect = run.scheduler.connector, run.scheduler.connector.get_kv_connector_stats

    def watched():
        nonlocal sent, messages
        found = collect()
        if found is not None:
            sent, messages = sent.aggregate(found), messages + 1
        return found

    connector.get_kv_connector_stats = watched
    for _ in traffic(run, seed=5, steps=300):
        pass
    assert messages >= 1
    numbers = {key: n for key, n in sampled(run).items() if n or key in sent.data}
    assert sent.data == pytest.approx(numbers)
    assert not run.scheduler_side.report._found


def test_a_worker_and_a_failure_report_nothing(model):
    run = Run(model, blocks=60, plugin={})
    run.scheduler_side.report._reporter._sample = lambda: 1 / 0
    run.ask(words(random.Random(6), 40))
    assert run.scheduler.connector.get_kv_connector_stats() is None
    worker = StateCacheConnector.__new__(StateCacheConnector)
    worker._scheduler_side = None
    assert worker.get_kv_connector_stats() is None


def test_a_second_engine_in_one_process_goes_on_with_the_metrics(model):
    """VLLM takes its own metrics off the registry when it makes new ones, but not ours."""
    config = Run(model, blocks=60, plugin={}).config
    labels = {"engine": "vllm", "model_name": "tiny", "rank": "0"}
    for total in (3, 6):
        unregister_vllm_metrics()
        made = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"]})
        active = REGISTRY.get_sample_value("statecache_active", {**labels, "policy": "reuse"})
        assert active == 1
        made.observe({"requests": 3.0, "active|reuse": 0.0}, 0)
        assert REGISTRY.get_sample_value("statecache_requests_total", labels) == total
    made.observe({"no such metric": 1.0}, 0)  # logged, and the output of the engine goes on


def test_a_real_server_shows_them(model, tmp_path, monkeypatch):
    """A prompt of 276 tokens three times: 256 are reused twice."""
    monkeypatch.setattr(test_server, "PORT", test_server.free_port())
    url = f"http://127.0.0.1:{test_server.PORT}"
    flags = ["--kv-cache-plugin", "statecache", "--statecache-checkpoints", "native"]
    with serve(model, tmp_path / "log", *flags, "--statecache-checkpoint-slots", "8"):
        start = read(url)
        assert start["active", "reuse+learned"] == 1
        assert start["requests_total", ""] == 0
        assert [ask(model, document(1, 276))[0] for _ in range(3)] == [0, 256, 256]
        found = wait_for(url, lambda found: found["requests_total", ""] == 3)
        assert look_at_server(url) == (
            "ok",
            f"{url}/metrics: the plugin is active (engine vllm, policy reuse+learned)",
            "vllm",
        )
    assert found["requests_total", ""] == 3
    assert found["prompt_tokens_total", ""] == 3 * 276
    assert (found["hit_requests_total", ""], found["hit_tokens_total", ""]) == (2, 512)
    assert found["checkpoint_stores_total", "native"] >= 1
    assert found["slots", "checkpoint"] == 8
    assert found["states_resident", "checkpoint"] == found["checkpoint_stores_total", "native"]
    assert found["slots", "blocks"] == 39
    assert found["anomalies_total", ""] == 0
    assert "KV Transfer metrics" not in (tmp_path / "log").read_text()
