"""What a user writes as keys and values, made into one of our structs."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["check_keys", "made", "pairs"]

_Made = TypeVar("_Made", bound=msgspec.Struct)


def pairs(text: str, problem: str, first: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return `first` and the values written as "key=value,...".

    Raises `SettingsError` with the `problem` for anything else, and for a key given twice.
    """
    values = dict(first or {})
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() in values:
            raise SettingsError(escape_control_chars(problem))
        values[key.strip()] = value.strip()
    return values


def check_keys(keys: Iterable[str], kind: type[msgspec.Struct], where: str) -> None:
    """Raise `SettingsError` for a key that `kind` does not have: with the one like it, or all."""
    known = kind.__struct_fields__
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.7) or known
            raise SettingsError(
                escape_control_chars(f"{where}: unknown key {key!r}: use {', '.join(near)}")
            )


def made(kind: type[_Made], values: dict[str, Any], where: str, *, strict: bool) -> _Made:
    """Make a `kind` of the values; texts stand for numbers unless `strict`.

    Raises `SettingsError` that begins with `where`.
    """
    check_keys(values, kind, where)
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        own = isinstance(error.__cause__, SettingsError)
        problem = str(error.__cause__ if own else error)
        if not problem.startswith(f"{where}: "):
            problem = f"{where}: {problem}"
        raise SettingsError(escape_control_chars(problem)) from error
