"""Whether the plugin is active in a running server, by what its `/metrics` says."""

from __future__ import annotations

import re

from statecache.errors import on_one_line
from statecache.metrics import DRY_RUN
from statecache.server_address import ServerAddress, ServerError

__all__ = ["look_at_server"]

_SECONDS = 10
_MOST_BYTES = 64 << 20
_SHOWN_CHARACTERS = 80
_LINE = re.compile(r"^statecache_active(?![\w:]).*$", re.MULTILINE)
_SAMPLE = re.compile(r"statecache_active *(?:\{(.*)\})? *(\S+)(?: .*)?")
_LABEL = re.compile(r'\s*(\w+)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')


def look_at_server(url: str) -> tuple[str, str]:
    """Return a level ("ok" or "problem") and one line of what is said of the server at `url`."""
    address = ServerAddress(url)
    where = f"{address}/metrics"
    try:
        content = address.ask("metrics", seconds=_SECONDS, most_bytes=_MOST_BYTES)
    except ServerError as error:
        if error.status is None:
            return "problem", str(error)
        why = "start SGLang with --enable-metrics, vLLM without --disable-log-stats"
        return "problem", f"{where} answers {error.status}: whether it is active is unknown: {why}"
    level, said = _verdict(content.decode(errors="replace"))
    return level, on_one_line(f"{where}{said}")


def _verdict(text: str) -> tuple[str, str]:
    found = []
    for line in _LINE.findall(text):
        try:
            found.append(_sample(line.strip()))
        except ValueError:
            shown = line[:_SHOWN_CHARACTERS]
            return "problem", f" has a line of statecache_active that cannot be read: {shown!r}"
    if not found:
        what = "was the server started with --kv-cache-plugin statecache and its metrics on?"
        return "problem", f" has no statecache_active: the plugin is not there: {what}"
    labels, _ = found[0]
    named = ", ".join(f"{name} {labels[name]}" for name in ("engine", "policy") if name in labels)
    if labels.get("policy") == DRY_RUN:
        return "ok", f": a dry run: the engine decides (engine {labels.get('engine')})"
    if any(value != 1 for _, value in found):
        return "problem", f": the plugin is loaded but the engine decides ({named})"
    return "ok", f": the plugin is active ({named})"


def _sample(line: str) -> tuple[dict[str, str], float]:
    """Return labels and value. Raises `ValueError` for what no exposition may have."""
    sample = _SAMPLE.fullmatch(line)
    if sample is None or _LABEL.sub("", sample[1] or "").strip():
        raise ValueError
    return dict(_LABEL.findall(sample[1] or "")), float(sample[2])
