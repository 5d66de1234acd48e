"""What a server's `/metrics` say of a run: its counters after it less those before."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Counters", "counted_tokens", "counters_between", "is_of_an_engine", "read_counters"]

# By source, best first: field and metric. The engines' own are those of vLLM 0.32, SGLang 0.5.23.
_SOURCES = {
    "statecache": {
        "requests": "statecache_requests_total",
        "prompt_tokens": "statecache_prompt_tokens_total",
        "hit_tokens": "statecache_hit_tokens_total",
        "missed_by_state_tokens": "statecache_missed_by_state_tokens_total",
        "evicted_states": "statecache_evictions_total",
        "skipped_states": "statecache_skips_total",
    },
    "vllm": {
        "requests": "vllm:request_success_total",
        "prompt_tokens": "vllm:prompt_tokens_total",
        "hit_tokens": "vllm:prompt_tokens_cached_total",
    },
    "sglang": {
        "requests": "sglang:num_requests_total",
        "prompt_tokens": "sglang:prompt_tokens_total",
        "hit_tokens": "sglang:cached_tokens_total",
    },
}
_KV_POOL = "sglang:kv_cache_memory_usage_gb"  # of KV alone, in GiB
_NAMES = {_KV_POOL} | {name for fields in _SOURCES.values() for name in fields.values()}
_MOST = 2.0**60  # more, or no number at all, is no count
_SAMPLE = re.compile(r"^([A-Za-z_][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_RANK = re.compile(r'(?:^|,)(?:rank|tp_rank)="(\d+)"')


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a server counted in a run, its warm-up included.

    `source` is the plugin ("statecache") or the engine that counted. None is what it does not
    count. A request that was preempted counts again in the plugin's `requests`. `kv_pool_bytes`
    is the size of the pool of KV alone, which SGLang tells.
    """

    source: str
    requests: int | None = None
    prompt_tokens: int | None = None
    hit_tokens: int | None = None
    missed_by_state_tokens: int | None = None
    evicted_states: int | None = None
    skipped_states: int | None = None
    kv_pool_bytes: int | None = None


def read_counters(text: str) -> dict[str, float]:
    """Return the counters in the text of `/metrics`: sums over labels.

    Tensor-parallel ranks of SGLang count the same things: the first stands for all.
    """
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        if name in _NAMES and not _is_another_rank(name, labels):
            with suppress(ValueError):
                found[name] = found.get(name, 0) + float(value)
    return {name: value for name, value in found.items() if 0 <= value < _MOST}


def counted_tokens(counters: Mapping[str, float]) -> float | None:
    """Return the prompt tokens of the best source that counted some; None if there is none yet."""
    for fields in _SOURCES.values():
        if fields["prompt_tokens"] in counters:
            return counters[fields["prompt_tokens"]]
    return None


def is_of_an_engine(text: str) -> bool:
    """Whether the text of `/metrics` is of an engine, which may not have counted anything yet."""
    return re.search("^(vllm:|sglang:|statecache_)", text, re.MULTILINE) is not None


def _is_another_rank(name: str, labels: str) -> bool:
    is_sglang = name.startswith("sglang:") or 'engine="sglang"' in labels
    rank = _RANK.search(labels)
    return is_sglang and rank is not None and rank[1] != "0"


def counters_between(
    before: Mapping[str, float], after: Mapping[str, float], prompt_tokens: int
) -> Counters | None:
    """Return the differences, or None where they say nothing of the run.

    So it is where there are no counters, or fewer tokens were counted than the `prompt_tokens` of
    the requests that were answered. A counter that is missing at the end is None, never 0; one that
    is missing at the start alone began at 0.
    """
    for source, fields in _SOURCES.items():
        if fields["prompt_tokens"] not in before or fields["prompt_tokens"] not in after:
            continue
        found = {
            field: round(after[name] - before.get(name, 0))
            for field, name in fields.items()
            if name in after
        }
        if min(found.values()) < 0 or found["prompt_tokens"] < prompt_tokens:
            return None
        pool = round(min(after[_KV_POOL] * 2**30, _MOST)) if _KV_POOL in after else None
        return Counters(source=source, kv_pool_bytes=pool, **found)
    return None
