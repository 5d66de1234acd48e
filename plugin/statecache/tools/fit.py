"""Fits the cost model to measured prefill times. Needs numpy and scipy: the `ab` extra.

    seconds(n) = overhead + linear * n + quadratic * n * n / 2e5

The overhead (scheduling, HTTP, one token of output) is paid by a request that resumes, too, so it
is no part of a cost. Errors are relative: a short prompt counts as much as a long one.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from statecache.errors import SettingsError, escape_control_chars

__all__ = [
    "Fit",
    "Measurement",
    "Point",
    "check_installed",
    "check_lengths",
    "fit_cost",
    "read_measurements",
]

_SCALE = 2e5  # of the quadratic coefficient, as in the cost model
_FEWEST_LENGTHS = 4
_LEAST_RANGE = 2.0
_LEAST_GROWTH = 0.01
_MOST_ERROR = 0.25
_MOST_BYTES = 64 << 20
_MOST_TOKENS = 2**31 - 1
_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 1e6
_NAMES = ("tokens", "seconds")
# A coefficient is below 0 beyond noise by so many standard errors and so much of the longest time.
_STANDARD_ERRORS, _SHARE = 3.0, 0.05


class Measurement(NamedTuple):
    """A prompt of `tokens` took `seconds` to prefill."""

    tokens: int
    seconds: float


class Point(msgspec.Struct, frozen=True):
    """A length: the median of its measurements, what the fit says, and how far that is off."""

    tokens: int
    measurements: int
    seconds: float
    fitted: float
    error: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients. `error` is the root mean square of the relative errors of the points."""

    linear: float
    quadratic: float
    overhead_seconds: float
    error: float
    points: list[Point]

    @property
    def flag(self) -> str:
        """The value of --statecache-cost, to four digits."""
        return f"{self.linear:.4g},{self.quadratic:.4g}"

    def seconds(self, tokens: float) -> float:
        """Return what the fit says of a prompt of so many tokens."""
        quadratic = self.quadratic * tokens * tokens / _SCALE
        return self.overhead_seconds + self.linear * tokens + quadratic


def check_installed() -> None:
    """Raise `SettingsError` where numpy or scipy is missing."""
    if find_spec("numpy") is None or find_spec("scipy") is None:
        raise SettingsError("fit: numpy and scipy are missing: pip install 'statecache[ab]'")


def read_measurements(path: Path) -> list[Measurement]:
    """Read lines of "tokens,seconds", or in the order that a first line of these names says.

    Raises `SettingsError` naming the line. Blank lines and those that start with # are left out.
    """
    name = escape_control_chars(str(path))
    reader = csv.reader(io.StringIO(_text(path, name)))
    found: list[Measurement] = []
    names: tuple[str, ...] = ()
    try:
        for row in reader:
            if not row or row[0].lstrip().startswith("#"):
                continue
            if not names:
                first = tuple(cell.strip().lower() for cell in row)
                is_header = sorted(first) == sorted(_NAMES)
                names = first if is_header else _NAMES
                if is_header:
                    continue
            found.append(_measurement(row, names, f"{name}, line {reader.line_num}"))
    except csv.Error as error:
        raise SettingsError(f"{name}, line {reader.line_num}: {error}") from error
    if found and all(seconds > tokens for tokens, seconds in found):
        raise SettingsError(
            f"{name}: every prompt took more than a second a token: is this {','.join(names)}, in"
            " this order, or are these milliseconds?"
        )
    return found


def _text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name}: is no text in UTF-8") from error
    if len(content) > _MOST_BYTES:
        raise SettingsError(f"{name}: has more than {_MOST_BYTES} bytes")
    return text


def _measurement(row: Sequence[str], names: Sequence[str], where: str) -> Measurement:
    try:
        values = dict(zip(names, map(float, row), strict=True))
    except ValueError:
        shown = escape_control_chars(",".join(row)[:80])
        pair = ",".join(names)
        raise SettingsError(
            f"{where}: {shown!r} is no pair of {pair}, and no line of names"
        ) from None
    tokens, seconds = values["tokens"], values["seconds"]
    if not (1 <= tokens <= _MOST_TOKENS and tokens == int(tokens)):
        raise SettingsError(f"{where}: {tokens:g} is no number of tokens")
    if not 0 < seconds < math.inf:
        raise SettingsError(f"{where}: {seconds:g} is no number of seconds above 0")
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise SettingsError(
            f"{where}: {seconds:g} s is no time of a prefill: give {_LEAST_SECONDS:g} to"
            f" {_MOST_SECONDS:g} s"
        )
    return Measurement(int(tokens), seconds)


