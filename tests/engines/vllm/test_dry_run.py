"""`--statecache-dry-run`: vLLM decides as without the plugin; the metrics say what might be."""

import itertools
import random

import test_server
from engine import document
from scheduled import Run, traffic, words
from test_server import ask, serve
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.tools.doctor_server import look_at_server
from statecache.trace.format import read_trace
from support.exposition import wait_for

DRY = {"dry_run": True, "checkpoints": "native", "checkpoint_slots": 6, "block_policy": "reuse"}


def states_of(run: Run, seed: int, steps: int) -> list:
    """Which blocks are free in which order and what is cached, after each step."""
    found = []
    for _ in traffic(run, seed, steps):
        free = [block.block_id for block in run.pool.free_block_queue.get_all_free_blocks()]
        found.append((free, [block.block_hash for block in run.pool.blocks]))
    return [*found, run.cached]


def test_every_decision_is_vllms_own(model):
    """Under pressure, block for block: the free queue, what is cached, what requests reuse."""
    dry = Run(model, blocks=70, plugin=DRY)
    assert type(dry.pool.free_block_queue) is FreeKVCacheBlockQueue
    assert dry.scheduler_side.checkpoints is None
    assert states_of(dry, 1, 600) == states_of(Run(model, blocks=70), 1, 600)
    assert dry.scheduler_side.faults.anomalies == 0


def test_the_worker_and_its_memory_are_vllms_own(model):
    config = {"kv_cache_plugin": "statecache", "statecache_dry_run": True}
    config["statecache_checkpoints"] = "native"
    arguments = EngineArgs(model=str(model), block_size=32, additional_config=config)
    made = arguments.create_engine_config()
    assert made.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert made.cache_config.prefix_cache_retention_interval == 0


def test_the_numbers_are_those_of_a_replay_of_the_recording(model, tmp_path):
    """A state has 205,824 bytes (test_memory.py), a third of it in a block: 6 are 18 blocks.

    The 582 others hold 16 tokens each.
    """
    path, rng = tmp_path / "traffic", random.Random(4)
    run = Run(model, blocks=600, plugin={**DRY, "record": str(path)})
    chats = [words(rng, 600) for _ in range(5)]
    cached = 0
    for _ in range(40):
        number = rng.randrange(5)
        chats[number] = [*chats[number], *words(rng, rng.randrange(300))][:3_500]
        cached += run.ask(chats[number]) // 512 * 512
    run.scheduler.shutdown()
    found = run.scheduler_side.report._sample()
    tree = PrefixTree.of(read_trace(str(path)))
    schedule = make_schedule(tree, kv_timeline(tree, 582 * 16), "dense")
    for policy in ("lru", "gds", "learned"):
        row = replay(schedule, policy, 6)
        assert found[f"dry_run_hit_tokens|{policy}"] == row.hit_tokens > 0
        assert found[f"dry_run_missed_by_state_tokens|{policy}"] == row.missed_by_state_tokens
        assert found[f"dry_run_evictions|{policy}"] == row.evicted_states > 0
    assert found["dry_run_requests"] == 40
    assert found["dry_run_hit_tokens|engine"] == cached > 0
    assert found["active|dry_run"] == 0


def test_an_unexpected_request_ends_the_dry_run_and_nothing_else(model, monkeypatch, caplog):
    run = Run(model, blocks=200, plugin=DRY)
    monkeypatch.setattr("statecache_vllm.recording._ended", lambda *_: 1 / 0)
    prompt = words(random.Random(3), 600)
    assert run.ask(prompt) == 0
    assert run.ask(prompt) > 0
    assert run.scheduler_side.faults.anomalies == 1
    assert "a request is not as expected; the dry run ends here" in caplog.text


def test_a_real_server_shows_them(model, tmp_path, monkeypatch):
    """A prompt of 640 tokens is one block of 512; numbers of the last request come with the next.

    With one slot: it is stored, hit, and driven out by another one.
    """
    monkeypatch.setattr(test_server, "PORT", test_server.free_port())
    url = f"http://127.0.0.1:{test_server.PORT}"
    flags = ["--kv-cache-plugin", "statecache", "--statecache-dry-run"]
    flags += ["--statecache-checkpoints", "native", "--statecache-checkpoint-slots", "1"]
    with serve(model, tmp_path / "log", *flags):
        prompts = [document(1, 600)] * 2 + [document(2, 600), document(1, 600)]
        reused = [ask(model, prompt)[0] for prompt in prompts]
        numbers = itertools.count(3)

        def settled(found) -> bool:
            if found.get(("dry_run_requests_total", "")) == 4:
                return True
            ask(model, document(next(numbers), 40))  # a short one, so that the numbers travel
            return False

        found = wait_for(url, settled)
        level, line, engine = look_at_server(url)
    assert engine == "vllm"
    assert found["dry_run_requests_total", ""] == 4
    assert found["dry_run_prompt_tokens_total", ""] == 4 * 512
    assert found["dry_run_evictions_total", "lru"] == 2
    engine = sum(tokens // 512 * 512 for tokens in reused)
    assert found["dry_run_hit_tokens_total", "engine"] == engine > 0
    assert found["active", "dry_run"] == 0
    assert (level, line) == ("ok", f"{url}/metrics: a dry run: the engine decides (engine vllm)")
    log = (tmp_path / "log").read_text()
    assert log.count("dry run: the engine is left as it is") == 1
    assert "--statecache-checkpoint-slots not put in place" in log
