"""A recorder of requests for the tests, and what it wrote."""

import gzip
import json
import logging
from pathlib import Path

from statecache.trace.recorder import TraceRecorder

LOG = logging.getLogger("statecache.test")
PROMPT = list(range(1_000, 1_000 + 3 * 512 + 100))


def recorder(path: Path, most_mib: int = 1, **more) -> TraceRecorder:
    return TraceRecorder(str(path), most_mib, LOG, **more)


def lines_of(path: Path) -> list[dict]:
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in data.splitlines()]
