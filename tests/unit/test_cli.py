"""The real command in a process of its own: what it prints, writes, and says of bad input."""

import gzip
import hashlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import statecache
from replay_support import replay_prompts, write_trace

COMMAND = str(Path(sys.executable).with_name("statecache"))
PROMPTS = [[1, 2], [3, 4], [1, 2, 5], [3, 4, 6], [1, 2, 7]]


def run(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, **more
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "small.jsonl", PROMPTS)


def test_the_table_has_one_row_a_combination(trace: Path) -> None:
    done = run("replay", trace, "--slots", "1,2", "--admission", "ends", "--admission", "dense")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        [policy, slots, admission]
        for admission in ("ends", "dense")
        for slots in ("1", "2")
        for policy in ("lru", "gds")
    ]
    # Worked by hand in test_replay: 13 blocks of prompt, 6 resident, 4 hit, 3 evicted at 2 slots.
    assert rows[3][3:7] == ["5", f"{4 / 13:.4f}", f"{6 / 13:.4f}", f"{2 * 512 / 5:.1f}"]
    assert rows[3][-1] == "3"


def test_a_pipe_gets_whole_plain_rows_at_any_width(trace: Path) -> None:
    narrow = run("replay", trace, env={**os.environ, "COLUMNS": "20", "FORCE_COLOR": "1"})
    assert narrow.stdout == run("replay", trace).stdout
    assert "\x1b" not in narrow.stdout
    assert len({len(line.split()) for line in narrow.stdout.splitlines()[1:]}) == 1


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
        [COMMAND, "replay", "-"], input=packed, capture_output=True, check=True, timeout=60
    )
    assert piped.stdout.decode() == run("replay", trace).stdout


def test_generate_is_reproducible_and_names_its_seed(tmp_path: Path) -> None:
    options = ("generate", "agent", "--sessions", 3, "--turns", 4, "--seed", 9)
    for name in ("a.gz", "b.gz", "c.jsonl"):
        assert run(*options, "-o", tmp_path / name).returncode == 0
    packed = (tmp_path / "a.gz").read_bytes()
    assert packed == (tmp_path / "b.gz").read_bytes()
    plain = (tmp_path / "c.jsonl").read_text()
    assert gzip.decompress(packed).decode() == plain == run(*options, "-o", "-").stdout
    run("replay", tmp_path / "a.gz", "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_bytes())["seed"] == 9


BAD_SETTINGS = {
    "unknown policy": (["--policy", "fifo"], "--policy: unknown policy 'fifo': use gds, lru, clai"),
    "slots 0": (["--slots", "0"], "--slots: '0' is no whole number from 1 up"),
    "slots empty": (["--slots", "64,,128"], "--slots: '' is no whole number"),
    "slots text": (["--slots", "many"], "--slots: 'many' is no whole number"),
    "slots long": (["--slots", "9" * 5000], "is no whole number from 1 up"),
    "kv text": (["--kv-tokens", "lots"], "--kv-tokens: 'lots' is no whole number from 512 up"),
    "kv small": (["--kv-tokens", "511"], "--kv-tokens: '511' is no whole number from 512 up"),
    "admission": (["--admission", "all"], "--admission: unknown admission 'all': use dense, ends"),
    "chunk odd": (["--chunk", "1000"], "--chunk: 1000 is no multiple of 512"),
    "chunk 0": (["--chunk", "0"], "--chunk: 0 is no multiple of 512"),
    "chunk text": (["--chunk", "big"], "--chunk"),
    "limit 0": (["--limit", "0"], "--limit"),
    "cost one": (["--cost", "1"], "--cost: '1': give two numbers"),
    "cost zero": (["--cost", "0,0"], "--cost: '0,0': "),
    "cost nan": (["--cost", "nan,1"], "--cost: 'nan,1': "),
    "cost text": (["--cost", "a,b"], "--cost: 'a,b': "),
    "unknown flag": (["--nonsense"], "--nonsense"),
    "two traces": (["other"], "other"),
    "plot format": (["--plot", "x.docx"], "--plot: 'x.docx' must end in one of"),
    "json nowhere": (["--json", "/nowhere/x.json"], "--json: there is no directory /nowhere"),
    "json folder": (["--json", "/"], "--json: / is a directory"),
}


def assert_one_line(done: subprocess.CompletedProcess[str], problem: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("statecache: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", BAD_SETTINGS)
def test_a_bad_setting_is_one_line(kind: str, trace: Path, tmp_path: Path) -> None:
    flags, problem = BAD_SETTINGS[kind]
    out = tmp_path / "out.json"
    done = run("replay", trace, *([] if "--json" in flags else ["--json", out]), *flags)
    assert_one_line(done, problem)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Missing command"),
        (["replay"], "TRACE"),
        (["nonsense"], "nonsense"),
        (["generate", "agent"], "--output"),
        (["generate", "agent", "-o", "/nowhere/x"], "--output: there is no directory /nowhere"),
        (["generate", "agent", "-o", "x", "--sessions", "0"], "--sessions is 0"),
        (["generate", "agent", "-o", "x", "--seed", "-1"], "--seed is -1"),
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


def test_devices_are_written_and_stay_devices(trace: Path) -> None:
    assert run("replay", trace, "--json", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()
    full = run("replay", trace, "--json", "/dev/full")
    assert_one_line(full, "--json: /dev/full cannot be written (No space left on device)")


def test_a_full_stdout_is_one_line(trace: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [COMMAND, "replay", str(trace)], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == b"statecache: output: No space left on device\n"


@pytest.mark.parametrize(
    "command",
    ['"$0" generate agent --sessions 20 -o - | head -n 1', '"$0" replay "$1" | head -n 0'],
)
def test_a_reader_that_leaves_causes_no_traceback(command: str, trace: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", command, COMMAND, str(trace)], capture_output=True, timeout=60
    )
    assert done.stderr == b""


def test_an_interrupt_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [COMMAND, "generate", "agent", "--sessions", "2000", "--turns", "200", "-o", str(out)],
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".*.part")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_progress_on_stderr(trace: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [COMMAND, "replay", str(trace), "--slots", "1,2,3"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=60,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = os.read(ours, 100_000)
    os.close(ours)
    assert done.returncode == 0
    assert b"replay" in shown
    assert done.stdout.decode() == run("replay", trace, "--slots", "1,2,3").stdout


def test_version() -> None:
    assert run("--version").stdout == f"statecache {statecache.__version__}\n"


def test_replay_needs_neither_torch_nor_engines_nor_matplotlib(trace: Path) -> None:
    program = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "sglang", "matplotlib", "numpy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from statecache.cli import main
sys.argv[1:] = {arguments}
sys.exit(main())
"""
    plain = program.replace("{arguments}", repr(["replay", str(trace)]))
    done = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("replay", trace).stdout
    drawn = program.replace("{arguments}", repr(["replay", str(trace), "--plot", "x.png"]))
    done = subprocess.run([sys.executable, "-c", drawn], capture_output=True, text=True, timeout=60)
    assert_one_line(done, "--plot: matplotlib is not installed: pip install 'statecache[plot]'")
