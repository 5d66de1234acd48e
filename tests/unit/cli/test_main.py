"""The real command in a process of its own: what it prints and says of bad input."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import statecache
from statecache.replay.report import row_table
from statecache.trace.format import Request
from support.replay_support import COMMAND, assert_one_line, replay_prompts, run, write_trace

PROMPTS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.jsonl", PROMPTS)


def test_the_table_has_one_row_a_combination(trace: Path) -> None:
    done = run(
        *("replay", trace, "--slots", "1,2", "--admission", "ends", "--admission", "dense"),
        *("--cost", "1,0"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows[2:]] == [
        [policy, slots, admission]
        for admission in ("ends", "dense")
        for slots in ("1", "2")
        for policy in ("lru", "gds", "learned")
    ]
    # Worked by hand in test_replay: 13 blocks of prompt, 6 resident, 4 hit, 3 evicted at 2 slots.
    # At a cost of 1 a token, the 9 blocks not hit cost 9 * 512.
    missed, cost = f"{2 * 512 / 5:.1f}", f"{9 * 512 / 5:.4f}"
    assert rows[5][3:] == ["5", f"{4 / 13:.4f}", f"{6 / 13:.4f}", missed, cost, "3"]


def test_lists_take_commas_and_repeats_and_drop_what_comes_again(trace: Path) -> None:
    done = run(
        *("replay", trace, "--slots", "2,2", "--slots", "1, 02", "--policy", "gds,lru"),
        *("--policy", "gds", "--admission", "ends,dense,ends"),
    )
    assert [line.split()[:3] for line in done.stdout.splitlines()[2:]] == [
        [policy, slots, admission]
        for admission in ("ends", "dense")
        for slots in ("2", "1")
        for policy in ("gds", "lru")
    ]


def test_a_pipe_gets_whole_plain_rows_at_any_width(trace: Path) -> None:
    narrow = run("replay", trace, env={**os.environ, "COLUMNS": "20", "FORCE_COLOR": "1"})
    assert narrow.stdout == run("replay", trace).stdout
    assert narrow.stderr == ""
    assert "\x1b" not in narrow.stdout
    assert len({len(line.split()) for line in narrow.stdout.splitlines()[1:]}) == 1


def test_the_table_fits_eighty_columns(tmp_path: Path) -> None:
    # Requests of up to 131,072 tokens, in ten thousands.
    row = replay_prompts([[1, 2], [1, 2, 3]], "clairvoyant", 65_536, "dense")
    large = msgspec.structs.replace(
        row, requests=99_999, missed_by_state_tokens=99_999 * 131_072, evicted_states=9_999_999
    )
    with (tmp_path / "t").open("w+") as file:
        Console(file=file, width=1_000).print(row_table([large]))
    assert max(map(len, (tmp_path / "t").read_text().splitlines())) <= 80


def test_the_json_holds_rows_settings_and_origin(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(
        *("replay", trace, "--policy", "gds", "--slots", "2", "--admission", "ends"),
        *("--kv-tokens", 4096, "--chunk", 1024, "--limit", 4, "--cost", "1,0", "--json", out),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_bytes())
    row = replay_prompts(PROMPTS[:4], "gds", 2, "ends", 2, 8)
    assert document == {
        "schema": "statecache.replay/1",
        "version": statecache.__version__,
        "trace": {
            "name": "small.jsonl",
            "sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
        },
        "seed": None,
        "settings": {
            "policies": ["gds"],
            "slots": [2],
            "admissions": ["ends"],
            "kv_tokens": 4096,
            "chunk_tokens": 1024,
            "limit": 4,
            "cost": {"linear": 1.0, "quadratic": 0.0},
        },
        "rows": [
            {
                "policy": "gds",
                "slots": 2,
                "admission": "ends",
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
    assert list(tmp_path.glob(".*")) == []


def test_stdin_and_gzip_give_the_same_rows(trace: Path) -> None:
    packed = gzip.compress(trace.read_bytes())
    piped = subprocess.run(
        [COMMAND, "replay", "-"], input=packed, capture_output=True, check=True, timeout=600
    )
    assert piped.stdout.decode() == run("replay", trace).stdout


def test_generate_is_reproducible_and_names_its_seed(tmp_path: Path) -> None:
    options = ("generate", "agent", "--sessions", 3, "--turns", 4, "--seed", 9)
    for name in ("a.gz", "b.gz", "c.jsonl"):
        assert run(*options, "-o", tmp_path / name).returncode == 0
    packed = (tmp_path / "a.gz").read_bytes()
    assert packed == (tmp_path / "b.gz").read_bytes()
    plain = (tmp_path / "c.jsonl").read_text()
    assert run(*options, "-o", tmp_path / "d.GZ").returncode == 0
    assert (tmp_path / "d.GZ").read_bytes() == packed
    assert gzip.decompress(packed).decode() == plain == run(*options, "-o", "-").stdout
    run("replay", tmp_path / "a.gz", "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_bytes())["seed"] == 9


BAD_SETTINGS = {
    "unknown policy": (["--policy", "fifo"], "--policy: unknown policy 'fifo': use lru, gds, lear"),
    "slots 0": (["--slots", "0"], "--slots: '0' is no whole number from 1 up"),
    "slots empty": (["--slots", "64,,128"], "--slots: '' is no whole number"),
    "slots text": (["--slots", "many"], "--slots: 'many' is no whole number"),
    "slots long": (["--slots", "9" * 5000], "is no whole number from 1 up"),
    "kv text": (["--kv-tokens", "lots"], "--kv-tokens: 'lots' is no whole number from 512 up"),
    "kv small": (["--kv-tokens", "511"], "--kv-tokens: '511' is no whole number from 512 up"),
    "admission": (
        ["--admission", "all"],
        "--admission: unknown admission 'all': use dense, ends, aligned",
    ),
    "chunk odd": (["--chunk", "1000"], "--chunk: 1000 is no multiple of 512"),
    "chunk 0": (["--chunk", "0"], "--chunk: 0 is no multiple of 512"),
    "chunk text": (["--chunk", "big"], "--chunk"),
    "limit 0": (["--limit", "0"], "--limit"),
    "cost one": (["--cost", "1"], "--cost cannot be '1': use two numbers"),
    "cost zero": (["--cost", "0,0"], "--cost cannot be '0,0': "),
    "cost nan": (["--cost", "nan,1"], "--cost cannot be 'nan,1': "),
    "cost text": (["--cost", "a,b"], "--cost cannot be 'a,b': "),
    "unknown flag": (["--nonsense"], "--nonsense"),
    "two traces": (["other"], "other"),
    "policy none": (["--policy", "gds,"], "--policy: unknown policy '': use lru, gds, lear"),
    "plot format": (["--plot", "x.docx"], "--plot: 'x.docx' must end in one of"),
    "plot backend": (["--plot", "x.pgf"], "--plot: 'x.pgf' must end in one of .pdf, .png, .svg"),
    "plot nowhere": (["--plot", "/nowhere/x.png"], "--plot: there is no directory /nowhere"),
    "plot as json": (["--json", "x.png", "--plot", "./x.png"], "--plot: names the same file as"),
    "plot of none": (["--kv-tokens", "512", "--plot", "x.png"], "--plot: no request fits the KV"),
    "json nowhere": (["--json", "/nowhere/x.json"], "--json: there is no directory /nowhere"),
    "json folder": (["--json", "/"], "--json: / is a directory"),
}


@pytest.mark.parametrize("kind", BAD_SETTINGS)
def test_a_bad_setting_is_one_line(kind: str, trace: Path, tmp_path: Path) -> None:
    flags, problem = BAD_SETTINGS[kind]
    out = tmp_path / "out.json"
    done = run(
        "replay", trace, *([] if "--json" in flags else ["--json", out]), *flags, cwd=tmp_path
    )
    assert_one_line(done, problem)
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing command"),
        (["replay"], "TRACE"),
        (["replay", ""], "TRACE is empty"),
        (["nonsense"], "nonsense"),
        (["generate", "agent"], "--output"),
        (["generate", "agent", "-o", "/nowhere/x"], "--output: there is no directory /nowhere"),
        (["generate", "agent", "-o", "x", "--sessions", "0"], "--sessions is 0"),
        (["generate", "agent", "-o", "x", "--seed", "-1"], "--seed is -1"),
        (["generate", "distinct-prefixes", "-o", "x", "--count", "0"], "--count is 0"),
        (["generate", "shared-prefix", "-o", "x", "--prefix-tokens", "1000"], "--prefix-tokens is"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], problem: str, tmp_path: Path) -> None:
    assert_one_line(run(*arguments, cwd=tmp_path), problem)
    assert list(tmp_path.iterdir()) == []


GOOD = b'{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}\n'
BAD_TRACES = {
    "truncated gzip": (gzip.compress(GOOD)[:-12], ", line 1: gzip data is cut off"),
    "not json": (GOOD + b"{]\n", ", line 2: is not a JSON object"),
    "missing field": (GOOD + b'{"timestamp":0}\n', ", line 2: object missing required field `inp"),
    "negative length": (GOOD.replace(b"1024", b"-4"), ", line 1: field input_length: expected"),
    "ids no integers": (
        GOOD.replace(b"[1,2]", b"[1,true]"),
        ", line 1: field hash_ids[1]: expected",
    ),
    "empty file": (b"", ": is empty"),
}


@pytest.mark.parametrize("kind", BAD_TRACES)
def test_a_bad_trace_is_one_line(kind: str, tmp_path: Path) -> None:
    content, problem = BAD_TRACES[kind]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    done = run("replay", path, "--json", tmp_path / "o.json")
    assert_one_line(done, f"{path}{problem}")
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_trace_and_a_folder_are_one_line(tmp_path: Path) -> None:
    assert_one_line(run("replay", tmp_path / "none"), "none: cannot be read (No such file")
    assert_one_line(run("replay", tmp_path), f"{tmp_path}: cannot be read (Is a directory)")


def test_an_earlier_result_survives_bad_input(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("earlier")
    (tmp_path / "bad").write_bytes(b"{]")
    assert run("replay", tmp_path / "bad", "--json", out).returncode == 2
    assert out.read_text() == "earlier"


def test_the_trace_is_never_overwritten(trace: Path) -> None:
    before = trace.read_bytes()
    assert_one_line(run("replay", trace, "--json", trace), "--json: ")
    assert trace.read_bytes() == before


@pytest.mark.parametrize("name", ["x.png", "x.SVG", "x.pdf"])
def test_a_plot_is_written_whatever_the_trace_is_called(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    trace = write_trace(tmp_path / "$x_{$ 日本.jsonl", PROMPTS)
    plot, out = tmp_path / name, tmp_path / "out.json"
    done = run("replay", trace, "--plot", plot, "--json", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("replay", trace).stdout
    assert plot.read_bytes().startswith((b"\x89PNG\r\n", b"<?xml", b"%PDF"))
    assert json.loads(out.read_bytes())["trace"]["name"] == trace.name


def test_the_help_of_replay_tells_the_format_of_a_trace() -> None:
    shown = run("replay", "--help").stdout
    for field in (*Request.__struct_fields__, "session_id"):
        assert field in shown


def test_version() -> None:
    shown = f"statecache {statecache.__version__}\n"
    assert run("--version").stdout == shown
    as_module = [sys.executable, "-m", "statecache", "--version"]
    assert subprocess.check_output(as_module, text=True) == shown


def test_replay_needs_neither_torch_nor_engines_nor_matplotlib(trace: Path) -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "sglang", "matplotlib", "numpy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from statecache.cli.main import main
sys.argv[1:] = {arguments}
sys.exit(main())
"""
    plain = program.replace("{arguments}", repr(["replay", str(trace)]))
    done = subprocess.run(
        [sys.executable, "-c", plain], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("replay", trace).stdout
    drawn = program.replace("{arguments}", repr(["replay", str(trace), "--plot", "x.png"]))
    done = subprocess.run(
        [sys.executable, "-c", drawn], capture_output=True, text=True, timeout=600
    )
    assert_one_line(done, "--plot: matplotlib is not installed: pip install 'statecache[plot]'")
