"""HTTP for doctor, fit and ab: servers at addresses that a user gave, asked within a time.

Needs httpx, which both engines and the extra `ab` bring; it is imported at the first request.
"""

from __future__ import annotations

import base64
import importlib
import re
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

__all__ = [
    "ServerAddress",
    "ServerError",
    "http_faults",
    "open_async",
    "reason_of",
    "said_by",
    "without_user",
]

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
        headers = {"Accept-Encoding": "identity"}
        if body:
            headers["Content-Type"] = "application/json"
        if self._login:
            headers["Authorization"] = f"Basic {self._login}"
        request = _Request(f"{self._url}/{path}", f"{self}/{path}", body, headers, seconds)
        answer: Future[bytes] = Future()

        def read() -> None:
            try:
                answer.set_result(_read(request, most_bytes))
            except Exception as error:
                answer.set_exception(error)

        # A timeout of a socket is for each of its calls: bytes that drip would never reach it.
        threading.Thread(target=read, daemon=True).start()
        try:
            return answer.result(seconds)
        except TimeoutError:
            raise request.too_late() from None


class _Request(NamedTuple):
    """What is asked, by GET or with a `body` by POST; `where` is how it is shown."""

    url: str
    where: str
    body: bytes | None
    headers: dict[str, str]
    seconds: float

    def too_late(self) -> ServerError:
        problem = f"no whole answer within {self.seconds:g} s"
        return ServerError(f"{self.where} cannot be read ({problem})")


def open_async(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Return a client for many requests at once to the server at `url`, as a context.

    It waits as long as it is let. Raises `ServerError` if there can be no such URL; what its
    requests raise is in `http_faults`, and `reason_of` says what it means.
    """
    library = _httpx()
    try:
        client: httpx.AsyncClient = library.AsyncClient(
            base_url=f"{url}/",
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=None,
            limits=library.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=True,
            trust_env=False,  # a proxy would be timed too
        )
        return client
    except http_faults() as error:
        raise ServerError(f"url: {error}") from error


def http_faults() -> tuple[type[Exception], ...]:
    """Return what a request raises where a server cannot be asked or answers what is no HTTP."""
    httpx = _httpx()
    return (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)


def reason_of(error: BaseException) -> str:
    """Return why a request failed: what the system said, if it did, else the error's own words."""
    cause: BaseException | None = error
    while cause is not None:
        if getattr(cause, "errno", None):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _httpx() -> Any:
    """Return the library, which the extra `ab` brings; both engines bring it too."""
    try:
        return importlib.import_module("httpx")
    except ModuleNotFoundError as error:
        raise SettingsError(
            "--url: httpx is not installed: pip install 'statecache[ab]'"
        ) from error


def _read(request: _Request, most_bytes: int) -> bytes:
    """Return the answer. Raises `ServerError`, also for a redirect: a client stays where it is."""
    httpx = _httpx()
    where = request.where
    content = bytearray()
    try:
        with (
            httpx.Client(
                timeout=request.seconds,
                event_hooks={"response": [lambda reply: _refuse_redirect(reply, where)]},
            ) as client,
            client.stream(
                "POST" if request.body else "GET",
                request.url,
                content=request.body,
                headers=request.headers,
            ) as reply,
        ):
            if not reply.is_success:
                raise ServerError(f"{where} answers {_refusal(reply)}", reply.status_code)
            for piece in reply.iter_bytes():
                content += piece
                if len(content) > most_bytes:
                    raise ServerError(f"{where} answers with more than {most_bytes} bytes")
    except httpx.TimeoutException:
        raise request.too_late() from None
    except http_faults() as error:
        raise ServerError(f"{where} cannot be read ({reason_of(error)})") from error
    return bytes(content)


def _refuse_redirect(reply: Any, where: str) -> None:
    if reply.has_redirect_location:
        problem = f"{reply.status_code}: it redirects to {reply.headers['Location']}"
        raise ServerError(f"{where} answers {problem}", reply.status_code)


def _refusal(reply: Any) -> str:
    """Return the status and what came with it, as far as that can be read."""
    content = bytearray()
    with suppress(*http_faults()):
        for piece in reply.iter_bytes():
            content += piece
            if len(content) >= _SAID_BYTES:
                break
    said = said_by(bytes(content[:_SAID_BYTES]), reply.headers.get("Content-Type", ""))
    return f"{reply.status_code}: {said}"
