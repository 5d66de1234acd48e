"""A server at an address that a user gave: asked within a time, read up to a size."""

from __future__ import annotations

import base64
import re
import threading
from contextlib import suppress
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from statecache.errors import SettingsError, escape_control_chars

__all__ = ["ServerAddress", "ServerError", "said_by", "without_user"]

_SAID_BYTES = 300


class ServerError(Exception):
    """A server did not answer; the message is one line. `status` is that of an answer it gave."""

    def __init__(self, problem: str, status: int | None = None) -> None:
        super().__init__(escape_control_chars(problem))
        self.status = status


def without_user(url: str) -> str:
    """Return `url` as it may be shown: without a name and a password in it."""
    return re.sub(r"(?s)^(\w*:?//)?.*@", r"\1***@", url)


def said_by(content: bytes, content_type: str) -> str:
    """Return what a server answered with an error, as a line shows it: a web page is only named."""
    if "html" in content_type.lower():
        return f"a web page ({content_type}): is this the address of a model's server?"
    return " ".join(content.decode(errors="replace").split())


class ServerAddress:
    """An http(s) address, perhaps with a user's name and password, which no message shows."""

    def __init__(self, url: str) -> None:
        """Raises `SettingsError` if there can be no such address."""
        try:
            parts = urlsplit(url)
            sound = re.fullmatch(r"https?://[!-~]+", url) and not re.search("[?#]", url)
            # A port that is no number raises as well, and a host no name server could know.
            sound = sound and parts.port != 0 and (parts.hostname or "").encode("idna") != b""
        except ValueError:
            sound = False
        if not sound:
            shown = without_user(url)
            raise SettingsError(f"--url: {shown!r} is no address: give e.g. http://localhost:30000")
        user, _, host = parts.netloc.rpartition("@")
        self._url = f"{parts.scheme}://{host}{parts.path}".rstrip("/")
        self._shown = without_user(url).rstrip("/")
        self._login = base64.b64encode(unquote(user).encode()).decode()

    def __str__(self) -> str:
        return self._shown

    def ask(
        self, path: str, body: bytes | None = None, *, seconds: float, most_bytes: int
    ) -> bytes:
        """Return what is at `path`; a `body` is posted as JSON. Raises `ServerError`.

        `seconds` are for all of it, however slowly name, headers and content come.
        """
        headers = {"Content-Type": "application/json"} if body else {}
        if self._login:
            headers["Authorization"] = f"Basic {self._login}"
        request = Request(f"{self._url}/{path}", body, headers)  # noqa: S310 - it was checked
        where = f"{self}/{path}"
        found: list[bytes | ServerError] = []

        def read() -> None:
            try:
                found.append(_read(request, where, seconds, most_bytes))
            except ServerError as error:
                found.append(error)

        # A timeout of a socket is for each of its calls: bytes that drip would never reach it.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(seconds)
        if reader.is_alive():
            raise ServerError(f"{where} cannot be read (no whole answer within {seconds:g} s)")
        (answer,) = found
        if isinstance(answer, ServerError):
            raise answer
        return answer


def _opener() -> OpenerDirector:
    """Return what speaks HTTP and nothing else, and stays where it was sent: no redirects."""
    opener = OpenerDirector()
    for handler in (ProxyHandler, HTTPHandler, HTTPSHandler):
        opener.add_handler(handler())
    opener.add_handler(HTTPErrorProcessor())
    opener.add_handler(HTTPDefaultErrorHandler())
    return opener


def _read(request: Request, where: str, seconds: float, most_bytes: int) -> bytes:
    try:
        with _opener().open(request, timeout=seconds) as answer:
            content: bytes = answer.read(most_bytes + 1)
            missing = getattr(answer, "length", None)
    except HTTPError as error:
        to = error.headers.get("Location")
        said = f": it redirects to {to}" if to else ""
        with error, suppress(OSError, HTTPException, ValueError):
            kind = error.headers.get("Content-Type") or ""
            said = said or f": {said_by(error.read(_SAID_BYTES), kind)}"
        raise ServerError(f"{where} answers {error.code}{said}", error.code) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise ServerError(f"{where} cannot be read ({reason})") from error
    if len(content) > most_bytes:
        raise ServerError(f"{where} answers with more than {most_bytes} bytes")
    if missing:
        raise ServerError(f"{where} cannot be read (it broke off, {missing} bytes are missing)")
    return content
