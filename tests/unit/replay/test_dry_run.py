"""The recorder with an observer: alone, beside a file, and when either of them fails."""

import logging

import pytest

from statecache.engine.settings import Settings
from statecache.replay.kv_residency import kv_timeline
from statecache.replay.online import begin
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.trace.format import read_trace
from statecache.trace.recorder import Ended, TraceRecorder

LOG = logging.getLogger("statecache.test")
ON = {"kv_cache_plugin": "statecache", "dry_run": True}
TURN = list(range(1_024))


def settings(**more) -> Settings:
    return Settings.from_given({**ON, **more}, {})


def serve(made: TraceRecorder, requests: int = 30) -> None:
    """Two chats in turn that grow by two blocks a turn."""
    for name in range(requests):
        made.arrived(name)
        tokens = [name % 2, *TURN * (1 + name // 2)]
        made.ended(name, Ended(tokens, 1, cached_tokens=600))
    made.close()


def test_beside_a_recording_the_numbers_are_those_of_its_replay(tmp_path):
    path = tmp_path / "traffic.gz"
    shadow, observe = begin(3, 40 * 512, settings(), LOG)
    serve(TraceRecorder(str(path), 1, LOG, observe=observe))
    tree = PrefixTree.of(read_trace(str(path)))
    schedule = make_schedule(tree, kv_timeline(tree, 40 * 512), "dense")
    sample = shadow.sample()
    for policy in ("lru", "gds", "learned"):
        row = replay(schedule, policy, 3)
        assert sample[f"dry_run_hit_tokens|{policy}"] == row.hit_tokens > 0
        assert sample[f"dry_run_missed_by_state_tokens|{policy}"] == row.missed_by_state_tokens
        assert sample["dry_run_prompt_tokens"] == row.prompt_tokens
    assert sample["dry_run_hit_tokens|engine"] == row.requests * 512


def test_alone_it_writes_nothing_and_says_what_it_leaves_out(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    reports = []
    asked = settings(checkpoints="int8", checkpoint_slots=3)
    shadow, observe = begin(3, 40 * 512, asked, LOG, lambda: reports.append(1))
    serve(TraceRecorder(None, 1, LOG, observe=observe), 7)
    assert shadow.sample()["dry_run_requests"] == 7
    assert list(tmp_path.iterdir()) == []
    assert reports
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "statecache: dry run: the engine is left as it is (--statecache-checkpoints,"
        " --statecache-checkpoint-slots not put in place); replayed with 3 states"
        " and 20480 tokens of KV"
        " under lru, gds, learned, gds-tips",
        "statecache: the dry run ends after 7 requests",
    ]


@pytest.mark.parametrize("file", [True, False])
def test_an_observer_that_fails_is_the_last_of_it_and_the_recording_goes_on(
    tmp_path, caplog, file, monkeypatch
):
    shadow, observe = begin(3, 40 * 512, settings(), LOG)
    monkeypatch.setattr(shadow, "observe", lambda *_: 1 / 0)
    path = tmp_path / "traffic"
    serve(TraceRecorder(str(path) if file else None, 1, LOG, observe=observe))
    assert shadow.sample()["dry_run_requests"] == 0
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "wrong from now on" in caplog.text
    if file:
        assert len(read_trace(str(path)).requests) == 30


def test_a_full_disk_ends_the_recording_and_not_the_dry_run(caplog):
    shadow, observe = begin(3, 40 * 512, settings(), LOG)
    serve(TraceRecorder("/dev/full", 1, LOG, observe=observe))
    assert shadow.sample()["dry_run_requests"] == 30
    written = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert written == ["statecache: the recording to /dev/full ends here (No space left on device)"]
