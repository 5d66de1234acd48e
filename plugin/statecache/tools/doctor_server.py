"""Whether the plugin is active in a running server, by what its `/metrics` says."""

from __future__ import annotations

import re
from typing import NamedTuple

from statecache.engine.metrics import DRY_RUN
from statecache.errors import escape_control_chars
from statecache.tools.http_client import ServerAddress, ServerError

__all__ = ["ServerFound", "look_at_server"]

_SECONDS = 10
_MOST_BYTES = 64 << 20
_SHOWN_CHARACTERS = 80
_LINE = re.compile(r"^statecache_active(?![\w:]).*$", re.MULTILINE)
_SAMPLE = re.compile(r"statecache_active *(?:\{(.*)\})? *(\S+)(?: .*)?")
_LABEL = re.compile(r'\s*(\w+)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')


class ServerFound(NamedTuple):
    """What is said of a server: "ok" or "problem", one line, and its engine if it names one."""

    level: str
    text: str
    engine: str | None = None


def look_at_server(url: str) -> ServerFound:
    """Look at the server at `url`."""
    address = ServerAddress(url)
    where = f"{address}/metrics"
    try:
        content = address.ask("metrics", seconds=_SECONDS, most_bytes=_MOST_BYTES)
    except ServerError as error:
        if error.status is None:
            return ServerFound("problem", str(error))
        why = "start SGLang with --enable-metrics, vLLM without --disable-log-stats"
        said = f"{where} answers {error.status}: whether it is active is unknown: {why}"
        return ServerFound("problem", said)
    level, said, engine = _verdict(content.decode(errors="replace"))
    return ServerFound(level, escape_control_chars(f"{where}{said}"), engine)


def _verdict(text: str) -> ServerFound:
    found = []
    for line in _LINE.findall(text):
        try:
            found.append(_sample(line.strip()))
        except ValueError:
            shown = line[:_SHOWN_CHARACTERS]
            said = f" has a line of statecache_active that cannot be read: {shown!r}"
            return ServerFound("problem", said)
    if not found:
        what = "was the server started with --kv-cache-plugin statecache and its metrics on?"
        said = f" has no statecache_active: the plugin is not there: {what}"
        return ServerFound("problem", said)
    labels, _ = found[0]
    engine = labels.get("engine")
    named = ", ".join(f"{name} {labels[name]}" for name in ("engine", "policy") if name in labels)
    if labels.get("policy") == DRY_RUN:
        return ServerFound("ok", f": a dry run: the engine decides (engine {engine})", engine)
    if any(value != 1 for _, value in found):
        said = f": the plugin is loaded but the engine decides ({named})"
        return ServerFound("problem", said, engine)
    return ServerFound("ok", f": the plugin is active ({named})", engine)


def _sample(line: str) -> tuple[dict[str, str], float]:
    """Return labels and value. Raises `ValueError` for what no exposition may have."""
    sample = _SAMPLE.fullmatch(line)
    if sample is None or _LABEL.sub("", sample[1] or "").strip():
        raise ValueError
    return dict(_LABEL.findall(sample[1] or "")), float(sample[2])
