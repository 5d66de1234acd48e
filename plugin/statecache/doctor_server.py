"""Whether the plugin is active in a running server, by what its `/metrics` says."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from http.client import HTTPException

from statecache.errors import SettingsError, on_one_line
from statecache.metrics import DRY_RUN

__all__ = ["checked_url", "look_at_server"]

_SECONDS = 10
_MOST_BYTES = 64 << 20
_ACTIVE = re.compile(r"^statecache_active(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def checked_url(url: str) -> str:
    """Return `url` without a slash at its end. Raises `SettingsError` unless it is http(s)."""
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise SettingsError(f"--url: {url!r} is no address: give e.g. http://localhost:30000")
    return url.rstrip("/")


def look_at_server(url: str) -> tuple[str, str]:
    """Return a level ("ok" or "problem") and what is said of the server at `url`."""
    address = f"{checked_url(url)}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:  # noqa: S310 - checked
            text = answer.read(_MOST_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        why = "start SGLang with --enable-metrics, vLLM without --disable-log-stats"
        return "problem", f"{address} answers {error.code}: whether it is active is unknown: {why}"
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return "problem", on_one_line(f"{address} cannot be read ({reason})")
    return _verdict(address, text)


def _verdict(address: str, text: str) -> tuple[str, str]:
    found = [(dict(_LABEL.findall(labels)), value) for labels, value in _ACTIVE.findall(text)]
    if not found:
        what = "was the server started with --kv-cache-plugin statecache and its metrics on?"
        return "problem", f"{address} has no statecache_active: the plugin is not there: {what}"
    labels, _ = found[0]
    named = ", ".join(f"{name} {labels[name]}" for name in ("engine", "policy") if name in labels)
    if labels.get("policy") == DRY_RUN:
        return "ok", f"{address}: a dry run: the engine decides (engine {labels.get('engine')})"
    if any(float(value) != 1 for _, value in found):
        return "problem", f"{address}: the plugin is loaded but the engine decides ({named})"
    return "ok", f"{address}: the plugin is active ({named})"
