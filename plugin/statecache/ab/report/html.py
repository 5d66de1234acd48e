"""The report as one HTML page: verdicts, plots and settings, with nothing to fetch."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import msgspec

from statecache.ab.report.charts import LINES, line_chart, share_chart
from statecache.ab.report.result import failure_lines, interval_of, number_text
from statecache.ab.results import MEASURES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statecache.ab.report.result import Result
    from statecache.ab.results import Run
    from statecache.ab.statistics import Comparison

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
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #1a7f37; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b72; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg { width: 100%; max-width: 40rem; height: auto; display: block; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; text-align: left; overflow-wrap: normal; }
td.w { white-space: normal; } td.w + td.w { min-width: 6.5rem; }
td.w + td.w + td.w { min-width: 0; }
@media (max-width: 30rem) { table { font-size: .8rem; } td.w + td.w { min-width: 5.5rem; } }
td.n, th.n { text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
pre { overflow-x: auto; font-size: .8rem; } .note { opacity: .75; }
"""


def report_page(result: Result) -> bytes:
    """Return the page; the same result gives the same bytes."""
    name = escape(result.settings.name)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>statecache ab: {name}</title><style>{_STYLE}</style></head><body>",
        f"<h1>statecache ab: {name}</h1>",
        f"<p>{escape(_summary(result))}</p>",
    ]
    parts += [f"<p class=note>{escape(note)}</p>" for note in result.settings.notes]
    if not result.complete:
        parts.append(f"<p class=worse>Interrupted after {len(result.runs)} runs.</p>")
    parts += [f"<p class=worse>{escape(line)}</p>" for line in failure_lines(result.failures)]
    parts += _first_tokens(result)
    for measure in MEASURES:
        if all(measure.of(run) is None for run in result.runs):
            continue
        parts += [f"<h2>{escape(_TITLES[measure.name])}</h2>", *_plot(result, measure.name)]
        parts.append(_verdicts([c for c in result.comparisons if c.measure == measure.name]))
    parts += [
        "<h2>Each arm</h2>",
        _arms(result),
        "<h2>Settings</h2><details><summary>As in result.json</summary><pre>",
        escape(msgspec.json.format(msgspec.json.encode(result.settings), indent=2).decode()),
        "</pre></details>",
        f"<p class=note>{escape(_origin(result))}</p></body></html>",
    ]
    return "\n".join(parts).encode() + b"\n"


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


def _plot(result: Result, measure_name: str) -> list[str]:
    measure = next(one for one in MEASURES if one.name == measure_name)
    grouped: dict[str, dict[str, list[float]]] = {}
    for run in result.runs:
        value = measure.of(run)
        if value is not None:
            grouped.setdefault(run.arm, {}).setdefault(run.cell, []).append(value)
    cells = [cell.name for cell in result.settings.cells]
    labels = [cell.name if cell.at is None else f"{cell.at:g}" for cell in result.settings.cells]
    lines = {arm: [values.get(cell) for cell in cells] for arm, values in grouped.items()}
    if not lines:
        return []
    drawing = line_chart(list(lines.values()), labels, result.settings.axis or "workload")
    return [drawing, _legend(lines)]


def _first_tokens(result: Result) -> list[str]:
    """Return a picture for each cell with servers: how their times to first token spread."""
    parts: list[str] = []
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
            parts.append(f"<h2>Time to first token, {escape(cell.name)}</h2>")
            parts.append(share_chart(lines, "ms; share of requests that waited no longer"))
            parts.append(_legend(by_arm))
    return parts


def _legend(arms: Iterable[str]) -> str:
    items = "".join(
        f'<li><i style="background:{LINES[n % len(LINES)]}"></i>{escape(arm)}</li>'
        for n, arm in enumerate(arms)
    )
    return f"<ul class=legend>{items}</ul>"


def _verdicts(comparisons: list[Comparison]) -> str:
    rows = [
        f"<tr><td class=w>{escape(c.cell)}<td class=w>{escape(c.arm)}, not {escape(c.baseline)}"
        f"<td class='w {c.verdict.split()[0]}'>{c.verdict}"
        f"<td class=n>{number_text(c.difference, sign=True)}<td class=n>{interval_of(c)}"
        f"<td class=n>{number_text(c.baseline_mean)}<td class=n>{number_text(c.arm_mean)}"
        for c in comparisons
    ]
    return (
        "<div class=scroll><table><tr><th>cell<th>arms<th>verdict<th class=n>difference"
        "<th class=n>95 % interval<th class=n>baseline<th class=n>arm"
        + "\n".join(rows)
        + "</table></div>"
    )


def _arms(result: Result) -> str:
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in result.runs:
        grouped.setdefault((run.cell, run.arm), []).append(run)
    rows = []
    for (cell, arm), runs in grouped.items():
        cells = (
            _share([_hit_rate(run) for run in runs]),
            _share([_ceiling(run) for run in runs]),
            _average([run.evicted_states for run in runs]),
            _average([run.skipped_states for run in runs]),
            _average([run.rejected for run in runs]),
            _memory(runs),
        )
        numbers = "".join(f"<td class=n>{cell}" for cell in cells)
        rows.append(f"<tr><td>{escape(cell)}<td>{escape(arm)}<td class=n>{len(runs)}{numbers}")
    return (
        "<p class=note>The ceiling is what could be hit with a state wherever KV is resident;"
        " evicted and not kept are states.</p>"
        "<div class=scroll><table><tr><th>cell<th>arm<th class=n>runs<th class=n>hit rate"
        "<th class=n>ceiling<th class=n>evicted<th class=n>not kept"
        "<th class=n>rejected<th class=n>memory" + "\n".join(rows) + "</table></div>"
    )


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
