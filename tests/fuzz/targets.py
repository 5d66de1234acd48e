"""What is fuzzed in Python: any bytes in, a value or one clear line out, nothing else."""

import argparse
import io
from typing import NoReturn

from statecache.engine.settings import (
    CONFIG_VARIABLE,
    STRICT_VARIABLE,
    Settings,
    add_flags,
    given_on,
)
from statecache.errors import SettingsError, TraceError
from statecache.trace.convert import trace_lines
from statecache.trace.format import BLOCK_TOKENS, read_trace
from statecache_vllm.spec import SPEC


def trace(data: bytes) -> None:
    """Read the bytes as a trace, packed or not."""
    try:
        found = read_trace("-", stdin=io.BytesIO(data))
    except TraceError as error:
        assert_one_line(str(error))
        return
    assert found.requests
    for request in found.requests:
        assert 1 <= request.input_length // BLOCK_TOKENS <= len(request.hash_ids)
        assert 0 <= request.output_length < 2**31
        assert all(-(2**63) <= block < 2**63 for block in request.hash_ids)


def convert(data: bytes) -> None:
    """Convert the bytes, packed or not: what comes out is a good trace, sorted by time."""
    try:
        lines = [*trace_lines("-", stdin=io.BytesIO(data))]
    except TraceError as error:
        assert_one_line(str(error))
        return
    found = read_trace("-", stdin=io.BytesIO(b"".join(lines)))
    times = [request.timestamp for request in found.requests]
    assert times == sorted(times)


class _RefusedError(Exception):
    """The command line is none, by the words of argparse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)


def settings(data: bytes) -> None:
    """Lines of the bytes: the two variables of the environment, then words of a command line.

    What is taken must come out the same after a way through the environment of a child.
    """
    text = data.decode(errors="surrogateescape")
    config, strict, *words = [*text.split("\n"), ""][:12]
    environment = {CONFIG_VARIABLE: config, STRICT_VARIABLE: strict}
    parser = _Parser(add_help=False)
    add_flags(parser, SPEC)
    try:
        given = given_on(parser.parse_args([word for word in words if word]))
        made = Settings.from_given(given, environment)
    except _RefusedError:
        return
    except SettingsError as error:
        assert_one_line(str(error))
        return
    made.cost_model()
    carried: dict[str, str] = {}
    made.to_environment(carried)
    again = Settings.from_environment(carried)
    assert again == made, (again, made)


def assert_one_line(message: str) -> None:
    """Assert that a terminal shows it as one line."""
    assert message.isprintable(), ascii(message)


TARGETS = {"trace": trace, "convert": convert, "settings": settings}
