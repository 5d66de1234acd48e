"""`statecache plan`: splits that add up, the best one, and what is refused."""

import json
import subprocess
import sys

import pytest

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import replay
from statecache.sizing.model_config import read_model
from statecache.sizing.splits import Demand, Split, best_splits, rated_splits
from statecache.trace.format import read_trace
from support.model_configs import PUBLISHED, QWEN3_NEXT
from support.replay_support import write_trace

GIB = 2**30
STATE, INT8, TOKEN = 77_266_944, 21_233_664, 24_576  # see test_model_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    command("generate", "agent", "--sessions", "12", "--turns", "12", "-o", path / "agent.jsonl")
    return path


def command(*words) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "statecache", *map(str, words)], capture_output=True, text=True
    )


def plan(folder, *words) -> subprocess.CompletedProcess:
    given = ["--model", folder, "--memory", "12GiB", "--trace", folder / "agent.jsonl"]
    for flag in words[::2]:
        if flag in given:
            at = given.index(flag)
            del given[at : at + 2]
    return command("plan", *given, *words)


@pytest.fixture(scope="module")
def report(folder) -> dict:
    return json.loads(plan(folder, "--running", "4", "--json", "-").stdout)


def demand(folder, **more) -> Demand:
    sizes = {"memory_bytes": 12 * GIB, "engines": ["sglang", "vllm"], "shares": [10], "running": 4}
    return Demand(model=read_model(folder), **sizes | more)


def test_every_split_adds_up(report):
    assert len(report["splits"]) == 2 * 2 * 6 + 1
    for split in report["splits"]:
        sglang = split["engine"] == "sglang"
        state, int8 = (STATE, INT8) if sglang else (39_518_208, 20_938_752)
        # SGLang keeps slot 0 of each pool for itself; a state of vLLM is 3 blocks of 544 tokens.
        active = 21 * STATE if sglang else 8 * 3 * 544 * TOKEN
        assert split["active_slots"] == (20 if sglang else 8)
        assert split["active_bytes"] == active
        slot_bytes = {"native": state, "int8": int8, "shared": 0}[split["states"]]
        reserved = int8 if sglang and split["states"] == "int8" else 0
        kept = (split["kept_slots"] or 0) * slot_bytes
        assert split["kept_bytes"] == kept
        assert active + kept + reserved + split["kv_bytes"] == 12 * GIB
        share = split["share"] * (12 * GIB - active) // 100
        assert share - slot_bytes <= kept + reserved <= share
        block = 1 if sglang else 544
        assert split["kv_tokens"] == split["kv_bytes"] // (block * TOKEN) * block


def test_a_drafter_takes_states_for_its_drafts_and_kv_of_its_own_layer(folder):
    """SGLang verifies 4 tokens a step, for 4 requests and a row it keeps for itself: 20 states."""
    report = json.loads(
        plan(
            folder,
            *("--running", 4),
            *("--draft-tokens", 3),
            *("--engine", "sglang"),
            "--json",
            "-",
        ).stdout
    )
    token = TOKEN // 12 * 13  # 12 layers of attention, and one of the drafter
    for split in report["splits"]:
        active = (20 + 1 + 20) * STATE
        assert split["active_bytes"] == active
        reserved = INT8 if split["states"] == "int8" else 0
        assert active + split["kept_bytes"] + reserved + split["kv_bytes"] == 12 * GIB
        assert split["kv_tokens"] == split["kv_bytes"] // token
        drafting = (
            "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1"
            " --speculative-num-draft-tokens 4"
        )
        assert drafting in split["flags"]


