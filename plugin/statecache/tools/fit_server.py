"""Prefill times of a live server: prompts of given lengths that nobody sent before, one by one."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from statecache.errors import SettingsError, escape_control_chars
from statecache.tools.fit import Measurement
from statecache.tools.http_client import ServerAddress, ServerError

__all__ = ["PrefillServer", "default_lengths"]

_Answer = TypeVar("_Answer")
_MODELS_SECONDS = 30.0
_MOST_BYTES = 4 << 20
_LONGEST, _SHORTEST, _LENGTHS = 131_072, 64, 8
_TOKEN_IDS = range(16, 250)  # in the vocabulary of every model, and no special token of most


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage


def default_lengths(most: int) -> list[int]:
    """Return up to 8 lengths: 9/10 of `most`, 131,072 at most, its half, and so on down to 64.

    Of a server that takes less than 64, that one length.
    """
    longest = min(most * 9 // 10, _LONGEST)
    lengths = {longest >> halvings for halvings in range(_LENGTHS)}
    return sorted(n for n in lengths if n >= _SHORTEST) or [longest]


class PrefillServer:
    """A server with the OpenAI API that takes prompts of token ids, too."""

    def __init__(self, address: ServerAddress, seconds: float) -> None:
        """Ask for its model; no request may take more than `seconds`.

        Raises `SettingsError` if there is none.
        """
        self._address = address
        self._seconds = seconds
        models = self._ask("v1/models", None, _Models, min(seconds, _MODELS_SECONDS)).data
        if not models:
            raise SettingsError(f"--url: {address} serves no model")
        self.model = models[0].id
        self.most_tokens = models[0].max_model_len or _LONGEST
        self._random = random.Random(secrets.randbits(64))  # noqa: S311 - only new to its cache

    def measure(self, lengths: Sequence[int], repeats: int) -> Iterator[Measurement]:
        """Measure every length, `repeats` rounds of all of them, after one that is not counted."""
        self.prefill(lengths[0])
        for _ in range(repeats):
            for tokens in lengths:
                yield Measurement(tokens, self.prefill(tokens))

    def prefill(self, tokens: int) -> float:
        """Return the seconds until one token came out of a new prompt of so many."""
        body = {
            "model": self.model,
            "prompt": self._random.choices(_TOKEN_IDS, k=tokens),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
        }
        start = time.perf_counter()
        usage = self._ask("v1/completions", body, _Completion, self._seconds).usage
        seconds = time.perf_counter() - start
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens:
            raise SettingsError(
                f"--url: the server reused {details.cached_tokens} of {tokens} tokens nobody sent"
                " before: its times are not those of a prefill"
            )
        return seconds

    def _ask(self, path: str, body: object, kind: type[_Answer], seconds: float) -> _Answer:
        data = None if body is None else msgspec.json.encode(body)
        try:
            content = self._address.ask(path, data, seconds=seconds, most_bytes=_MOST_BYTES)
            return msgspec.json.decode(content, type=kind)
        except ServerError as error:
            raise SettingsError(f"--url: {error}") from error
        except (msgspec.MsgspecError, RecursionError) as error:
            problem = f"--url: {self._address}/{path} answers otherwise: {error}"
            raise SettingsError(escape_control_chars(problem)) from error
