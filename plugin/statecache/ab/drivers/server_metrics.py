"""What a server's `/metrics` say of a run: its counters after it less those before."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from statecache.ab.results import Counters
from statecache.engine.metric_table import METRICS, PREFIX, MetricKey
from statecache.engine.spec import engines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from statecache.engine.spec import EngineCounters

__all__ = ["counted_tokens", "counters_between", "is_of_an_engine", "read_counters"]

_PLUGIN = "statecache"
# Of a run, by the plugin's metric that counts it.
_FIELDS = {
    MetricKey.REQUESTS: "requests",
    MetricKey.PROMPT_TOKENS: "prompt_tokens",
    MetricKey.HIT_TOKENS: "hit_tokens",
    MetricKey.MISSED_BY_STATE_TOKENS: "missed_by_state_tokens",
    MetricKey.EVICTIONS: "evicted_states",
    MetricKey.SKIPS: "skipped_states",
}
_RANKS = ("rank", "tp_rank")
_MOST = 2.0**60  # more, or no number at all, is no count


def read_counters(text: str) -> dict[str, float]:
    """Return the counters in the text of `/metrics`: sums over labels.

    Where all tensor-parallel ranks of an engine count the same things, the first stands for all.
    """
    wanted = {name for fields in _sources().values() for name in fields.values()}
    wanted |= {counters.kv_pool_gib or "" for counters in _engine_counters().values()}
    found: dict[str, float] = {}
    for name, labels, value in _samples(text):
        if name in wanted and not _is_another_rank(name, labels):
            found[name] = found.get(name, 0) + value
    return {name: value for name, value in found.items() if 0 <= value < _MOST}


def counted_tokens(counters: Mapping[str, float]) -> float | None:
    """Return the prompt tokens of the best source that counted some; None if there is none yet."""
    for fields in _sources().values():
        if fields.get("prompt_tokens") in counters:
            return counters[fields["prompt_tokens"]]
    return None


def is_of_an_engine(text: str) -> bool:
    """Whether the text of `/metrics` is of an engine, which may not have counted anything yet."""
    prefixes = [PREFIX, *(counters.prefix for counters in _engine_counters().values())]
    return re.search(f"^({'|'.join(map(re.escape, prefixes))})", text, re.MULTILINE) is not None


def counters_between(
    before: Mapping[str, float], after: Mapping[str, float], prompt_tokens: int
) -> Counters | None:
    """Return the differences, or None where they say nothing of the run.

    So it is where there are no counters, or fewer tokens were counted than the `prompt_tokens` of
    the requests that were answered. A counter that is missing at the end is None, never 0; one that
    is missing at the start alone began at 0.
    """
    for source, fields in _sources().items():
        tokens = fields.get("prompt_tokens")
        if tokens not in before or tokens not in after:
            continue
        found = {
            field: round(after[name] - before.get(name, 0))
            for field, name in fields.items()
            if name in after
        }
        if min(found.values()) < 0 or found["prompt_tokens"] < prompt_tokens:
            return None
        overstated = max(found.get("hit_tokens", 0) - found["prompt_tokens"], 0)
        if overstated:
            found["hit_tokens"] -= overstated
        return Counters(
            source=source,
            kv_pool_bytes=_kv_pool_bytes(after),
            overstated_hit_tokens=overstated,
            **found,
        )
    return None


def _sources() -> dict[str, dict[str, str]]:
    """Return the metric of each field by source, best first: the plugin, then the engines."""
    names = {metric.name: metric.full_name for metric in METRICS}
    found = {_PLUGIN: {field: names[metric] for metric, field in _FIELDS.items()}}
    for engine, counters in _engine_counters().items():
        of_engine = {
            "requests": counters.requests,
            "prompt_tokens": counters.prompt_tokens,
            "hit_tokens": counters.hit_tokens,
        }
        found[engine] = {field: name for field, name in of_engine.items() if name is not None}
    return found


def _engine_counters() -> dict[str, EngineCounters]:
    return {name: spec.counters for name, spec in engines().items() if spec.counters is not None}


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yield name, labels and value; each line is read by itself, so a bad one spoils no other."""
    for line in text.splitlines():
        if line and not line.startswith("#"):
            with suppress(ValueError):
                for family in text_string_to_metric_families(f"{line}\n"):
                    for sample in family.samples:
                        yield sample.name, sample.labels, sample.value


def _is_another_rank(name: str, labels: Mapping[str, str]) -> bool:
    repeats = any(
        counters.ranks_repeat
        and (name.startswith(counters.prefix) or labels.get("engine") == engine)
        for engine, counters in _engine_counters().items()
    )
    return repeats and any(labels.get(rank, "0") != "0" for rank in _RANKS)


def _kv_pool_bytes(counted: Mapping[str, float]) -> int | None:
    for counters in _engine_counters().values():
        if counters.kv_pool_gib and counters.kv_pool_gib in counted:
            return round(min(counted[counters.kv_pool_gib] * 2**30, _MOST))
    return None
