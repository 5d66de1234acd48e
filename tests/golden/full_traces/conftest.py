"""Tests of the whole traces exist where the traces are: nothing is skipped without them."""

from support.recorded import whole_ones_are_there

collect_ignore_glob = [] if whole_ones_are_there() else ["test_*.py"]
