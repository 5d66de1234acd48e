"""`statecache replay --pool-blocks`: what it prints and writes, and what it refuses."""

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import statecache
from statecache.replay.block_pools import PoolRow, SlotRule, replay_pool, replay_slots
from statecache.replay.prefix_tree import PrefixTree, PreorderTree
from statecache.replay.report import pool_table
from support.replay_support import assert_one_line, run, trace_of, write_trace

# ab cd abx cdy abz: 13 blocks, of which 2, 2 and 2 are hit where all fits.
PROMPTS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]]
COST = f"{7 * 512 / 5:.4f}"  # at 1 a token, 7 blocks not hit


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.jsonl", PROMPTS)


def test_one_pool_has_a_row_for_each_block_policy(trace: Path) -> None:
    done = run("replay", trace, "--pool-blocks", "40,8", "--cost", "1,0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[0] == "policy"
    rows = [line.split() for line in done.stdout.splitlines()][2:]
    assert [row[:3] for row in rows] == [
        [policy, blocks, "branch-points"]
        for blocks in ("40", "8")
        for policy in ("fifo", "duplicates", "reuse")
    ]
    rate = f"{6 / 13:.4f}"
    assert all(row[3:] == ["5", rate, rate, "0.0", COST, "0"] for row in rows[:3])
    # A state takes 3 blocks, so a prompt of 2 needs 9: 8 serve none.
    assert all(row[3:] == ["0", "-", "-", "-", "-", "0"] for row in rows[3:])


def test_slots_of_their_own_have_a_row_for_each_policy(trace: Path) -> None:
    # 5 slots of 0.5 leave 7 of 10 blocks, as many as the five prompts have.
    done = run(
        *("replay", trace, "--pool-blocks", 10, "--checkpoint-slots", "5", "--cost", "1,0"),
        *("--state-blocks", "0.5", "--admission", "ends"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[0] == "policy"
    rows = [line.split() for line in done.stdout.splitlines()][2:]
    rate = f"{6 / 13:.4f}"
    assert rows == [
        [policy, "10", "5", "ends", "5", rate, rate, "0.0", COST, "0"] for policy in ("lru", "gds")
    ]


def test_the_table_of_one_pool_fits_eighty_columns(tmp_path: Path) -> None:
    # Requests of up to 131,072 tokens, in ten thousands.
    row = replay_pool(PrefixTree.of(trace_of(PROMPTS)), 65_536, "duplicates")
    with (tmp_path / "t").open("w+") as file:
        Console(file=file, width=1_000).print(pool_table([large(row)]))
    assert max(map(len, (tmp_path / "t").read_text().splitlines())) <= 80


def large(row: PoolRow) -> PoolRow:
    return msgspec.structs.replace(
        row, requests=99_999, missed_by_state_tokens=99_999 * 131_072, evicted_states=9_999_999
    )


def test_the_json_of_one_pool(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(
        *("replay", trace, "--pool-blocks", 12, "--block-policy", "reuse"),
        *("--state-blocks", "1", "--admission", "dense", "--chunk", 1024, "--limit", 4),
        *("--cost", "1,0", "--json", out),
    )
    assert done.returncode == 0, done.stderr
    tree = PrefixTree.of(trace_of(PROMPTS[:4]))
    row = replay_pool(tree, 12, "reuse", "dense", 1, 2, statecache.CostModel(1, 0))
    assert json.loads(out.read_bytes()) == {
        "schema": "statecache.pool-replay/1",
        "version": statecache.__version__,
        "trace": {
            "name": "small.jsonl",
            "sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
        },
        "seed": None,
        "settings": {
            "pool_blocks": [12],
            "state_blocks": 1.0,
            "block_policies": ["reuse"],
            "orders": ["reuse"],
            "checkpoint_slots": None,
            "policies": None,
            "admissions": ["dense"],
            "interior_weight": None,
            "queue_ratio": None,
            "chunk_tokens": 1024,
            "limit": 4,
            "cost": {"linear": 1.0, "quadratic": 0.0},
        },
        "rows": [
            {
                "pool_blocks": 12,
                "state_blocks": 1,
                "block_policy": "reuse",
                "order": "reuse",
                "checkpoint_slots": None,
                "policy": None,
                "admission": "dense",
                "requests": 4,
                "rejected": 0,
                "prompt_tokens": 10 * 512,
                "hit_tokens": row.hit_tokens,
                "resident_tokens": row.resident_tokens,
                "missed_by_state_tokens": row.resident_tokens - row.hit_tokens,
                "recompute_cost": 10 * 512 - row.hit_tokens,
                "evicted_states": row.evicted_states,
            }
        ],
    }


def test_the_json_of_slots_of_their_own(trace: Path) -> None:
    done = run(
        *("replay", trace, "--pool-blocks", 9, "--checkpoint-slots", 2, "--state-blocks", 1.58),
        *("--policy", "gds", "--json", "-"),
    )
    document = json.loads(done.stdout)
    settings = document["settings"]
    assert (settings["block_policies"], settings["policies"]) == (None, ["gds"])
    tree = PreorderTree.of(PrefixTree.of(trace_of(PROMPTS)))
    row = replay_slots(tree, 9, 2, SlotRule("gds"), state_blocks=1.58)
    assert document["rows"][0]["hit_tokens"] == row.hit_tokens
    assert (row.checkpoint_slots, row.policy, row.state_blocks) == (2, "gds", 1.58)
    assert document["rows"][0]["evicted_states"] == row.evicted_states > 0


def test_old_names_work_and_say_so_once(trace: Path) -> None:
    pool = ("replay", trace, "--pool-blocks", "40", "--json", "-")
    old = run(*pool, "--order", "copies,stock,copies", "--admission", "junctions,dense+junctions")
    new = run(
        *(*pool, "--block-policy", "duplicates,fifo"),
        *("--admission", "branch-points,dense+branch-points"),
    )
    assert (old.stdout, new.stderr) == (new.stdout, "")
    rows = json.loads(new.stdout)["rows"]
    assert [(row["block_policy"], row["order"]) for row in rows[:2]] == [
        ("duplicates", "copies"),
        ("fifo", "stock"),
    ]
    assert [line.partition(";")[0] for line in old.stderr.splitlines()] == [
        "statecache: --order is now --block-policy",
        "statecache: --block-policy copies is now --block-policy duplicates",
        "statecache: --block-policy stock is now --block-policy fifo",
        "statecache: --admission junctions is now --admission branch-points",
        "statecache: --admission dense+junctions is now --admission dense+branch-points",
    ]


POOL = ["--pool-blocks", "100"]
APART = [*POOL, "--checkpoint-slots", "4"]
BAD = {
    "block policy alone": (["--block-policy", "reuse"], "--block-policy: describes a pool of"),
    "order alone": (["--order", "reuse"], "--order: describes a pool of blocks"),
    "slots alone": (["--checkpoint-slots", "4"], "--checkpoint-slots: describes a pool of"),
    "pool 0": (["--pool-blocks", "0"], "--pool-blocks: '0' is no whole number from 1 up"),
    "pool huge": (["--pool-blocks", "99999999999"], "--pool-blocks: 99999999999 is above"),
    "with slots": ([*POOL, "--slots", "4"], "--slots: has no place in --pool-blocks"),
    "with kv": ([*POOL, "--kv-tokens", "4096"], "--kv-tokens: --pool-blocks says how much KV"),
    "with plot": ([*POOL, "--plot", "x.png"], "--plot: draws hit rate over --slots"),
    "policy": ([*POOL, "--policy", "gds"], "--policy: rules slots of their own: give --check"),
    "half a block": ([*POOL, "--state-blocks", "1.5"], "--state-blocks: 1.5 is no whole number"),
    "no block": ([*POOL, "--state-blocks", "0"], "--state-blocks: 0 is no number above 0"),
    "block text": ([*POOL, "--state-blocks", "big"], "--state-blocks"),
    "unknown block policy": (
        [*POOL, "--block-policy", "lru"],
        "--block-policy: unknown block policy 'lru': use fifo, duplicates, reuse",
    ),
    "old and new": (
        [*POOL, "--block-policy", "reuse", "--order", "reuse"],
        "--order: is what --block-policy was called",
    ),
    "admission": ([*POOL, "--admission", "all"], "--admission: unknown admission 'all': use bran"),
    "both": ([*APART, "--block-policy", "reuse"], "--block-policy: orders a pool without --check"),
    "clairvoyant": ([*APART, "--policy", "clairvoyant"], "--policy: unknown policy 'clairvoyant'"),
    "no room": (
        [*POOL, "--checkpoint-slots", "4,50", "--state-blocks", "2"],
        "--checkpoint-slots: 50 slots of 2 blocks leave none of 100 to KV",
    ),
    "no pool": (["--admission", "branch-points"], "--admission: unknown admission 'branch-poin"),
    "no pool, old name": (
        ["--admission", "junctions"],
        "--admission: unknown admission 'junctions'",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_options_that_make_no_sense_are_one_line(kind: str, trace: Path, tmp_path: Path) -> None:
    flags, problem = BAD[kind]
    done = run("replay", trace, "--json", tmp_path / "out.json", *flags, cwd=tmp_path)
    assert_one_line(done, problem)
    assert list(tmp_path.iterdir()) == [trace]
