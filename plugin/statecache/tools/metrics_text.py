"""Reads the text of a server's `/metrics`, with the parser of prometheus_client."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from statecache.errors import SettingsError

__all__ = ["MetricSample", "UnreadableLineError", "read_samples", "readable_samples"]


class MetricSample(NamedTuple):
    """One line of the text: a metric with these labels has this value."""

    name: str
    labels: dict[str, str]
    value: float


class UnreadableLineError(ValueError):
    """A line of one of the metrics is no sample; `line` is that line."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


def read_samples(text: str, names: Collection[str]) -> Iterator[MetricSample]:
    """Yield the samples of the metrics `names`, in their order; other lines are not looked at.

    Raises `UnreadableLineError`, and `SettingsError` where prometheus_client is not installed.
    """
    for line in _lines_of(text, names):
        yield _sample(line)


def readable_samples(text: str, names: Collection[str]) -> Iterator[MetricSample]:
    """As `read_samples`, without the lines that cannot be read."""
    for line in _lines_of(text, names):
        with suppress(UnreadableLineError):
            yield _sample(line)


def _lines_of(text: str, names: Collection[str]) -> Iterator[str]:
    any_of = "|".join(map(re.escape, names))
    for found in re.finditer(rf"^(?:{any_of})(?![\w:]).*$", text, re.MULTILINE):
        yield found[0].strip()


def _sample(line: str) -> MetricSample:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise SettingsError(
            "prometheus_client is needed to read a server's metrics: pip install 'statecache[ab]'"
        ) from error
    try:
        for family in text_string_to_metric_families(line):
            for sample in family.samples:
                return MetricSample(sample.name, sample.labels, float(sample.value))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UnreadableLineError(line) from error
    raise UnreadableLineError(line)
