"""What a user writes as keys and values, and the structs that are built of it."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["build_struct", "check_installed", "check_keys", "parse_pairs"]

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def check_installed(*modules: str) -> None:
    """Raise `SettingsError` if one of the modules is missing. They are not imported yet."""
    for module in modules:
        if find_spec(module) is None:
            raise SettingsError(f"ab: {module} is not installed: pip install 'statecache[ab]'")


def parse_pairs(text: str, problem: str, first: dict[str, Any] | None = None) -> dict[str, Any]:
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


def build_struct(
    kind: type[_Struct], values: dict[str, Any], where: str, *, strict: bool
) -> _Struct:
    """Build a `kind` of the values; texts stand for numbers unless `strict`.

    Raises `SettingsError` that begins with `where`.
    """
    check_keys(values, kind, where)
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        problem = str(error.__cause__ or error)  # what the struct's own check said, if it did
        if not problem.startswith(f"{where}: "):
            problem = f"{where}: {problem}"
        raise SettingsError(escape_control_chars(problem)) from error
