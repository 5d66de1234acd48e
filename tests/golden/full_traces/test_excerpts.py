"""The excerpts in the repository are parts of the whole traces, request by request."""

import gzip
import json
from pathlib import Path

from support.recorded import EXCERPTS, WHOLE, path_of


def requests_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_the_first_thirty_conversations_of_agents() -> None:
    whole = requests_of(path_of("agent_coding", WHOLE))
    first = [request for request in whole if request["session_id"] < "conv-0030"]
    assert requests_of(path_of("agent_coding", EXCERPTS)) == first


def test_the_first_thousand_requests_of_conversations() -> None:
    whole = requests_of(path_of("conversation", WHOLE))
    assert requests_of(path_of("conversation", EXCERPTS)) == whole[:1_000]
