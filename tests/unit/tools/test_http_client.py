"""Addresses that users give, and servers behind them that answer badly, slowly or for ever."""

import asyncio
import base64
import os
import re
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from statecache.errors import SettingsError
from statecache.tools import doctor_server
from statecache.tools.doctor_server import look_at_server
from statecache.tools.fit_server import PrefillServer
from statecache.tools.http_client import ServerAddress, ServerError, without_user
from support.replay_support import assert_one_line, run
from support.waiting import DEADLINE_SECONDS, wait_until

DEEP = "[" * 200_000
MODELS = b'HTTP/1.1 200 OK\r\n\r\n{"data":[{"id":"tiny","max_model_len":4096}]}'


over = threading.Event()  # the test has ended


@contextmanager
def raw_server(*replies: bytes | Callable[[socket.socket], None]):
    """Answers request after request with these, the last one for all that follow."""
    seen: list[bytes] = []
    over.clear()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(DEADLINE_SECONDS)
                    seen.append(connection.recv(65_536))
                    reply = replies[min(len(seen), len(replies)) - 1]
                    if isinstance(reply, bytes):
                        connection.sendall(reply)
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(65_536):
                            pass
                    else:
                        reply(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def drip(start: bytes) -> Callable[[socket.socket], None]:
    """After `start` a byte at a time, until nobody listens, the test has ended or failed."""

    def send(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(50 * DEADLINE_SECONDS):
            if over.wait(0.02):
                return
            connection.sendall(b"x")

    return send


def redirect(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


CUT_500 = b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc"
SLOW = {
    "nothing": drip(b""),
    "headers": drip(b"HTTP/1.1 200 OK\r\nX-Name: "),
    "body": drip(b"HTTP/1.1 200 OK\r\n\r\n"),
    "error": drip(b"HTTP/1.1 500 Oh\r\n\r\n"),
}
BAD = {
    "cut 500": (CUT_500, "v1/models answers 500"),
    "cut 200": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{",
        "(received 1 bytes, expected 999))",
    ),
    "cut chunks": (CUT_500.replace(b"500 Oh", b"200 OK"), "(incomplete chunked read))"),
    "no HTTP": (b"\xff\xfe\r\n\r\n", "v1/models cannot be read ("),
    "empty": (b"", "v1/models cannot be read ("),
    "redirect": (redirect("http://[::1"), "v1/models answers 302: it redirects to http://[::1"),
    "deep": (b"HTTP/1.1 200 OK\r\n\r\n" + DEEP.encode(), "/v1/models answers otherwise: "),
    "no JSON": (b"HTTP/1.1 200 OK\r\n\r\n<html>", "/v1/models answers otherwise: "),
    "much": (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (5 << 20), "answers with more than 4194304 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_fit_before_a_server_that_answers_badly_is_one_line(name: str) -> None:
    pytest.importorskip("scipy")
    reply, problem = BAD[name]
    with raw_server(reply) as (url, _):
        assert_one_line(run("fit", "--url", url), problem)
    with raw_server(MODELS, reply) as (url, _):
        problem = problem.replace("v1/models", "v1/completions")
        assert_one_line(run("fit", "--url", url), problem)


@pytest.mark.parametrize("name", SLOW)
def test_fit_gives_a_slow_server_up(name: str) -> None:
    """It would go on for ever."""
    with raw_server(MODELS, SLOW[name]) as (url, seen):
        server = PrefillServer(ServerAddress(url), DEADLINE_SECONDS)
        server._seconds = 0.5
        problem = r"v1/completions cannot be read \(no whole answer within 0.5 s\)$"
        with pytest.raises(SettingsError, match=problem):
            server.prefill(64)
        wait_until(lambda: len(seen) == 2)
    with raw_server(SLOW[name]) as (url, _):
        done = run("fit", "--url", url, "--request-seconds", 1)
        assert_one_line(done, "v1/models cannot be read (no whole answer within 1 s)")


@pytest.mark.parametrize("name", SLOW)
def test_the_doctor_gives_a_slow_server_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on for ever."""
    monkeypatch.setattr(doctor_server, "_SECONDS", 0.5)
    with raw_server(SLOW[name]) as (url, _):
        problem = f"{url}/metrics cannot be read (no whole answer within 0.5 s)"
        assert look_at_server(url) == ("problem", problem, None)


@pytest.mark.parametrize("name", sorted({*BAD} - {"deep", "no JSON", "much"}))
def test_the_doctor_before_a_server_that_answers_badly_says_a_line(name: str) -> None:
    with raw_server(BAD[name][0]) as (url, _):
        level, text, _ = look_at_server(url)
    assert level == "problem"
    assert text.startswith(f"{url}/metrics ")
    assert text.isprintable()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "file:///etc/passwd",
            "http://",
            "ftp://a",
            "http://a b",
            "localhost:3",
            "http://:80",
        ),
        *("http://[::1", "http://a..b", "http://x/é", "http://a:b", "http://a:0", "http://a:99999"),
        *("http://a/?q", "http://a/#f", f"http://{'a' * 64}", "http://a\n"),
    ],
)
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"--url: {url!r} is no address")):
        ServerAddress(url)


@pytest.mark.parametrize("url", ["http://a", "https://a.b:1/c/", "http://[::1]:8", "http://u@a"])
def test_addresses_are_taken(url: str) -> None:
    assert str(ServerAddress(url)) == url.rstrip("/").replace("u@", "***@")


def test_a_user_is_sent_and_shown_nowhere() -> None:
    login = base64.b64encode(b"me:s@cret")
    with raw_server(b"HTTP/1.1 401 Who\r\n\r\nme?") as (url, seen):
        address = ServerAddress(url.replace("//", "//me:s%40cret@"))
        with pytest.raises(ServerError) as refused:
            address.ask("metrics", seconds=10, most_bytes=100)
    assert b"Authorization: Basic " + login + b"\r\n" in seen[0]
    shown = url.replace("//", "//***@")
    assert str(refused.value) == f"{shown}/metrics answers 401: me?"
    level, text, _ = look_at_server(url.replace("//", "//me:secret@"))  # closed by now
    assert (level, text.partition(" ")[0]) == ("problem", f"{shown}/metrics")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://me:secret@h:x",
            "http://me:se/secret@h",
            "me:secret@h:1",
            "http://me:secret@[::1",
        ),
        *("http://me:a?secret@h", "http://me:a@secret@h:99999", "http://me:\nsecret@h"),
    ],
)
def test_a_refused_address_is_shown_without_the_password(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ServerAddress(url)
    assert "***@" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_no_command_shows_the_password_of_an_address() -> None:
    pytest.importorskip("scipy")
    for command in ("fit", "doctor"):
        done = run(command, "--url", "http://me:se/secret@[::1")
        assert_one_line(done, "--url: 'http://***@[::1' is no address")
    done = run("fit", "--url", "http://me:secret@127.0.0.1:9")
    assert_one_line(done, "--url: http://***@127.0.0.1:9/v1/models cannot be read ([Errno 111]")
    done = run("doctor", "--url", "http://me:secret@127.0.0.1:9", "--json", "-")
    assert "http://***@127.0.0.1:9/metrics" in done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_without_httpx_the_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "httpx.py").write_text("raise ModuleNotFoundError('no httpx', name='httpx')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (("doctor",), ("fit", "--request-seconds", 1)):
        done = run(*command, "--url", "http://127.0.0.1:9", env=env)
        assert_one_line(done, "--url: httpx is not installed: pip install 'statecache[ab]'")
    assert run("doctor", "--help", env=env).returncode == 0


PAGE = (
    b"HTTP/1.1 404 No\r\nContent-Type: text/html; charset=utf-8\r\nConnection: close\r\n\r\n<html>"
)


def test_the_page_of_a_web_server_is_named_and_not_shown(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("httpx")
    said = "404: a web page (text/html; charset=utf-8): is this the address of a model's server?"
    with raw_server(PAGE) as (url, _):
        done = run("fit", "--url", url)
        assert_one_line(done, f"--url: {url}/v1/models answers {said}")
        arms = [f"--arm={name}:url={url}" for name in "ab"]
        asked = run("ab", *arms, cwd=tmp_path)
        assert_one_line(asked, f"arm a: {url} cannot be reached (status {said}")
    assert "<" not in done.stderr + asked.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_address_without_a_user_is_shown_as_it_is() -> None:
    assert without_user("http://host:1/v1") == "http://host:1/v1"
    with pytest.raises(SettingsError):
        ServerAddress("host")


def test_ab_takes_json_nested_too_deeply_for_no_answer(tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    from statecache.ab.drivers.server_client import Client
    from statecache.ab.drivers.server_model import served_model, vocabulary_of
    from statecache.ab.server_arm import ServerArm

    (tmp_path / "config.json").write_text('{"text_config":' * 200_000)
    assert vocabulary_of(str(tmp_path)) is None
    models = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data":[{"id":"tiny"}]}'
    deep = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b'{"version":' + DEEP.encode()

    async def server_of(url: str) -> str:
        arm = ServerArm(name="a", url=url, vocabulary=100)
        async with Client.connected(url, arm, "", 10) as client:
            return (await served_model(client, arm)).server

    with raw_server(models, deep) as (url, _):
        assert asyncio.run(server_of(url)) == "server of unknown version"
