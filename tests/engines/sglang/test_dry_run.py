"""`--statecache-dry-run`: SGLang decides as without the plugin; the metrics say what might be."""

import types

import pytest
from cache_layer import CORES, Traffic, plugin
from random_traffic import operations, perform
from server import running
from tiny_model import make_tiny_model

from statecache.engine.settings import Settings
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.trace.format import read_trace
from statecache_sglang.recording import Recording
from statecache_sglang.seams import scheduler as scheduler_seams
from support.exposition import wait_for
from support.waiting import wait_for_lines

DRY = {"dry_run": True, "int8": True, "int8_slots": 3, "policy": "gds"}


@pytest.mark.parametrize("core", CORES)
def test_the_cache_layer_is_sglangs_own(core):
    alone = Traffic(core, slots=16, kv_tokens=900)
    with plugin(**DRY):
        dry = Traffic(core, slots=16, kv_tokens=900)
        assert type(dry.core) is type(alone.core)
        assert dry.requests.mamba_ckpt_pool is None
        for operation in operations(3, 400):
            assert perform(dry, operation) == perform(alone, operation)
            assert dry.state_slots() == alone.state_slots()


def test_a_model_without_states_gets_no_dry_run(monkeypatch, caplog):
    monkeypatch.setattr(scheduler_seams, "is_first_rank", lambda: True)
    given = {"kv_cache_plugin": "statecache", "dry_run": True}
    made = Recording(Settings.from_given(given, {}))
    made.begin(types.SimpleNamespace(req_to_token_pool=object(), max_total_num_tokens=1))
    assert made._recorder is None
    assert "caches no recurrent states; no dry run" in caplog.text


def chat(tokens: int, number: int = 0) -> list[int]:
    return [4 + (number * 37 + at * (number + 7)) % 250 for at in range(tokens)]


PROMPTS = [
    *(chat(600 * turn) for turn in (1, 2, 3)),
    *(chat(1_100, number) for number in range(1, 7)),
    chat(1_900),
    chat(1_900),
    [*chat(600), *chat(700, 9)],
    *(chat(1_300, number) for number in range(5, 1, -1)),
]


def test_a_server_serves_as_without_it_and_shows_what_a_replay_of_its_recording_says(
    tmp_path_factory, tmp_path, forked
):
    """Three states and 16 blocks of KV."""
    model, path = make_tiny_model(tmp_path_factory.mktemp("dry-run-model")), tmp_path / "traffic"
    with running(model, tmp_path / "off", **forked) as server:
        alone = [server.generate(prompt, new=2) for prompt in PROMPTS]
    flags = ["--kv-cache-plugin", "statecache", "--statecache-dry-run", "--enable-metrics"]
    flags += ["--statecache-int8", "--statecache-int8-slots", "3", "--statecache-record", str(path)]
    with running(model, tmp_path / "dry", *flags, **forked) as server:
        dry = [server.generate(prompt, new=2) for prompt in PROMPTS]
        url = f"http://127.0.0.1:{server.port}"
        found = wait_for(
            url, lambda found: found.get(("dry_run_requests_total", "")) == len(PROMPTS)
        )
        wait_for_lines(path, len(PROMPTS))
    assert [answer["cached"] for answer in dry] == [answer["cached"] for answer in alone]
    assert [answer["tokens"] for answer in dry] == [answer["tokens"] for answer in alone]
    tree = PrefixTree.of(read_trace(str(path)))
    schedule = make_schedule(tree, kv_timeline(tree, 8_192), "dense")
    for policy in ("lru", "gds", "learned"):
        row = replay(schedule, policy, 3)
        assert found["dry_run_hit_tokens_total", policy] == row.hit_tokens > 0
        missed = found.get(("dry_run_missed_by_state_tokens_total", policy), 0)
        assert missed == row.missed_by_state_tokens
        assert found["dry_run_evictions_total", policy] == row.evicted_states > 0
    assert found["dry_run_prompt_tokens_total", ""] == row.prompt_tokens
    engine = sum(answer["cached"] // 512 * 512 for answer in alone)
    assert found["dry_run_hit_tokens_total", "engine"] == engine > 0
    assert found["active", "dry_run"] == 0
    log = (tmp_path / "dry").read_text()
    line = (
        "statecache: dry run: the engine is left as it is (--statecache-checkpoints,"
        " --statecache-checkpoint-slots not put in place); replayed with 3 states"
        " and 8192 tokens of KV"
    )
    assert log.count(line) == 1
