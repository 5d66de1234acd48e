"""Small sources of `statecache trace convert`, made here in the public formats."""

import json
from pathlib import Path

BLOCK_SIZE = 256  # tokens of an id here: two ids a block of 512


def request(t: float, tokens: int, ids: list[int], **more: object) -> dict:
    """A request of kv-cache-tester; `more` has api_time and think_time, mostly."""
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": tokens,
        "out": 10,
        "hash_ids": ids,
        "input_types": ["text"],
        "stop": "",
        **more,
    }


def subagent(t: float, requests: list[dict], tools: int = 0, system: int = 0) -> dict:
    return {
        "t": t,
        "type": "subagent",
        "agent_id": "agent_001",
        "tool_tokens": tools,
        "system_tokens": system,
        "requests": requests,
    }


def conversation(requests: list[dict], tools: int = 600, system: int = 500, **more: object) -> dict:
    """600 + 500 tokens of tools and system prompt fill two blocks."""
    return {
        "id": "trace_0001",
        "models": ["m"],
        "block_size": BLOCK_SIZE,
        "hash_id_scope": "local",
        "tool_tokens": tools,
        "system_tokens": system,
        "requests": requests,
        "totals": {"subagent_count": 0},
        **more,
    }


def write_folder(folder: Path, *conversations: dict) -> Path:
    folder.mkdir()
    for number, told in enumerate(conversations, 1):
        (folder / f"trace_{number:04}.json").write_text(json.dumps(told))
    return folder
