"""Reading traces: what is read, and that each kind of bad input is one line that says where."""

import gzip
import hashlib
import io
import json
import random
from pathlib import Path

import pytest

from statecache.errors import SettingsError, TraceError
from statecache.trace import format as trace_module
from statecache.trace.format import Request, read_trace
from support.replay_support import write_trace

GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}


def line(**changes: object) -> bytes:
    fields = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return json.dumps(fields).encode() + b"\n"


BAD_LINES = {
    "not json": (b"hello\n", "is not a JSON object"),
    "cut json": (line()[:20] + b"\n", "is not a JSON object"),
    "two objects": (line()[:-1] + line(), "is not a JSON object"),
    "an array": (b"[1]\n", "expected `object`, got `array`"),
    "blank line": (b"\n", "is blank"),
    "line of spaces": (b" \t\r\n", "is blank"),
    "byte order mark": (b"\xef\xbb\xbf" + line(), "starts with a byte order mark"),
    "NaN": (b'{"timestamp": NaN}\n', "is not a JSON object"),
    "not utf-8": (b'{"x": "\xff"}\n', "is not UTF-8 (byte 8)"),
    "deep nesting": (b'{"x": ' + b"[" * 100_000 + b"\n", "is nested too deeply"),
    "negative timestamp": (line(timestamp=-5), "field timestamp: expected `int` >= 0"),
    "negative fraction": (line(timestamp=-0.5), "field timestamp: expected `float` >= 0"),
    "endless timestamp": (line(timestamp=2**53 + 1), "field timestamp: expected `int` <= 9007199"),
    "missing timestamp": (line(timestamp=...), "missing required field `timestamp`"),
    "missing input_length": (line(input_length=...), "missing required field `input_length`"),
    "missing output_length": (line(output_length=...), "missing required field `output_length`"),
    "missing hash_ids": (line(hash_ids=...), "missing required field `hash_ids`"),
    "negative input": (line(input_length=-1), "field input_length: expected `int` >= 0"),
    "negative output": (line(output_length=-1), "field output_length: expected `int` >= 0"),
    "huge input": (line(input_length=2**31), "field input_length: expected `int` <= 2147483647"),
    "float length": (line(input_length=1100.5), "field input_length: expected `int`"),
    "text length": (line(input_length="1100"), "field input_length: expected `int`, got `str`"),
    "bool id": (line(hash_ids=[1, True]), "field hash_ids[1]: expected `int`, got `bool`"),
    "float id": (line(hash_ids=[1, 2.0]), "field hash_ids[1]: expected `int`, got `float`"),
    "text id": (line(hash_ids=["1", 2]), "field hash_ids[0]: expected `int`, got `str`"),
    "null id": (line(hash_ids=[None, 2]), "field hash_ids[0]: expected `int`, got `null`"),
    "id above int64": (line(hash_ids=[2**63, 2]), "field hash_ids[0]: expected `int` <= "),
    "id below int64": (line(hash_ids=[-(2**63) - 1, 2]), "field hash_ids[0]: "),
    "ids no list": (line(hash_ids=7), "field hash_ids: expected `array`, got `int`"),
    "too few ids": (line(hash_ids=[1]), "field hash_ids: has 1 ids, but input_length 1100 needs 2"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named(kind: str, packed: bool, tmp_path: Path) -> None:
    bad, problem = BAD_LINES[kind]
    path = tmp_path / "t.jsonl"
    content = line() + line() + bad + line()
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(TraceError) as caught:
        read_trace(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert problem in message
    assert "\n" not in message
    assert caught.value.line == 3


def test_a_line_over_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line() + line(extra="x" * 200))
    monkeypatch.setattr(trace_module, "MAX_LINE_BYTES", 200)
    with pytest.raises(TraceError, match="line 2: is longer than 200 bytes"):
        read_trace(str(path))


def test_more_ids_than_the_longest_prompt_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line() + line(hash_ids=[0] * (2**22 + 1)))
    with pytest.raises(TraceError, match=r"line 2: field hash_ids: .* length <= 4194304"):
        read_trace(str(path))


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is good: what is packed 200 times smaller is read up to the bound only."""
    monkeypatch.setattr(trace_module, "_PACKED_FREELY", 100_000)
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(line() * 20_000))
    assert path.stat().st_size < len(line()) * 20_000 / 200
    with pytest.raises(TraceError, match=r"line \d+: unpacks to more than 100 times its size"):
        read_trace(str(path))
    path.write_bytes(line() * 20_000)  # the same, not packed
    assert len(read_trace(str(path)).requests) == 20_000
    path.write_bytes(gzip.compress(line() * 1_000))  # under the bound, whatever its ratio
    assert len(read_trace(str(path)).requests) == 1_000


@pytest.mark.parametrize("kept", [15, 40, 60])
def test_a_truncated_gzip_is_named(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    packed = gzip.compress(b"".join(line(hash_ids=[n, n * n, 7]) for n in range(50)))
    path.write_bytes(packed[:kept])
    with pytest.raises(TraceError, match=r"t\.gz, line \d+: gzip data is cut off"):
        read_trace(str(path))


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    packed = bytearray(gzip.compress(line()))
    packed[-8] ^= 1  # the checksum
    path.write_bytes(packed)
    with pytest.raises(TraceError, match="gzip data is damaged here"):
        read_trace(str(path))


@pytest.mark.parametrize("content", [b"", gzip.compress(b"")], ids=["plain", "gzip"])
def test_an_empty_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.jsonl: is empty"):
        read_trace(str(path))


def test_a_trace_of_nothing_but_tiny_prompts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(input_length=511, hash_ids=[]))
    with pytest.raises(TraceError, match="has no request of a whole block"):
        read_trace(str(path))


@pytest.mark.parametrize("name", ["", "absent.jsonl", "with\nnewline", "nul\0byte"])
def test_what_cannot_be_opened_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert "be " in str(caught.value)


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="limit is 0"):
        read_trace(str(write_trace(tmp_path / "t", [[1]])), limit=0)


def test_fields_are_read_and_unknown_ones_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(session_id=4, extra={"a": [1]}) + line(timestamp=1.5, session_id=[]))
    requests = read_trace(str(path)).requests
    assert requests == [
        Request(0, 1100, 5, [1, 2, 3]),
        Request(1.5, 1100, 5, [1, 2, 3]),
    ]
    assert [request.blocks for request in requests] == [2, 2]


def test_ids_may_be_any_int64(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(hash_ids=[-(2**63), 2**63 - 1]))
    assert read_trace(str(path)).requests[0].hash_ids == [-(2**63), 2**63 - 1]


def test_a_request_of_no_block_is_skipped_but_counts_towards_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(input_length=511) + line() + line(output_length=6))
    assert [r.output_length for r in read_trace(str(path)).requests] == [5, 6]
    assert [r.output_length for r in read_trace(str(path), limit=2).requests] == [5]


def test_gzip_is_told_by_its_bytes_and_hashed_as_stored(tmp_path: Path) -> None:
    packed = write_trace(tmp_path / "packed.jsonl", [[1, 2], [3]], packed=True)
    plain = write_trace(tmp_path / "plain.gz", [[1, 2], [3]])
    assert read_trace(str(packed)).requests == read_trace(str(plain)).requests
    for path in (packed, plain):
        assert read_trace(str(path)).digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_limit_reads_less_but_hashes_all(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "t"
    content = line() * 2 + random.Random(1).randbytes(5 * 2**19)  # more than one buffer, packed too
    path.write_bytes(gzip.compress(content) if packed else content)
    trace = read_trace(str(path), limit=2)
    assert len(trace.requests) == 2
    assert trace.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_dash_is_stdin(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [[1, 2]], packed=True)
    trace = read_trace("-", stdin=io.BytesIO(path.read_bytes()))
    assert (trace.name, trace.requests) == ("stdin", read_trace(str(path)).requests)


def test_the_seed_is_the_first_lines(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(line(seed=7) + line(seed=8))
    assert read_trace(str(path)).seed == 7
    path.write_bytes(line() + line(seed=8))
    assert read_trace(str(path)).seed is None


@pytest.mark.parametrize("seed", ["x", None, True, 1.5, [7], {"a": 7}, 2**63, 10**400])
def test_a_seed_of_another_type_is_a_foreign_field(seed: object, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(line(seed=seed))
    assert read_trace(str(path)).seed is None
