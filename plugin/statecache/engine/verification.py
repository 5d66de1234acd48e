"""What was found about checkpoints, as numbers: mismatches, and what int8 costs on this model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from statecache.engine.metric_table import MetricKey
from statecache.engine.metrics import EventCounters

__all__ = ["ERROR_BOUND", "note_errors"]

# The norm of a layer's error by the norm of its state. Independent normal values come to about
# .006, and bfloat16 itself keeps .004.
ERROR_BOUND = 0.05


def note_errors(
    events: EventCounters, errors: Mapping[str, Sequence[float]], log: logging.Logger
) -> None:
    """Count the relative errors of the layers of int8 states, by kind of layer.

    The first one above the bound is logged.
    """
    for kind, found in errors.items():
        if not found:
            continue
        largest = max(found)
        events.add(MetricKey.INT8_ERROR_SUM.of(kind), sum(found))
        events.add(MetricKey.INT8_ERROR_LAYERS.of(kind), len(found))
        key = MetricKey.INT8_ERROR_MAX.of(kind)
        events.numbers[key] = max(events.numbers.get(key, 0.0), largest)
        above = sum(error > ERROR_BOUND for error in found)
        if above:
            alarms = MetricKey.INT8_ERROR_ALARMS.value
            if alarms not in events.numbers:
                log.warning(
                    "statecache: a %s layer of an int8 state is %.3f of its norm off, more than"
                    " %.2f: compare answers with --statecache-checkpoints native or without it",
                    kind,
                    largest,
                    ERROR_BOUND,
                )
            events.add(alarms, above)
