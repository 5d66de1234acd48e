"""The command `statecache trace convert`: what it writes, and what it says of bad input."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from support.replay_support import COMMAND, assert_one_line, run
from support.trace_sources import conversation, request, subagent, write_folder
from support.waiting import DEADLINE_SECONDS

GOOD = conversation([request(0, 1_024, [1, 2, 3, 4], api_time=1, think_time=0)])
LINE = b'{"timestamp":0,"input_length":1024,"output_length":1,"hash_ids":[1,2]}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "traces", GOOD, GOOD)


def test_a_folder_becomes_a_trace_that_can_be_replayed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "agents.jsonl.gz"
    done = run("trace", "convert", folder, "-o", out)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 2
    assert run("replay", out, "--slots", "4").returncode == 0
    again = tmp_path / "again.jsonl.gz"
    assert run("trace", "convert", folder, "-o", again).returncode == 0
    assert again.read_bytes() == out.read_bytes()
    plain = run("trace", "convert", folder, "-o", "-").stdout
    assert plain.encode() == gzip.decompress(out.read_bytes())


def test_standard_input_and_a_redirected_output(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with out.open("wb") as stdout:
        done = subprocess.run(
            [COMMAND, "trace", "convert", "-", "-o", "/dev/stdout"],
            input=LINE,
            stdout=stdout,
            timeout=DEADLINE_SECONDS,
        )
    assert done.returncode == 0
    assert out.read_bytes() == LINE


def bad(**fields: object) -> dict:
    """A conversation with other fields in its second request."""
    return conversation([*GOOD["requests"], {**request(1, 1_024, [1, 2, 3, 4]), **fields}])


def without(field: str) -> dict:
    second = request(1, 1_024, [1, 2, 3, 4])
    del second[field]
    return conversation([*GOOD["requests"], second])


DEEP = subagent(1, [request(1, 512, [1])])
BAD_CONVERSATIONS = {
    "no requests": (conversation([]), "has no request of a whole block of 512 tokens"),
    "short prompts": (conversation([request(0, 511, [])]), "has no request of a whole block"),
    "requests no list": (conversation({}), "field requests: expected `array`, got `object`"),
    "length text": (bad(**{"in": "1"}), "field requests[1].in: expected `int"),
    "length negative": (bad(out=-1), "field requests[1].out: expected `int` >= 0"),
    "length missing": (without("in"), "field requests[1].in: is missing"),
    "ids missing": (without("hash_ids"), "field requests[1].hash_ids: is missing"),
    "time missing": (without("t"), "field requests[1]: object missing required field `t`"),
    "time before": (bad(t=-1), "field requests[1].t: expected `float` >= 0"),
    "time huge": (bad(t=1e300), "field requests[1].t: expected `float` <= 1"),
    "ids short": (
        bad(hash_ids=[1, 2, 3]),
        "field requests[1].hash_ids: has 3 ids, but in 1024 needs 4",
    ),
    "ids text": (bad(hash_ids=[1, 2, 3, "4"]), "field requests[1].hash_ids[3]: expected `int`"),
    "ids huge": (bad(hash_ids=[1, 2, 3, 2**64]), "field requests[1].hash_ids[3]"),
    "in a sub-agent": (
        conversation([*GOOD["requests"], DEEP]),
        "field requests[1].requests[0].hash_ids: has 1 ids, but in 512 needs 2",
    ),
    "sub-agent of none": (
        conversation([{"t": 0, "type": "subagent"}]),
        "field requests[0].requests: is missing",
    ),
    "block size": ({**GOOD, "block_size": 100}, "field block_size: 100 does not divide 512"),
    "block size 0": ({**GOOD, "block_size": 0}, "field block_size: expected `int` >= 1"),
    "block size missing": (
        {name: value for name, value in GOOD.items() if name != "block_size"},
        "object missing required field `block_size`",
    ),
    "scope": ({**GOOD, "hash_id_scope": "world"}, "field hash_id_scope: invalid enum value"),
}


@pytest.mark.parametrize("kind", BAD_CONVERSATIONS)
def test_a_bad_conversation_is_one_line(kind: str, tmp_path: Path) -> None:
    told, problem = BAD_CONVERSATIONS[kind]
    path = tmp_path / "trace_0001.json"
    path.write_text(json.dumps(told))
    done = run("trace", "convert", path, "-o", tmp_path / "out.jsonl")
    assert_one_line(done, f"{path}: {problem}")
    assert list(tmp_path.iterdir()) == [path]


BAD_FILES = {
    "empty": (b"", ": is empty"),
    "blank": (b"\n", ": is of no known format"),
    "text": (b"hello\n" * 9, ": is of no known format"),
    "a list": (b"[1,2]\n", ": is of no known format"),
    "another object": (b'{"conversations":[]}\n', ": is of no known format"),
    "not json": (b'{"requests":[}', ": is not a JSON object (JSON is malformed"),
    "cut off": (json.dumps(GOOD).encode()[:-9], ": is not a JSON object (Input data was trunc"),
    "mark": (b"\xef\xbb\xbf" + LINE, ": starts with a byte order mark"),
    "no utf-8": (b'{"requests":[],"id":"\xff",\n"block_size":64}', ": is not UTF-8 (byte 22)"),
    "nested": (b'{"requests":' + b"[" * 99_999, ": is nested too deeply"),
    "truncated gzip": (gzip.compress(LINE)[:-12], ", line 1: gzip data is cut off"),
    "damaged gzip": (gzip.compress(LINE)[:-8] + b"\0" * 8, ", line 2: gzip data is damaged"),
    "mooncake cut off": (LINE + LINE[:-9], ", line 2: is not a JSON object"),
    "mooncake types": (LINE.replace(b"1024", b'"x"'), ", line 1: field input_length: expected"),
    "mooncake ids short": (LINE.replace(b"1,2", b"1"), ", line 1: field hash_ids: has 1 ids"),
    "mooncake short": (LINE.replace(b"1024", b"9"), ": has no request of a whole block"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_line(kind: str, tmp_path: Path) -> None:
    content, problem = BAD_FILES[kind]
    path = tmp_path / "bad"
    path.write_bytes(content)
    done = run("trace", "convert", path, "-o", tmp_path / "out.jsonl.gz")
    assert_one_line(done, f"{path}{problem}")
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_without_an_end_is_one_line(tmp_path: Path) -> None:
    done = run("trace", "convert", "/dev/zero", "-o", tmp_path / "out")
    assert_one_line(done, "/dev/zero, line 1: is longer than 67108864 bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_conversation_among_good_ones_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "trace_0002.json").write_text("[]")
    done = run("trace", "convert", folder, "-o", "-")
    assert_one_line(done, f"{folder}/trace_0002.json: expected `object`, got `array`")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "SOURCE"),
        (["traces"], "--output"),
        (["", "-o", "x"], "SOURCE is empty: name a folder or a file"),
        (["none", "-o", "x"], "none: cannot be read (No such file or directory)"),
        (["empty", "-o", "x"], "empty: has no conversation (*.json)"),
        (["traces", "-o", "x", "--format", "csv"], "--format: unknown 'csv': use auto, kv-cache"),
        (["traces", "-o", "x", "--format", "mooncake"], "traces: is a folder: a trace of Moonc"),
        (["traces", "-o", "x", "--as-published"], "traces: has 2 conversations of under 900,000"),
        (["one", "-o", "x", "--as-published"], "one: is one conversation: the published tables"),
        (["line", "-o", "x", "--as-published"], "line: has 1 requests, the published tables"),
        (["line", "-o", "x", "--format", "kv-cache-tester"], "line: object missing required "),
        (["one", "-o", "x", "--format", "mooncake"], "one, line 1: object missing required "),
        (["traces", "-o", "/nowhere/x"], "--output: there is no directory /nowhere: create it"),
        (["traces", "-o", "traces"], "--output: traces is a directory: name a file"),
        (["line", "-o", "line"], "--output: line is the input itself: name another file"),
        (["traces", "-o", "one"], "--output: one is there already: name another file"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str], problem: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").write_text(json.dumps(GOOD))
    (tmp_path / "line").write_bytes(LINE)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert_one_line(run("trace", "convert", *arguments, cwd=tmp_path), problem)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert after == {**before, folder: after[folder]}


def test_an_output_that_cannot_be_written_is_one_line(folder: Path) -> None:
    assert_one_line(run("trace", "convert", folder, "-o", "/proc/x"), "--output: /proc/x cannot")
    done = run("trace", "convert", folder, "-o", "/dev/full")
    assert_one_line(done, "--output: /dev/full cannot be written (No space left on device)")


def test_without_room_for_the_temporary_file_it_says_so(tmp_path: Path) -> None:
    """A limit of a thousand bytes a file, of which a trace of a hundred requests takes more."""
    talk = [request(n, 1_024, [1, 2, 3, 4]) for n in range(100)]
    folder = write_folder(tmp_path / "traces", conversation(talk))
    done = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 1; {COMMAND} trace convert {folder} -o -"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert_one_line(done, "a temporary file cannot be written (File too large): set TMPDIR")
