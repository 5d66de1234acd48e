"""Arms that are live servers, and how servers are asked."""

from __future__ import annotations

import math
import os
import re
import shlex
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from statecache.ab.config import build_struct, check_installed, check_keys, parse_pairs
from statecache.errors import SettingsError, escape_control_chars
from statecache.tools.http_client import without_user

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["ServerArm", "ServerSettings", "build_server_settings", "parse_servers"]


class ServerArm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks OpenAI's protocol for completions.

    With a `command` it is launched and ended; `{port}` in it becomes a free port, unless `url`
    names the port that the command has. With a `url` alone it is attached to, and never ended.
    `model` and `vocabulary`, the number of token ids, are asked for where they are not given. A
    launched server must be ready within `start_seconds`. `key_variable` names the environment
    variable that holds the API key, which is written nowhere.
    """

    name: str
    driver: Literal["server"] = "server"
    url: str | None = None
    command: str | None = None
    model: str | None = None
    vocabulary: int | None = None
    start_seconds: float = 600
    baseline: str | None = None
    key_variable: str | None = None

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
        if self.key_variable is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.key_variable):
            # What stands there may be the key itself: it is not shown.
            raise self.error("key_variable is no name of an environment variable")
        if self.key_variable is not None and "@" in (self.url or ""):
            raise self.error("give a key_variable or a user in url, not both")

    @property
    def driver_key(self) -> Hashable:
        """One driver asks all servers of a test, one after the other."""
        return self.driver

    @property
    def seeds_tokens(self) -> bool:
        """Another seed gives other tokens where the workload is the same."""
        return True

    @property
    def timed(self) -> bool:
        """There are times to compare."""
        return True

    def check(self) -> None:
        """Raise `SettingsError` if it cannot be asked from here."""
        check_installed("httpx", "prometheus_client", "psutil")
        self.key()

    def with_python(self, _python: str) -> ServerArm:
        """Return the arm as it is: its command says what starts it."""
        return self

    def key(self) -> str | None:
        """Return the API key, if the arm has one. Raises `SettingsError` if it is not there."""
        if self.key_variable is None:
            return None
        key = os.environ.get(self.key_variable, "").strip()
        if not re.fullmatch(r"[!-~]+", key):
            problem = "has characters that no key has" if key else "is not set"
            raise self.error(f"the environment variable {self.key_variable} {problem}")
        return key

    def hidden(self, text: str) -> str:
        """Return `text` without the key."""
        key = self.key()
        return text.replace(key, "***") if key else text

    def words(self, port: int) -> list[str]:
        """Return the command; quotes are those of a shell, but no shell runs it."""
        try:
            words = shlex.split(self.command or "")
        except ValueError as error:
            raise self.error(f"command cannot be read ({error})") from error
        return [word.replace("{port}", str(port)) for word in words]

    def without_keys(self) -> ServerArm:
        """Return the arm as it may be shown: no value of an option or variable that is a secret."""
        secrets = r"(?i)((?:--[\w-]*(?:key|token)(?:=|\s+)|\w*(?:key|token|secret|password)=))\S+"
        command = re.sub(secrets, r"\1***", self.command or "")
        url = None if self.url is None else without_user(self.url)
        return msgspec.structs.replace(self, command=command or None, url=url)

    def error(self, problem: str) -> SettingsError:
        """Return an error that names the arm."""
        return SettingsError(escape_control_chars(f"arm {self.name}: {problem}"))

    def _check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            sound = False
        if not sound:
            raise self.error(f"url {without_user(url)!r} is not like http://host:port")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How all servers of a test are asked.

    A block of the workload becomes `tokens_a_block` tokens; an answer has as many as the workload
    says, but `output_tokens` at most. `speed` divides the times of an open loop. A request without
    an answer within `request_seconds` is an error. With `answers_in_prompts` what a server answered
    stands in the next prompt of its session, in a closed loop of servers that all tell the token
    ids of their answers. `one_at_a_time` starts a launched server for
    each of its runs and ends it after, for servers that do not fit on the machine together. `salt`
    decides which tokens a block becomes; by default it differs from test to test.
    """

    speed: float = 1
    tokens_a_block: int = 512
    output_tokens: int = 128
    request_seconds: float = 600
    one_at_a_time: bool = False
    answers_in_prompts: bool = True
    salt: int | None = None

    def __post_init__(self) -> None:
        for field in ("speed", "tokens_a_block", "output_tokens", "request_seconds"):
            if not 0 < getattr(self, field) < math.inf:
                raise SettingsError(f"servers: {field} {getattr(self, field):g} must be above 0")


def parse_servers(text: str) -> dict[str, Any]:
    """Read settings written as "key=value,...". Raises `SettingsError`."""
    values = parse_pairs(text, f"--servers: {text!r} is not key=value,...")
    check_keys(values, ServerSettings, "--servers")
    return values


def build_server_settings(values: dict[str, Any]) -> ServerSettings:
    """Build settings of what was given; texts may stand for numbers. Raises `SettingsError`."""
    return build_struct(ServerSettings, values, "servers", strict=False)