def test_vllm_keeps_a_state_for_each_draft_and_widens_the_convolution(folder):
    """Of 8,192 channels 3 + 3 tokens, and 32 x 128 x 128 values: 560 tokens of a layer's KV.

    Four requests hold two states and one for each of 3 drafts: 20 of 3 blocks, each as large as
    those of 12 layers of attention and the drafter's one.
    """
    told = plan(folder, "--running", 4, "--draft-tokens", 3, "--engine", "vllm", "--json", "-")
    token = TOKEN // 12 * 13
    active = 20 * 3 * 560 * token
    for split in json.loads(told.stdout)["splits"]:
        assert split["active_bytes"] == active
        assert split["kv_tokens"] == split["kv_bytes"] // (560 * token) * 560
        assert active + split["kept_bytes"] + split["kv_bytes"] == 12 * GIB
        if split["states"] == "native":
            assert split["kept_bytes"] == split["kept_slots"] * 36 * 2 * (8192 * 6 + 32 * 128 * 128)
        assert "--spec-method mtp --spec-tokens 3" in split["flags"]


def test_the_rates_are_those_of_the_replay(folder, report):
    tree = PrefixTree.of(read_trace(str(folder / "agent.jsonl")))
    prompt = 512 * sum(map(len, tree.paths))
    for split in report["splits"]:
        assert split["prompt_tokens"] == prompt
        if split["engine"] == "sglang":
            kv = kv_timeline(tree, split["kv_tokens"])
            row = replay(make_schedule(tree, kv, "dense"), "gds", split["kept_slots"])
            assert (row.hit_tokens, row.rejected) == (split["hit_tokens"], split["rejected"])
    shown = command(
        *("replay", folder / "agent.jsonl", "--json", "-", "--admission", "dense+branch-points"),
        *("--pool-blocks", (12 * GIB - 8 * 3 * 544 * TOKEN) // (512 * TOKEN)),
        *("--checkpoint-slots", report["best"]["vllm"]["kept_slots"], "--policy", "gds"),
        *("--state-blocks", 20_938_752 / (512 * TOKEN)),
    )
    assert report["best"]["vllm"]["states"] == "int8"
    assert json.loads(shown.stdout)["rows"][0]["hit_tokens"] == report["best"]["vllm"]["hit_tokens"]


def test_the_best_split_is_the_one_that_reuses_most(report):
    for engine, best in report["best"].items():
        own = [split for split in report["splits"] if split["engine"] == engine]
        assert best in own
        assert best["hit_tokens"] == max(split["hit_tokens"] for split in own)


def test_of_equal_splits_the_one_with_more_kv_is_best():
    splits = [split(5, 100), split(5, 200), split(5, 150), split(4, 900)]
    assert best_splits(splits) == {"vllm": splits[1]}


def test_of_all_splits_one_that_rejects_the_fewest_is_best():
    splits = [split(8, 900, 2), split(3, 100, 1), split(4, 100, 1), split(0, 900, 3)]
    assert best_splits(splits) == {"vllm": splits[2]}
    assert best_splits(splits[3:]) == {}


def split(hit: int, kv: int, rejected: int = 0) -> Split:
    """One of three requests."""
    counts = dict.fromkeys(("share", "active_slots", "kept_slots"), 0)
    sizes = dict.fromkeys(("active_bytes", "kept_bytes", "kv_bytes"), 0)
    return Split(
        engine="vllm",
        states="int8",
        kv_tokens=kv,
        prompt_tokens=9,
        hit_tokens=hit,
        requests=3,
        rejected=rejected,
        flags=[],
        **counts,
        **sizes,
    )


def test_what_the_best_split_cannot_serve_is_said(tmp_path):
    """Prompts of 4 and of 2,000 blocks; SGLang's native states leave KV for a few hundred."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    write_trace(tmp_path / "agent.jsonl", [[1, 2, 3, 4], [1, 2, 3, 4, 5], list(range(10, 2_010))])
    words = ("--running", "4", "--split", "30", "--memory", "10GiB")
    done = plan(tmp_path, *words)
    assert done.returncode == 0
    assert "best for sglang: " in done.stdout
    rest = "even the best split rejects 1 of 3 requests, which are longer than its KV"
    assert done.stderr.splitlines() == [
        f"statecache: {engine}: {rest}: give more --memory" for engine in ("sglang", "vllm")
    ]
    # SGLang's 6 states leave two blocks of KV and no room for a kept one, vLLM's take less.
    done = plan(tmp_path, "--running", "1", "--split", "30", "--memory", f"{6 * STATE + 2**25}")
    assert done.returncode == 0
    assert "best for sglang" not in done.stdout
    assert "statecache: sglang: no split serves a single request: give more" in done.stderr
    assert "best for vllm" in done.stdout


def test_no_split_is_recommended_that_serves_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    write_trace(tmp_path / "agent.jsonl", [list(range(2_000)), list(range(3_000))])
    words = ("--running", "4", "--split", "30", "--memory", "10GiB", "--json", tmp_path / "r")
    done = plan(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "statecache: --memory: no split serves any of the 2 requests of a block or more: their"
        " prompts of 1,024,000 to 1,536,000 tokens are longer than its KV: give more\n"
    )
    assert not (tmp_path / "r").exists()


def test_the_table_marks_the_best_and_names_its_flags(folder):
    done = plan(folder, "--engine", "sglang", "--running", "4", "--split", "10,30")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "qwen3_next: 36 layers with a state of 32 x 128 x 128 and 24,576 values of a convolution,"
        " 12 with attention"
    )
    assert lines[1].startswith("sglang: a state takes 77,266,944 bytes, 21,233,664 in int8;")
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 1
    kept = marked[0].split()[6].replace(",", "")
    assert lines[-1] == (
        "best for sglang: --kv-cache-plugin statecache --max-running-requests 4"
        " --max-mamba-cache-size 20 --statecache-checkpoints int8"
        f" --statecache-checkpoint-slots {kept}"
    )


def test_ranks_and_types_change_the_bytes(folder):
    words = ("--tp", "2", "--kv-dtype", "fp8", "--state-dtype", "bfloat16", "--json", "-")
    found = json.loads(plan(folder, *words).stdout)
    sglang = found["sizes"][0]
    assert sglang["kv_token_bytes"] == TOKEN // 4
    assert sglang["state_bytes"] == 39_518_208 // 2
    flags = " ".join(found["best"]["sglang"]["flags"])
    for flag in ("--tp-size 2", "--kv-cache-dtype fp8_e4m3", "--mamba-ssm-dtype bfloat16"):
        assert flag in flags


def test_a_request_that_cannot_fit_counts_as_not_reused(tmp_path):
    """A prompt of 4 blocks, one more, then one of 2,000: KV is there for a few hundred."""
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for ids in ([1, 2, 3, 4], [1, 2, 3, 4, 5], list(range(10, 2_010)))
    ]
    (tmp_path / "t").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    tree = PrefixTree.of(read_trace(str(tmp_path / "t")))
    for split in rated_splits(demand(tmp_path, memory_bytes=10 * GIB, shares=[30]), tree):
        assert split.rejected == 1
        assert split.prompt_tokens == 512 * 2_009
        assert split.hit_tokens == 4 * 512


def test_shares_that_leave_no_room_are_left_out(folder):
    """Of the bytes of two int8 states 60 % are one, which SGLang keeps for itself; of four, two."""
    tree = PrefixTree.of(read_trace(str(folder / "agent.jsonl")))
    tight = demand(folder, engines=["sglang"], memory_bytes=21 * STATE + 2 * INT8, shares=[1, 60])
    found = [(s.states, s.share, s.kept_slots) for s in rated_splits(tight, tree)]
    assert found == []
    wide = demand(folder, engines=["sglang"], memory_bytes=21 * STATE + 4 * INT8, shares=[1, 60])
    found = [(s.states, s.share, s.kept_slots) for s in rated_splits(wide, tree)]
    assert found == [("int8", 60, 1)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_is_planned_for(tmp_path, folder, name):
    (tmp_path / "c.json").write_text(json.dumps(PUBLISHED[name]))
    done = plan(folder, "--model", tmp_path / "c.json", "--split", "20", "--limit", "40")
    assert (done.returncode, done.stderr) == (0, "")
    assert "best for sglang" in done.stdout
    assert "best for vllm" in done.stdout


def test_the_same_input_gives_the_same_bytes(folder):
    words = ("--json", "-", "--split", "20", "--limit", "60")
    assert plan(folder, *words).stdout == plan(folder, *words).stdout != ""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--memory", "60 apples"), "--memory: '60 apples' is no size: give e.g. 60GiB"),
        (("--memory", "999999TiB"), "blocks of KV: give at most 10,000,000"),
        (("--memory", "0GiB"), "--memory: '0GiB' is no size"),
        (("--memory", "1GiB"), "do not hold the states of 16 running requests in sglang, 6,258,"),
        (("--engine", "trt"), "--engine: unknown engine 'trt': use sglang, vllm"),
        (("--kv-dtype", "int4"), "--kv-dtype: unknown kv-dtype 'int4'"),
        (("--state-dtype", "fp8"), "--state-dtype: unknown state-dtype 'fp8'"),
        (("--split", "0"), "--split: '0' is no percentage from 1 to 99"),
        (("--split", "100"), "--split: '100' is no percentage"),
        (("--chunk", "100"), "--chunk: 100 is no multiple of 512"),
        (("--model", "/nowhere"), "/nowhere: cannot be read (No such file or directory)"),
        (("--trace", "/nowhere"), "/nowhere: cannot be read (No such file or directory)"),
        (("--json", "/nowhere/x"), "--json: there is no directory /nowhere: create it"),
        (("--tp", "3"), "16 key heads cannot be shared by --tp 3 ranks"),
        (("--tp", "0"), "--tp"),
        (("--draft-tokens", "-1"), "--draft-tokens"),
        (("--draft-tokens", "many"), "--draft-tokens"),
        (("--draft-tokens", "1e9"), "--draft-tokens"),
        (("--draft-tokens", "1000000000"), "do not hold the states of 16 running requests"),
    ],
)
def test_what_is_refused_is_one_line(folder, words, problem):
    done = plan(folder, *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_a_model_may_have_no_layers_for_drafts(folder, tmp_path, key):
    """As published files say it: planned for like any other, and without drafts."""
    (tmp_path / "c.json").write_text(json.dumps(QWEN3_NEXT | {key: 0}))
    words = ("--engine", "sglang", "--split", "20", "--limit", "40", "--model")
    assert plan(folder, *words, tmp_path / "c.json").stdout == plan(folder, *words, folder).stdout
    done = plan(folder, *words, tmp_path / "c.json", "--draft-tokens", "0")
    assert (done.returncode, done.stderr) == (0, "")
    done = plan(folder, *words, tmp_path / "c.json", "--draft-tokens", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"statecache: --draft-tokens: {tmp_path / 'c.json'}: this model has no drafter of its own"
        " (num_nextn_predict_layers or mtp_num_hidden_layers): leave the flag out\n"
    )
    (tmp_path / "c.json").write_text(json.dumps(QWEN3_NEXT | {key: -1}))
    done = plan(folder, *words, tmp_path / "c.json")
    assert done.returncode == 2
    assert done.stderr.endswith(f"c.json: {key} is -1: a number from 0 up is expected\n")


@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h", "granite", "falcon_h1"])
def test_drafts_are_refused_for_a_family_without_a_drafter(folder, tmp_path, name):
    (tmp_path / "c.json").write_text(json.dumps(PUBLISHED[name]))
    words = ("--model", tmp_path / "c.json", "--draft-tokens", "2")
    done = plan(folder, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this model has no drafter of its own" in done.stderr
    (tmp_path / "c.json").write_text(json.dumps(PUBLISHED[name] | {"num_nextn_predict_layers": 1}))
    assert plan(folder, *words, "--limit", "40", "--split", "20").returncode == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("2gb", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("12KiB", 12_288), ("7", 7)],
)
def test_sizes_may_be_written_in_several_ways(text, size):
    from statecache.cli.plan import _memory

    assert _memory(text) == size
