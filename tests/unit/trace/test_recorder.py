"""The recorder: what is in the file, what is not, and what faults cost."""

import json
import logging
import sys
import threading
import time
from array import array

import pytest

from statecache.ab.workloads import Workload
from statecache.cli.main import main
from statecache.replay.prefix_tree import PrefixTree
from statecache.trace.format import read_trace
from statecache.trace.recorder import BlockIds, Ended
from support.recordings import PROMPT, lines_of, recorder
from support.waiting import DEADLINE_SECONDS, wait_until


def test_ids_agree_exactly_as_far_as_prompts_do():
    ids = BlockIds(b"key")
    block_ids = ids.of(Ended(PROMPT, 1))
    forked = [*PROMPT[:1_000], 7, *PROMPT[1_001:]]  # in the second block
    other = ids.of(Ended(forked, 1))
    assert len(block_ids) == len(set(block_ids)) == 3  # 1,636 tokens
    assert [a == b for a, b in zip(block_ids, other, strict=True)] == [True, False, False]
    assert ids.of(Ended(PROMPT[:1_535], 9)) == block_ids[:2]
    assert ids.of(Ended(PROMPT[:511], 1)) == []
    assert ids.of(Ended(array("q", PROMPT), 1)) == block_ids
    assert all(0 <= block < 2**63 for block in block_ids)


def test_equal_blocks_after_different_ones_have_ids_of_their_own():
    ids = BlockIds()
    block = [5] * 512
    assert len(set(ids.of(Ended(block * 4, 1)))) == 4


def test_salts_and_adapters_keep_ids_apart():
    ids = BlockIds()
    spaces = [(), (None,), ("a",), ("b",), ("a", "b"), ("ab",), (None, "a"), ("", "a")]
    first = [ids.of(Ended(PROMPT, 1, space))[0] for space in spaces]
    assert len(set(first)) == len(spaces)
    assert ids.of(Ended(PROMPT, 1, ("a", "b"))) == ids.of(Ended(PROMPT, 2, ("a", "b")))


def test_images_keep_blocks_apart_from_where_they_begin():
    """An image of 40 tokens at 1,000 reaches into the third block, which starts at 1,024."""
    ids = BlockIds()
    cat, dog, moved = (
        ids.of(Ended(PROMPT, 1, spans=((first, 40, name),)))
        for first, name in ((1_000, "cat"), (1_000, "dog"), (1_001, "cat"))
    )
    plain = ids.of(Ended(PROMPT, 1))
    for other in (cat, dog, moved):
        assert other[0] == plain[0]
    for block in (1, 2):
        assert len({cat[block], dog[block], moved[block], plain[block]}) == 4


def test_no_two_recordings_share_ids():
    assert set(BlockIds().of(Ended(PROMPT, 1))).isdisjoint(BlockIds().of(Ended(PROMPT, 1)))


def test_a_recording_is_a_trace_that_replays(path, capfd):
    made = recorder(path)
    for turn in range(4):
        made.arrived(turn)
        made.ended(turn, Ended(PROMPT * (turn + 1), 10 + turn, session="chat"))
    made.close()
    trace = read_trace(str(path))
    assert [r.input_length for r in trace.requests] == [1_636, 3_272, 4_908, 6_544]
    assert [r.output_length for r in trace.requests] == [10, 11, 12, 13]
    assert PrefixTree.of(trace).known == [0, 3, 6, 9]  # whole blocks of the turn before
    assert len({line["session_id"] for line in lines_of(path)}) == 1
    assert main_of("replay", str(path), "--policy", "lru", "--json", "-") == 0
    assert json.loads(capfd.readouterr().out)["rows"][0]["hit_tokens"] == (3 + 6 + 9) * 512


def test_a_recording_with_sessions_is_a_workload_for_either_loop(path):
    """Two chats of two turns: a b a b as they came, a a b b when one at a time runs."""
    made = recorder(path)
    for name, (chat, turn) in enumerate([("a", 1), ("b", 1), ("a", 2), ("b", 2)]):
        made.arrived(name)
        tokens = [ord(chat)] * 1_024 * turn
        made.ended(name, Ended(tokens, ord(chat), session=chat))
    made.close()
    for loop, order in (({}, "abab"), ({"loop": "closed", "at_once": 1}, "aabb")):
        requests = Workload(kind="trace", file=str(path), **loop).trace(0).requests
        assert "".join(chr(request.output_length) for request in requests) == order


def main_of(*words: str) -> int:
    before, sys.argv = sys.argv, ["statecache", *words]
    try:
        return main()
    finally:
        sys.argv = before


def test_nothing_of_tokens_salts_and_names_is_in_the_file(tmp_path):
    path = tmp_path / "traffic"
    made = recorder(path)
    made.arrived("request-name")
    made.ended("request-name", Ended([31_337] * 600, 1, ("pepper",), session="chat-of-mary"))
    made.close()
    written = path.read_text()
    for secret in ("31337", "pepper", "mary", "request-name"):
        assert secret not in written
    assert set(json.loads(written)) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
        "session_id",
    }


