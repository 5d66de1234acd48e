"""`--statecache-record`: vLLM's real scheduler writes a trace that says what was sent."""

import json
import random
import urllib.request

import pytest
from engine import document
from scheduled import Run, words
from test_server import PORT, serve
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from statecache.replay.prefix_tree import PrefixTree
from statecache.trace.format import read_trace
from statecache.trace.recorder import BlockIds
from statecache_vllm import recording
from support.waiting import DEADLINE_SECONDS, wait_for_lines

_HASH = get_hash_fn_by_name("sha256")


def recorded(run, path):
    run.scheduler.shutdown()
    return read_trace(str(path))


def test_the_trace_has_the_prefixes_that_were_sent(model, tmp_path):
    """Turns of one chat, then a stranger, then the chat under a salt."""
    path, rng = tmp_path / "traffic.gz", random.Random(0)
    run = Run(model, blocks=600, plugin={"record": str(path)})
    chat, stranger = words(rng, 3_000), words(rng, 1_100)
    for prompt, more in [
        (chat[:1_500], {}),
        (chat[:2_100], {}),
        (chat, {}),
        (stranger, {}),
        (chat, {"cache_salt": "pepper"}),
        ([*chat[:1_030], *stranger], {"session_id": "chat"}),
    ]:
        run.ask(prompt, tokens=3, **more)
    trace = recorded(run, path)
    assert [r.input_length for r in trace.requests] == [1_500, 2_100, 3_000, 1_100, 3_000, 2_130]
    assert {r.output_length for r in trace.requests} == {3}
    assert PrefixTree.of(trace).known == [0, 2, 4, 0, 0, 2]
    assert run.scheduler_side.faults.anomalies == 0


def test_preempted_and_aborted_requests_are_there_once(model, tmp_path):
    path, rng = tmp_path / "traffic", random.Random(1)
    run = Run(model, blocks=190, plugin={"record": str(path)})
    preempted = []
    scheduler = run.scheduler
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *a, **k: (
        preempted.append(request.request_id),
        original(request, *a, **k),
    )[1]
    for length in range(520, 528):
        run.add(words(rng, length), tokens=60)
    for _ in range(5):
        run.step()
    aborted = run.add(words(rng, 600), tokens=60)
    scheduler.finish_requests([aborted], RequestStatus.FINISHED_ABORTED)
    running = scheduler.running[0].request_id
    scheduler.finish_requests([running], RequestStatus.FINISHED_ABORTED)
    run.finish()
    assert preempted
    trace = recorded(run, path)
    assert [r.input_length for r in trace.requests] == [*range(520, 528), 600]
    outputs = [r.output_length for r in trace.requests]
    assert outputs[-1] == 0
    assert outputs.count(60) == 7


def test_ids_are_shared_exactly_where_vllm_shares_blocks():
    """Salts, adapters and images, against vLLM's own hashes at the same tokens."""
    init_none_hash(_HASH)
    hasher, rng = get_request_block_hasher(16, _HASH), random.Random(2)
    base = words(rng, 2_048)
    requests = []
    for number in range(60):
        fork = rng.choice([0, 300, 700, 1_024, 2_048])
        picture = rng.choice([None, "cat", "dog"])
        first = rng.choice([100, 500, 900, 1_030])
        adapter = rng.choice([None, None, "a", "b"])
        feature = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=picture or "",
            mm_position=PlaceholderRange(offset=first, length=600 if picture == "dog" else 30),
        )
        requests.append(
            Request(
                request_id=str(number),
                prompt_token_ids=[*base[:fork], *([number] * (2_048 - fork))],
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                block_hasher=hasher,
                cache_salt=rng.choice([None, None, "s"]),
                lora_request=LoRARequest(adapter, 1, f"/{adapter}") if adapter else None,
                mm_features=[feature] if picture else None,
            )
        )
    ids = BlockIds()
    ours = [ids.of(recording._ended(request)) for request in requests]
    theirs = [request.block_hashes[31::32] for request in requests]
    shared = 0
    for a in range(len(requests)):
        for b in range(a):
            for block in range(4):
                same = theirs[a][block] == theirs[b][block]
                assert (ours[a][block] == ours[b][block]) == same
                shared += same
    assert shared > 20


def test_an_unexpected_request_ends_the_recording_and_nothing_else(model, tmp_path, monkeypatch):
    path = tmp_path / "traffic"
    run = Run(model, blocks=200, plugin={"record": str(path)})
    prompt = words(random.Random(3), 600)
    assert run.ask(prompt) == 0
    monkeypatch.setattr(recording, "_ended", lambda request: request.nothing)
    assert run.ask(prompt) > 0
    assert run.ask(prompt) > 0
    assert run.scheduler_side.faults.anomalies == 1
    assert len(recorded(run, path).requests) == 1


def test_a_folder_in_its_place_stops_the_server(model, tmp_path):
    config = {"kv_cache_plugin": "statecache", "statecache_record": str(tmp_path)}
    with pytest.raises(SystemExit) as stopped:
        EngineArgs(model=str(model), additional_config=config).create_engine_config()
    assert str(stopped.value) == (
        f"statecache: --statecache-record: {tmp_path} is there and no file: name another one"
    )


def test_a_server_that_starts_again_records_beside_its_first_file(model, tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("precious")
    run = Run(model, blocks=200, plugin={"record": str(path)})
    run.ask(words(random.Random(3), 600))
    assert len(recorded(run, tmp_path / "traffic.2.jsonl").requests) == 1
    assert path.read_text() == "precious"


def test_a_server_records_what_it_serves(model, tmp_path):
    path = tmp_path / "traffic.jsonl.gz"
    chat = document(1, 900)
    with serve(
        model, tmp_path / "log", "--kv-cache-plugin", "statecache", "--statecache-record", str(path)
    ):
        for prompt in (chat[:600], chat, [*chat[:520], *document(2, 300)]):
            body = {"model": str(model), "prompt": prompt, "max_tokens": 4, "session_id": "s"}
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/v1/completions",
                json.dumps({**body, "ignore_eos": True}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 4
        wait_for_lines(path, 3)  # the server kills its scheduler
    trace = read_trace(str(path))
    assert [(r.input_length, r.output_length) for r in trace.requests] == [
        (600, 4),
        (900, 4),
        (820, 4),
    ]
    assert PrefixTree.of(trace).known == [0, 1, 1]
    assert f"recording requests to {path}" in (tmp_path / "log").read_text()
