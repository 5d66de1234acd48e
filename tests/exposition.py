"""Reads `/metrics` of a server."""

import time
import urllib.request
from collections.abc import Callable

Samples = dict[tuple[str, str], float]

# The one label of a metric beside the common ones.
LABELS = ("policy", "pool", "reason", "mode", "le")


def read(url: str) -> Samples:
    """The plugin's samples: by name without prefix and the value of the label it has, if any."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name.startswith("statecache_"):
                label = next((one.labels[name] for name in LABELS if name in one.labels), "")
                key = one.name.removeprefix("statecache_"), label
                found[key] = found.get(key, 0) + one.value
    return found


def wait_for(url: str, settled: Callable[[Samples], bool], seconds: float = 30) -> Samples:
    """The samples once they are `settled`; they are a second old at most on an idle machine."""
    end = time.monotonic() + seconds
    while True:
        found = read(url)
        if settled(found) or time.monotonic() > end:
            return found
        time.sleep(0.3)
