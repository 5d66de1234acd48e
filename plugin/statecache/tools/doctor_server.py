"""Whether the plugin is active in a running server, by what its `/metrics` says."""

from __future__ import annotations

from typing import NamedTuple

from statecache.engine.metric_table import DRY_RUN, METRIC_BY_NAME, MetricKey
from statecache.engine.spec import engines
from statecache.errors import escape_control_chars
from statecache.tools.http_client import ServerAddress, ServerError
from statecache.tools.metrics_text import UnreadableLineError, read_samples

__all__ = ["ServerFound", "look_at_server"]

_SECONDS = 10
_MOST_BYTES = 64 << 20
_SHOWN_CHARACTERS = 80
_ACTIVE = METRIC_BY_NAME[MetricKey.ACTIVE].full_name


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
        flags = [f"{spec.title} {spec.metrics_flag}" for spec in engines().values()]
        said = f"{where} answers {error.status}: whether it is active is unknown"
        if flags:
            said += f": start {', '.join(flags)}"
        return ServerFound("problem", said)
    level, said, engine = _verdict(content.decode(errors="replace"))
    return ServerFound(level, escape_control_chars(f"{where}{said}"), engine)


def _verdict(text: str) -> ServerFound:
    try:
        found = list(read_samples(text, [_ACTIVE]))
    except UnreadableLineError as error:
        said = f" has a line of {_ACTIVE} that cannot be read: {error.line[:_SHOWN_CHARACTERS]!r}"
        return ServerFound("problem", said)
    if not found:
        what = "was the server started with --kv-cache-plugin statecache and its metrics on?"
        said = f" has no {_ACTIVE}: the plugin is not there: {what}"
        return ServerFound("problem", said)
    labels = found[0].labels
    engine = labels.get("engine")
    named = ", ".join(f"{name} {labels[name]}" for name in ("engine", "policy") if name in labels)
    if labels.get("policy") == DRY_RUN:
        return ServerFound("ok", f": a dry run: the engine decides (engine {engine})", engine)
    if any(sample.value != 1 for sample in found):
        said = f": the plugin is loaded but the engine decides ({named})"
        return ServerFound("problem", said, engine)
    return ServerFound("ok", f": the plugin is active ({named})", engine)
