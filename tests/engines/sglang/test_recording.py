"""`--statecache-record`: SGLang's scheduler writes a trace that says what was sent."""

import json
import urllib.request
from array import array

import pytest
from scheduled import request
from server import refused, running
from sglang.srt.runtime_context import get_parallel
from tiny_model import make_tiny_model

from statecache.engine.settings import Settings
from statecache.replay.prefix_tree import PrefixTree
from statecache.trace.format import read_trace
from statecache.trace.recorder import BlockIds
from statecache_sglang.recording import Recording
from statecache_sglang.seams import scheduler as scheduler_seams
from support.waiting import DEADLINE_SECONDS, wait_for_lines

ON = ("--kv-cache-plugin", "statecache")


def chat(tokens: int, number: int = 0) -> list[int]:
    return [4 + (number * 37 + at * (number + 7)) % 250 for at in range(tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny-qwen3-next"))


def sessions_of(path) -> list[int | None]:
    return [json.loads(line).get("session_id") for line in path.read_text().splitlines()]


def test_a_server_records_what_it_serves(model, tmp_path):
    """A chat with its turns in a session, a stranger, a fork, the chat under another key, aborts.

    The server is killed at the end.
    """
    path = tmp_path / "traffic.jsonl"
    with running(model, tmp_path / "log", *ON, "--statecache-record", str(path)) as server:
        server.generate(chat(1_200), new=3, session_id="mary")
        server.generate(chat(1_700), new=3, session_id="mary")
        server.generate(chat(700, 5), new=1)
        server.generate([*chat(600), *chat(600, 3)], new=2)
        server.generate(chat(1_200), new=2, extra_key="other")
        server.generate(chat(1_200), new=2, cache_salt="pepper")
        abort_one(server, chat(1_100, 9))
        wait_for_lines(path, 7)
    trace = read_trace(str(path))
    asked = [1_200, 1_700, 700, 1_200, 1_200, 1_200, 1_100]
    assert [r.input_length for r in trace.requests] == asked
    assert [r.output_length for r in trace.requests[:6]] == [3, 3, 1, 2, 2, 2]
    assert 0 < trace.requests[6].output_length < 2_900
    assert PrefixTree.of(trace).known == [0, 2, 0, 1, 0, 0, 0]
    first, second, *others = sessions_of(path)
    assert first == second is not None
    assert set(others) == {None}
    assert "mary" not in path.read_text()


def abort_one(server, tokens) -> None:
    """Abort a request of many tokens once the first of them came."""
    sampling = {"max_new_tokens": 2_900, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": tokens, "rid": "long", "sampling_params": sampling, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
        assert answer.readline().startswith(b"data: ")
        server.post("abort_request", {"rid": "long"})
        answer.read()


def test_a_folder_in_its_place_stops_the_server(model, tmp_path):
    written = refused(model, *ON, "--statecache-record", str(tmp_path))
    line = f"statecache: --statecache-record: {tmp_path} is there and no file: name another one"
    assert line in written.splitlines()


def recorded_to(path) -> Settings:
    return Settings.from_given({"kv_cache_plugin": "statecache", "record": str(path)}, {})


def test_a_server_that_starts_again_records_beside_its_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_seams, "is_first_rank", lambda: True)
    path = tmp_path / "traffic.jsonl"
    path.write_text("precious")
    made = Recording(recorded_to(path))
    made.begin(None)
    made._recorder.close()
    assert path.read_text() == "precious"
    assert (tmp_path / "traffic.2.jsonl").exists()


@pytest.fixture
def feed(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_seams, "is_first_rank", lambda: True)
    made = Recording(recorded_to(tmp_path / "traffic"))
    made.begin(None)
    return made


def lines(feed, tmp_path) -> list[dict]:
    feed._recorder.close()
    return [json.loads(line) for line in (tmp_path / "traffic").read_text().splitlines()]


def test_a_retracted_request_is_there_once(feed, tmp_path):
    req = request(chat(600))
    feed.arrived(req)
    feed.arrived(req)  # queued again
    req.output_ids = array("q", [1, 2, 3])
    feed.ended(req)
    feed.ended(req)  # the overlapped schedule reports an end twice
    assert [line["output_length"] for line in lines(feed, tmp_path)] == [3]


def test_a_prompt_that_sglang_replaced_when_it_aborted_is_as_it_came(feed, tmp_path):
    req = request(chat(600))
    feed.arrived(req)
    with get_parallel().override(tp_rank=0):
        req.set_finish_with_abort("no")
    feed.ended(req)
    assert len(req.origin_input_ids) == 1
    assert [line["input_length"] for line in lines(feed, tmp_path)] == [600]


def test_keys_and_salts_that_sglang_keeps_apart_have_ids_of_their_own():
    ids = BlockIds(b"key")
    more = [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "lora_id": "b"}]
    reqs = [request(chat(600), **namespace) for namespace in more]
    first = [ids.of(scheduler_seams.ended(req, req.origin_input_ids))[0] for req in reqs]
    assert len(set(first)) == 4


def test_prompts_given_as_embeddings_are_left_out(feed, tmp_path):
    req = request(chat(600), input_embeds=[[0.0]])
    feed.arrived(req)
    feed.ended(req)
    assert lines(feed, tmp_path) == []


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler_seams, "is_first_rank", lambda: False)
    feed = Recording(recorded_to(tmp_path / "traffic"))
    feed.begin(None)
    req = request(chat(600))
    feed.arrived(req)
    feed.ended(req)
    assert not (tmp_path / "traffic").exists()
    assert feed._tokens == {}


def test_an_unexpected_request_ends_the_recording_and_nothing_else(feed, tmp_path, monkeypatch):
    req, late = request(chat(600)), request(chat(600))
    feed.arrived(req)
    recorder = feed._recorder
    monkeypatch.delattr(type(req), "output_ids_through_stop")
    feed.ended(req)
    feed.arrived(late)
    feed.ended(late)
    recorder.close()
    assert (tmp_path / "traffic").read_text() == ""
