"""Arms that are live servers, and how servers are asked."""

from __future__ import annotations

import math
import re
import shlex
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from statecache.errors import SettingsError, on_one_line

__all__ = ["ServerArm", "ServerSettings", "check_client", "made_servers", "parse_servers"]


class ServerArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks OpenAI's protocol for completions.

    With a `command` it is launched and ended; `{port}` in it becomes a free port, unless `url`
    names the port that the command has. With a `url` alone it is attached to, and never ended.
    `model` and `vocabulary`, the number of token ids, are asked for where they are not given. A
    launched server must be ready within `start_seconds`.
    """

    name: str
    driver: Literal["server"] = "server"
    url: str | None = None
    command: str | None = None
    model: str | None = None
    vocabulary: int | None = None
    start_seconds: float = 600
    baseline: str | None = None

    def __post_init__(self) -> None:
        if self.url is None and self.command is None:
            raise self.error("a server needs a url or a command")
        if self.url is not None:
            self._check_url(self.url)
        elif "{port}" not in (self.command or ""):
            raise self.error("command has no {port}: write it where the port goes, or give url too")
        if self.command is not None and not self.words(0):
            raise self.error("command is empty")
        if not 0 < self.start_seconds < math.inf:
            raise self.error(f"start_seconds {self.start_seconds:g} must be above 0")
        if self.vocabulary is not None and self.vocabulary < 64:
            raise self.error(f"vocabulary {self.vocabulary} must be 64 or more")

    def words(self, port: int) -> list[str]:
        """Return the command; quotes are those of a shell, but no shell runs it."""
        try:
            words = shlex.split(self.command or "")
        except ValueError as error:
            raise self.error(f"command cannot be read ({error})") from error
        return [word.replace("{port}", str(port)) for word in words]

    def without_keys(self) -> ServerArm:
        """Return the arm as it may be shown: no value of an option that ends with key or token."""
        command = re.sub(r"(?i)(--[\w-]*(?:key|token)(?:=|\s+))\S+", r"\1***", self.command or "")
        url = re.sub(r"//[^/@]*@", "//***@", self.url or "")
        return msgspec.structs.replace(self, command=command or None, url=url or None)

    def error(self, problem: str) -> SettingsError:
        """Return an error that names the arm."""
        return SettingsError(on_one_line(f"arm {self.name}: {problem}"))

    def _check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            sound = False
        if not sound:
            raise self.error(f"url {url!r} is not like http://host:port")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How all servers of a test are asked.

    A block of the workload becomes `tokens_a_block` tokens; an answer has as many as the workload
    says, but `output_tokens` at most. `speed` divides the times of an open loop. A request without
    an answer within `request_seconds` is an error. `one_at_a_time` starts a launched server for
    each of its runs and ends it after, for servers that do not fit on the machine together. `salt`
    decides which tokens a block becomes; by default it differs from test to test.
    """

    speed: float = 1
    tokens_a_block: int = 512
    output_tokens: int = 128
    request_seconds: float = 600
    one_at_a_time: bool = False
    salt: int | None = None

    def __post_init__(self) -> None:
        for field in ("speed", "tokens_a_block", "output_tokens", "request_seconds"):
            if not 0 < getattr(self, field) < math.inf:
                raise SettingsError(f"servers: {field} {getattr(self, field):g} must be above 0")


def parse_servers(text: str) -> dict[str, Any]:
    """Read settings written as "key=value,...". Raises `SettingsError`."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() in values:
            raise SettingsError(on_one_line(f"--servers: {text!r} is not key=value,..."))
        values[key.strip()] = value.strip()
    return values


def made_servers(values: dict[str, Any]) -> ServerSettings:
    """Make settings of what was given; texts may stand for numbers. Raises `SettingsError`."""
    try:
        return msgspec.convert(values, ServerSettings, strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SettingsError):
            raise error.__cause__ from error
        raise SettingsError(on_one_line(f"servers: {error}")) from error


def check_client() -> None:
    """Raise `SettingsError` if aiohttp is missing."""
    if find_spec("aiohttp") is None:
        raise SettingsError("ab: aiohttp is not installed: pip install 'statecache[ab]'")
