"""What the replay tests share: plans from lists of block ids, the command."""

import gzip
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import make_schedule
from statecache.replay.state_slots import ReplayRow, replay
from statecache.trace.format import Request, Trace
from support.waiting import DEADLINE_SECONDS

COMMAND = str(Path(sys.executable).with_name("statecache"))


def trace_of(prompts: list[list[int]]) -> Trace:
    requests = [Request(n, 512 * len(ids), 1, ids) for n, ids in enumerate(prompts)]
    return Trace("made here", "", None, requests)


def replay_prompts(
    prompts: list[list[int]],
    policy: str,
    slots: int,
    admission: str = "ends",
    chunk_blocks: int = 16,
    kv_blocks: int | None = None,
) -> ReplayRow:
    tree = PrefixTree.of(trace_of(prompts))
    kv = kv_timeline(tree, None if kv_blocks is None else 512 * kv_blocks)
    return replay(make_schedule(tree, kv, admission, 512 * chunk_blocks), policy, slots)


def write_trace(path: Path, prompts: list[list[int]], packed: bool = False) -> Path:
    lines = b"".join(msgspec.json.encode(request) + b"\n" for request in trace_of(prompts).requests)
    path.write_bytes(gzip.compress(lines) if packed else lines)
    return path


def run(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        **more,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], problem: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("statecache: ")
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def with_default_signals() -> None:
    """Undo what a background job or nohup has ignored."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
