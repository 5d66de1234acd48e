"""The errors of int8 states as numbers, and the alarm."""

import logging

from statecache.engine.metrics import EventCounters
from statecache.engine.verification import ERROR_BOUND, note_errors

_LOG = logging.getLogger("statecache.test")


def test_largest_sum_and_number_by_kind():
    events = EventCounters()
    note_errors(events, {"gdn": [0.25 / 8, 0.125 / 8], "mamba2": []}, _LOG)
    note_errors(events, {"gdn": [0.0], "mamba2": [0.5 / 16]}, _LOG)
    assert events.numbers == {
        "int8_error_max|gdn": 0.03125,
        "int8_error_sum|gdn": 0.046875,
        "int8_error_layers|gdn": 3,
        "int8_error_max|mamba2": 0.03125,
        "int8_error_sum|mamba2": 0.03125,
        "int8_error_layers|mamba2": 1,
    }


def test_an_error_above_the_bound_is_counted_and_the_first_is_logged(caplog):
    caplog.set_level(logging.WARNING, logger="statecache")
    events = EventCounters()
    note_errors(events, {"gdn": [ERROR_BOUND]}, _LOG)
    assert "int8_error_alarms" not in events.numbers
    note_errors(events, {"gdn": [0.0625, 0.01, 0.0625]}, _LOG)
    note_errors(events, {"gdn": [0.5]}, _LOG)
    assert events.numbers["int8_error_alarms"] == 3
    assert [record.getMessage() for record in caplog.records] == [
        "statecache: a gdn layer of an int8 state is 0.062 of its norm off, more than 0.05: compare"
        " answers with --statecache-checkpoints native or without it"
    ]
