"""The recorded traces: excerpts in the repository, and the whole ones where they were converted.

The whole ones are agent_coding.jsonl.gz and conversation.jsonl.gz, as `statecache trace convert
--as-published` makes them (docs/traces.md), in the folder `traces` of the repository or where
STATECACHE_TRACES says: `make golden TRACES=FOLDER`.
"""

import json
import os
from functools import cache
from pathlib import Path

from statecache.replay.kv_residency import kv_timeline
from statecache.replay.prefix_tree import PrefixTree
from statecache.replay.schedule import ReplaySchedule, make_schedule
from statecache.trace.format import read_trace

ROOT = Path(__file__).parents[2]
NAMES = ("agent_coding", "conversation")
EXCERPTS = ROOT / "tests/golden/excerpt"
WHOLE = Path(os.environ.get("STATECACHE_TRACES") or ROOT / "traces")
PUBLISHED = json.loads((ROOT / "tests/golden/published.json").read_bytes())


def whole_ones_are_there() -> bool:
    return all(path_of(name).is_file() for name in NAMES)


def path_of(name: str, folder: Path = WHOLE) -> Path:
    return folder / f"{name}.jsonl.gz"


@cache
def tree_of(name: str, folder: Path = WHOLE, requests: int | None = None) -> PrefixTree:
    return PrefixTree.of(read_trace(str(path_of(name, folder)), limit=requests))


@cache
def schedule_of(
    name: str, admission: str, folder: Path, requests: int | None = None
) -> ReplaySchedule:
    tree = tree_of(name, folder, requests)
    return make_schedule(tree, kv_timeline(tree, None), admission)


def recorded_schedule(name: str, admission: str) -> ReplaySchedule:
    """Of a whole trace, as many requests as its published rates are of."""
    return schedule_of(name, admission, WHOLE, PUBLISHED["requests"][name])
