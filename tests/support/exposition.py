"""Reads `/metrics` of a server."""

import urllib.request
from collections.abc import Callable

from support.waiting import DEADLINE_SECONDS, wait_until

Samples = dict[tuple[str, str], float]

# The one label of a metric beside the common ones.
LABELS = ("policy", "pool", "reason", "mode", "what", "kind", "le")


def read(url: str) -> Samples:
    """The plugin's samples: by name without prefix and the value of the label it has, if any."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_SECONDS) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("statecache_"):
                label = next((sample.labels[name] for name in LABELS if name in sample.labels), "")
                key = sample.name.removeprefix("statecache_"), label
                found[key] = found.get(key, 0) + sample.value
    return found


def wait_for(url: str, settled: Callable[[Samples], bool]) -> Samples:
    """The samples once they are `settled`; they are a second old at most on an idle machine."""
    found: Samples = {}

    def are_settled() -> bool:
        found.clear()
        found.update(read(url))
        return settled(found)

    wait_until(are_settled, every=0.3)
    return found