def fit_cost(measurements: Sequence[Measurement], source: str = "fit") -> Fit:
    """Return the best coefficients that are not negative.

    Raises `SettingsError` with `source` and the reason where they say nothing about them.
    """
    by_length: dict[int, list[float]] = {}
    for tokens, seconds in measurements:
        by_length.setdefault(tokens, []).append(seconds)
    lengths = sorted(by_length)
    check_lengths(lengths, source)
    medians = [median(by_length[tokens]) for tokens in lengths]
    overhead, linear, quadratic = _coefficients(lengths, medians, source)
    fit = Fit(linear=linear, quadratic=quadratic, overhead_seconds=overhead, error=0.0, points=[])
    if fit.seconds(lengths[-1]) - overhead < _LEAST_GROWTH * medians[-1]:
        raise SettingsError(f"{source}: the times do not grow with the length: nothing to fit")
    points = [
        Point(n, len(by_length[n]), t, fit.seconds(n), fit.seconds(n) / t - 1)
        for n, t in zip(lengths, medians, strict=True)
    ]
    error = math.sqrt(sum(point.error**2 for point in points) / len(points))
    if error > _MOST_ERROR:
        worst = max(points, key=lambda point: abs(point.error))
        raise SettingsError(
            f"{source}: the error is {error:.0%}, at {worst.tokens} tokens {worst.error:+.0%}:"
            " these times are not linear and quadratic in the length: measure on an idle server"
        )
    return msgspec.structs.replace(fit, error=error, points=points)


def check_lengths(lengths: Sequence[int], source: str) -> None:
    """Raise `SettingsError` unless these lengths, in ascending order, can tell coefficients."""
    if not lengths:
        raise SettingsError(f"{source}: there is no measurement")
    if len(lengths) == 1:
        raise SettingsError(f"{source}: every measurement has the same length, {lengths[0]} tokens")
    if len(lengths) < _FEWEST_LENGTHS:
        raise SettingsError(
            f"{source}: {len(lengths)} different lengths cannot tell the coefficients apart: give"
            f" {_FEWEST_LENGTHS} or more"
        )
    if lengths[-1] < _LEAST_RANGE * lengths[0]:
        raise SettingsError(
            f"{source}: lengths from {lengths[0]} to {lengths[-1]} are too close to tell the"
            " coefficients apart: let the longest be twice the shortest or more"
        )


def _coefficients(
    lengths: Sequence[int], seconds: Sequence[float], source: str
) -> tuple[float, float, float]:
    """Return overhead, linear and quadratic by least squares of the relative errors, none < 0."""
    import numpy as np
    from scipy.optimize import nnls

    n, t = np.array(lengths, dtype=float), np.array(seconds)
    columns = np.stack([1 / t, n / t, n * n / _SCALE / t], axis=1)
    scale = np.linalg.norm(columns, axis=0)
    columns /= scale
    ones = np.ones(len(t))
    free, *_ = np.linalg.lstsq(columns, ones, rcond=None)
    if problem := _wrong_sign(np, columns, free, scale, t[-1], n[-1]):
        raise SettingsError(f"{source}: {problem}")
    found, _ = nnls(columns, ones)
    overhead, linear, quadratic = (float(x) for x in found / scale)
    return overhead, linear, quadratic


def _wrong_sign(np: Any, columns: Any, free: Any, scale: Any, seconds: float, n: float) -> str:
    """Return what is wrong where the best fit is below 0 for more than noise, else ""."""
    left = np.ones(len(columns)) - columns @ free
    variance = float(left @ left) / (len(columns) - 3)
    errors = np.sqrt(variance * np.diag(np.linalg.pinv(columns.T @ columns)))
    longest = np.array([1.0, n, n * n / _SCALE])
    for at, what in ((1, "linear"), (2, "quadratic")):
        value = float(free[at] / scale[at])
        share = -value * float(longest[at]) / seconds
        if share > _SHARE and -free[at] > _STANDARD_ERRORS * errors[at]:
            return (
                f"the {what} coefficient that fits best is {value:.3g}, below 0: these times"
                " do not grow as the cost model says: were prefixes reused, or requests batched?"
            )
    return ""
