"""How a test talks to an engine's cache layer, which runs in a process of its own.

The process says hello, then answers each job with what it played: one line of JSON each. Both
engines' sides import this, so it needs nothing heavy.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from statecache.ab.arms import Arm
from statecache.ab.results import Played

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Answer", "Hello", "Job", "answer_jobs"]


class Hello(msgspec.Struct, frozen=True):
    """The engine is imported and ready."""

    version: str


class Job(msgspec.Struct, frozen=True):
    """An arm and its prompts, a list of blocks each; equal numbers only where prefixes agree."""

    arm: Arm
    prompts: list[list[int]]


class Answer(msgspec.Struct, frozen=True):
    """What was played, or the one line that says why it was not."""

    played: Played | None = None
    error: str | None = None


def answer_jobs(start: Callable[[], tuple[str, Callable[[Job], Played]]]) -> None:
    """Say hello, then answer jobs from stdin until it closes.

    `start` imports the engine and returns its version and what plays a job. What the engine prints
    goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    version, play = start()

    def say(what: msgspec.Struct) -> None:
        answers.write(msgspec.json.encode(what) + b"\n")
        answers.flush()

    say(Hello(version))
    decoder = msgspec.json.Decoder(Job)
    for line in sys.stdin.buffer:
        try:
            answer = Answer(played=play(decoder.decode(line)))
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        say(answer)