def test_a_session_that_is_not_known_is_left_out(path):
    made = recorder(path)
    made.arrived("a")
    made.ended("a", Ended(PROMPT, 1))
    made.close()
    assert "session_id" not in lines_of(path)[0]


def test_lines_are_in_the_order_of_arrival(path):
    made = recorder(path)
    for name in (1, 2, 3):
        made.arrived(name)
        time.sleep(0.002)
    for name in (3, 1, 2):
        made.ended(name, Ended(PROMPT, name))
    made.close()
    lines = lines_of(path)
    assert [line["output_length"] for line in lines] == [1, 2, 3]
    times = [line["timestamp"] for line in lines]
    assert times == sorted(set(times))
    assert times[0] >= 0


def test_a_request_is_there_once(path):
    """Queued again after a retraction, reported again at its end, under a name that comes back."""
    made = recorder(path)
    made.arrived("a")
    made.arrived("a")
    made.ended("a", Ended(PROMPT, 1))
    made.ended("a", Ended(PROMPT, 2))
    made.ended("never arrived", Ended(PROMPT, 3))
    made.arrived("a")
    made.ended("a", Ended(PROMPT, 4))
    made.arrived("still running")
    made.close()
    assert [line["output_length"] for line in lines_of(path)] == [1, 4]


def test_what_ended_waits_for_a_request_that_runs_on(tmp_path):
    path, looks = tmp_path / "traffic", []
    made = recorder(path, patience=1e9, interval=0.01, observe=looks.append)
    made.arrived("long")
    made.arrived("short")
    made.ended("short", Ended(PROMPT, 1))
    wait_until(lambda: made._seen_tokens == len(PROMPT))
    before = len(looks)
    wait_until(lambda: len(looks) > before + 2)
    assert path.stat().st_size == 0
    made.ended("long", Ended(PROMPT, 2))
    made.close()
    assert [line["output_length"] for line in lines_of(path)] == [2, 1]


@pytest.mark.parametrize("said", [0, 1_534, 1_535, 1_536, 5_000])
def test_an_observer_hears_of_no_reuse_beyond_the_prompt(tmp_path, said):
    looks = []
    made = recorder(tmp_path / "traffic", observe=looks.extend)
    made.arrived("a")
    made.ended("a", Ended(PROMPT[:1_535], 1, cached_tokens=said))
    made.close()
    assert [cached for _, cached in looks] == [min(said, 1_535)]


def test_what_ended_does_not_wait_for_ever(tmp_path):
    path = tmp_path / "traffic"
    made = recorder(path, patience=0.05, interval=0.01)
    made.arrived("long")
    made.arrived("short")
    made.ended("short", Ended(PROMPT, 1))
    wait_until(lambda: path.stat().st_size > 0)
    made.ended("long", Ended(PROMPT, 2))
    made.close()
    assert [line["output_length"] for line in lines_of(path)] == [1, 2]


@pytest.mark.parametrize(
    "odd", [Ended(["x"] * 512, 1), Ended([2**70] * 512, 1), Ended([1], 1, session=b"s")]
)
def test_a_request_that_cannot_be_written_ends_the_recording_with_one_line(path, caplog, odd):
    made = recorder(path, interval=0.01)
    made.arrived(1)
    made.ended(1, Ended(PROMPT, 1))
    wait_until(lambda: path.stat().st_size > 0)
    made.arrived(2)
    made.ended(2, odd)
    wait_until(lambda: not made.recording)
    made.close()
    assert len(lines_of(path)) == 1
    (error,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert error.startswith("statecache: a request is not as expected (")
    assert error.endswith(f"; the recording to {path} ends here")


def test_a_fault_of_the_engine_ends_the_recording_and_keeps_what_was(path, caplog):
    made = recorder(path)
    made.arrived(1)
    made.ended(1, Ended(PROMPT, 1))
    made.stop("something is odd")
    made.stop("something else is odd")
    made.arrived(2)
    made.ended(2, Ended(PROMPT, 2))
    made.close()
    assert [line["output_length"] for line in lines_of(path)] == [1]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [f"statecache: something is odd; the recording to {path} ends here"]


def test_prompts_that_wait_for_a_slow_disk_are_bounded(path, monkeypatch, caplog):
    """One is being written, one may wait; the third one ends the recording, in one line."""
    monkeypatch.setattr("statecache.trace.recorder._MOST_TOKENS", len(PROMPT))
    goes_on = threading.Event()

    class Slow(BlockIds):
        def of(self, request):
            assert goes_on.wait(DEADLINE_SECONDS)
            return super().of(request)

    made = recorder(path, ids=Slow())
    for name in range(3):
        made.arrived(name)
    made.ended(0, Ended(PROMPT, 1))
    wait_until(lambda: made._seen_tokens == len(PROMPT))
    made.ended(1, Ended(PROMPT, 1))
    assert made.recording
    made.ended(2, Ended(PROMPT, 1))
    assert not made.recording
    assert caplog.text.count("faster than they can be written") == 1
    goes_on.set()
    made.close()
    wait_until(lambda: not made._thread.is_alive())
    assert len(lines_of(path)) == 3
