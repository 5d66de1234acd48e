"""The page, the dashboard and the alert rules name metrics and labels that there are."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from statecache.engine.metrics import COMMON_LABELS, METRICS, EventCounters, MetricKey

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
NAMES = {metric.full_name: metric for metric in METRICS}
HISTOGRAM = tuple(f"statecache_walk_seconds_{part}" for part in ("bucket", "sum", "count"))


def dashboard() -> dict:
    return json.loads((DOCS / "grafana.json").read_text())


def expressions() -> dict[str, str]:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in dashboard()["panels"]:
        found |= {f"{panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    return found


@pytest.mark.parametrize("name", expressions())
def test_every_metric_and_label_of_an_expression_exists(name: str) -> None:
    expression = expressions()[name]
    used = re.findall(r"statecache_\w+", expression)
    assert used
    assert set(used) <= {*NAMES, *HISTOGRAM}
    labels = (
        set(COMMON_LABELS) | {"le"} | {NAMES[metric].label for metric in used if metric in NAMES}
    )
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert set(group.split(", ")) <= labels
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("key", MetricKey)
def test_what_counts_a_metric_names_its_key(key: MetricKey) -> None:
    """So it is found by `MetricKey.NAME`, outside the table."""
    files = [
        file
        for folder in ("plugin/statecache", "integrations")
        for file in (ROOT / folder).rglob("*.py")
        if file.name not in ("metric_table.py", "server_metrics.py")
    ]
    assert any(re.search(rf"MetricKey\.{key.name}\b", file.read_text()) for file in files)


def test_counters_are_rated_and_gauges_are_not() -> None:
    for expression in expressions().values():
        for before, name in re.findall(r"(rate\()?(statecache_\w+)", expression):
            if name in NAMES and name != "statecache_anomalies_total":
                assert bool(before) == (NAMES[name].kind == "counter"), expression


def test_there_is_a_rule_for_each_of_the_three() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [
        "StatecacheNotActive",
        "StatecacheSkipsRising",
        "StatecacheMissedByStateRising",
    ]
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"])
        assert {"summary", "description"} == set(rule["annotations"])


def test_the_dashboard_shows_every_metric_in_panels_that_do_not_overlap() -> None:
    text = json.dumps(dashboard())
    for name in NAMES:
        assert name in text
    places = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places
        assert at["x"] + at["w"] <= 24
        places |= cells


def test_the_page_describes_each_metric_with_its_kind_and_label() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| ", (DOCS / "metrics.md").read_text(), re.M
    )
    described = {name: (kind, label.strip("` ")) for name, kind, label in rows}
    assert described == {name: (metric.kind, metric.label) for name, metric in NAMES.items()}


def test_the_page_names_each_reason_of_a_skip() -> None:
    code = "".join(file.read_text() for file in (ROOT / "integrations").rglob("*.py"))
    reasons = set(re.findall(r'(?:SKIPS\.of|\bskip)\(\s*"(\w+)"', code))
    assert {"not_cached", "not_reused", "past_stop", "handed_on"} <= reasons
    page = (DOCS / "metrics.md").read_text()
    assert [reason for reason in reasons if f"`{reason}`" not in page] == []


EVENTS = {
    "add": lambda counts: counts.add("evictions|policy"),
    "walked": lambda counts: counts.walked(3e-4),
    "admitted": lambda counts: counts.admitted(70_000, 60_000, 65_000),  # all six numbers
}


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_a_few_steps_however_many_there_were(event: str) -> None:
    """A call in Python, a look-up in C for each number, and no loop. What it takes: make bench."""
    counts = EventCounters()
    first = steps_of(lambda: EVENTS[event](counts))
    for number in range(1_000):
        counts.add(f"skips|{number}")
        EVENTS[event](counts)
    calls, c_calls, instructions = steps_of(lambda: EVENTS[event](counts))
    assert (calls, c_calls) == first[:2] == (1, 6 if event == "admitted" else 1)
    assert instructions <= first[2] < 200


def steps_of(call: Callable[[], object]) -> tuple[int, int, int]:
    """Count the calls of Python and of C functions in a call of a lambda, and its instructions."""
    seen = {"call": 0, "c_call": 0, "opcode": 0}

    def profiled(_frame: FrameType, event: str, _: object) -> None:
        if event in seen:
            seen[event] += 1

    def traced(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        seen["opcode"] += event == "opcode"
        return traced

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(profiled)
    try:
        call()
    finally:
        sys.setprofile(before[0])
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before[1])
    # The lambdas of the test and of its table, and the end of the profile, are no part of it.
    return seen["call"] - 2, seen["c_call"] - 1, seen["opcode"]
