"""Conversations in the JSON of ShareGPT, as sessions whose prompts grow.

A list of {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}; each
answer of the model becomes a request, whose prompt is all that was said before it. There is no
tokenizer: a token is 4 characters. Texts that begin alike share blocks.
"""

from __future__ import annotations

import functools
import random
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from statecache.errors import TraceError
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CHARACTERS_A_TOKEN", "sharegpt_lines"]

CHARACTERS_A_TOKEN = 4
_BLOCK_CHARACTERS = BLOCK_TOKENS * CHARACTERS_A_TOKEN
_MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
# Of the made-up times: a conversation begins about every second; a person thinks for 15 s.
_GAP_MS, _PAUSE_MS, _TOKEN_MS = 1_000, 15_000, 20


class _Said(msgspec.Struct, frozen=True, rename={"role": "from", "text": "value"}):
    role: str
    text: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Said]


class _Turn(msgspec.Struct, frozen=True):
    input_length: int
    output_length: int
    hash_ids: list[int]


def sharegpt_lines(file: str, sessions: int, seed: int) -> Iterator[bytes]:
    """Yield the requests of `sessions` conversations drawn from `file`, in the trace format.

    Which ones, and how they interleave, is the seed's choice: the file has no times. Requests
    without one whole block are left out. Raises `TraceError`.
    """
    path = Path(file)
    try:
        found = path.stat()
        talks = _read(file, found.st_mtime_ns, found.st_size)
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        reason = error.strerror if isinstance(error, OSError) else None
        raise TraceError(file, f"cannot be read ({reason or error})") from error
    rng = random.Random(seed)  # noqa: S311 - no secrets here
    chosen = rng.sample(talks, min(sessions, len(talks)))
    timed: list[tuple[int, int, _Turn]] = []
    begins = 0
    for session, talk in enumerate(chosen):
        begins += rng.randrange(2 * _GAP_MS)
        now = begins
        for turn in talk:
            timed.append((now, session, turn))
            now += turn.output_length * _TOKEN_MS + rng.randrange(2 * _PAUSE_MS)
    for now, session, turn in sorted(timed, key=lambda event: event[:2]):
        line = msgspec.structs.asdict(turn) | {"timestamp": now, "session_id": session}
        yield msgspec.json.encode(line) + b"\n"


@functools.lru_cache(maxsize=1)
def _read(file: str, _changed: int, _bytes: int) -> list[list[_Turn]]:
    """Return the requests of each conversation that has any: a file is read once for all seeds."""
    try:
        conversations = msgspec.json.decode(Path(file).read_bytes(), type=list[_Conversation])
    except msgspec.ValidationError as error:
        raise TraceError(file, f"is no list of conversations as ShareGPT has: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(file, f"is not JSON ({error})") from error
    talks = [turns for talk in conversations if (turns := _turns(talk.conversations))]
    if not talks:
        raise TraceError(file, "has no conversation with a prompt of a whole block of 512 tokens")
    return talks


def _turns(messages: list[_Said]) -> list[_Turn]:
    turns: list[_Turn] = []
    text = ""
    ids: list[int] = []
    for message in messages:
        if message.role.lower() in _MODEL and len(text) >= _BLOCK_CHARACTERS:
            ids = _grown(ids, text)
            answer = -(-len(message.text) // CHARACTERS_A_TOKEN)
            turns.append(_Turn(len(text) // CHARACTERS_A_TOKEN, answer, ids))
        text += f"{message.role}\n{message.text}\n"
    return turns


def _grown(ids: list[int], text: str) -> list[int]:
    """Return `ids`, those of an earlier part of `text`, and those of the whole blocks beyond."""
    grown = list(ids)
    for block in range(len(ids), len(text) // _BLOCK_CHARACTERS):
        own = text[block * _BLOCK_CHARACTERS : (block + 1) * _BLOCK_CHARACTERS]
        above = grown[-1].to_bytes(8) if grown else b""
        digest = blake2b(own.encode(errors="surrogatepass"), key=above, digest_size=8).digest()
        grown.append(int.from_bytes(digest) >> 1)
    return grown
