"""The report as one HTML page: verdicts, charts and settings, with nothing to fetch.

The page itself is the template beside this file.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from statecache.ab.report.charts import LINES, line_chart, share_chart
from statecache.ab.report.result import (
    failure_lines,
    interval_of,
    number_text,
    overstated_lines,
)
from statecache.ab.results import MEASURES

if TYPE_CHECKING:
    from statecache.ab.report.result import Result
    from statecache.ab.results import Measure, Run

__all__ = ["report_page"]

_TITLES = {
    "token_hit_rate": "Token hit rate (higher is better)",
    "missed_by_state_tokens": "Missed-by-state tokens a request (lower is better)",
    "recompute_cost": "Recompute cost a request, seconds of the cost model (lower is better)",
    "ttft_p50_ms": "Time to first token, median, ms (lower is better)",
    "ttft_p90_ms": "Time to first token, 90th percentile, ms (lower is better)",
    "ttft_p99_ms": "Time to first token, 99th percentile, ms (lower is better)",
    "itl_p50_ms": "Inter-token latency, median, ms (lower is better)",
    "itl_p99_ms": "Inter-token latency, 99th percentile, ms (lower is better)",
    "output_tokens_per_second": "Output tokens a second (higher is better)",
    "request_errors": "Share of requests that failed (lower is better)",
    "peak_resident_mib": "Most memory of the server's processes, MiB (lower is better)",
}


def report_page(result: Result) -> bytes:
    """Return the page; the same result gives the same bytes."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("statecache.ab.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    templates.filters |= {"number": number_text, "interval": interval_of}
    measured = [
        measure for measure in MEASURES if any(measure.of(run) is not None for run in result.runs)
    ]
    interrupted = [f"Interrupted after {len(result.runs)} runs."] * (not result.complete)
    page = templates.get_template("page.html.jinja").render(
        name=result.settings.name,
        summary=_summary(result),
        notes=result.settings.notes,
        problems=[
            *interrupted,
            *failure_lines(result.failures),
            *overstated_lines(result.runs),
        ],
        colours=LINES,
        first_tokens=_first_tokens(result),
        measures=[_measure(result, measure) for measure in measured],
        arms=_arms(result),
        settings=msgspec.json.format(msgspec.json.encode(result.settings), indent=2).decode(),
        origin=_origin(result),
    )
    return page.encode() + b"\n"


def _summary(result: Result) -> str:
    counted = {
        verdict: sum(c.verdict == verdict for c in result.comparisons)
        for verdict in dict.fromkeys(c.verdict for c in result.comparisons)
    }
    said = ", ".join(f"{verdict} in {count}" for verdict, count in counted.items())
    return f"{len(result.comparisons)} comparisons: {said or 'none'}. {len(result.runs)} runs."


def _origin(result: Result) -> str:
    engines = ", ".join(f"{name} {version}" for name, version in result.engines.items())
    machine = result.machine
    return (
        f"statecache {result.version}, revision {result.revision or 'unknown'};"
        f" {engines or 'no engine'}; {machine.processor}, {machine.cores} cores,"
        f" {machine.system}, Python {machine.python}. A verdict needs a corrected p below 0.05"
        " (paired sign-flip permutation test, Holm over all comparisons of a measure) and a"
        " bootstrap interval without 0. Lines are means over seeds, bars reach from the lowest"
        " to the highest."
    )


def _measure(result: Result, measure: Measure) -> dict[str, Any]:
    """Return what the page says of a measure that has been taken."""
    grouped: dict[str, dict[str, list[float]]] = {}
    for run in result.runs:
        value = measure.of(run)
        if value is not None:
            grouped.setdefault(run.arm, {}).setdefault(run.cell, []).append(value)
    cells = [cell.name for cell in result.settings.cells]
    labels = [cell.name if cell.at is None else f"{cell.at:g}" for cell in result.settings.cells]
    lines = [[values.get(cell) for cell in cells] for values in grouped.values()]
    return {
        "title": _TITLES[measure.name],
        "chart": line_chart(lines, labels, result.settings.axis or "workload"),
        "arms": list(grouped),
        "verdicts": [found for found in result.comparisons if found.measure == measure.name],
    }


def _first_tokens(result: Result) -> list[dict[str, Any]]:
    """Return a chart for each cell with servers: how their times to first token spread."""
    charts: list[dict[str, Any]] = []
    for cell in result.settings.cells:
        by_arm: dict[str, list[list[float]]] = {}
        for run in result.runs:
            if run.cell == cell.name and run.times is not None and run.times.ttft_quantiles_ms:
                by_arm.setdefault(run.arm, []).append(run.times.ttft_quantiles_ms)
        if by_arm:
            lines = [
                [math.fsum(values) / len(values) for values in zip(*runs, strict=True)]
                for runs in by_arm.values()
            ]
            chart = share_chart(lines, "ms; share of requests that waited no longer")
            charts.append({"name": cell.name, "chart": chart, "arms": list(by_arm)})
    return charts


def _arms(result: Result) -> list[dict[str, Any]]:
    """Return a row for each arm of each cell, over its seeds."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in result.runs:
        grouped.setdefault((run.cell, run.arm), []).append(run)
    rows = []
    for (cell, arm), runs in grouped.items():
        numbers = (
            str(len(runs)),
            _share([_hit_rate(run) for run in runs]),
            _share([_ceiling(run) for run in runs]),
            _average([run.evicted_states for run in runs]),
            _average([run.skipped_states for run in runs]),
            _average([run.rejected for run in runs]),
            _memory(runs),
        )
        rows.append({"cell": cell, "arm": arm, "numbers": numbers})
    return rows


def _hit_rate(run: Run) -> float | None:
    return MEASURES[0].of(run)


def _ceiling(run: Run) -> float | None:
    """What could have been hit with a state everywhere; by a server's counters, if it has them."""
    if run.resident_tokens is not None:
        return run.resident_tokens / (run.prompt_tokens or 1)
    counted = run.counters
    if counted is None or counted.missed_by_state_tokens is None:
        return None
    resident = (counted.hit_tokens or 0) + counted.missed_by_state_tokens
    return resident / (counted.prompt_tokens or 1)


def _share(shares: list[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if len(known) < len(shares):
        return "not measured"
    return f"{math.fsum(known) / (len(known) or 1):.4f}"


def _average(counts: list[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return f"{sum(known) / len(known):,.0f}" if known else "-"


def _memory(runs: list[Run]) -> str:
    for what, found in (
        ("processes", [run.peak_resident_bytes for run in runs]),
        ("state slots", [run.state_slot_bytes for run in runs]),
    ):
        known = [count for count in found if count is not None]
        if known:
            return f"{max(known) / 2**20:,.0f} MiB, {what}"
    return "-"
