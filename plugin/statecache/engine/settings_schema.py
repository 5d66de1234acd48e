"""What may be given as a setting: names, types, limits, and what goes together.

Every refusal is a `SettingsError` of one line with the flag of the setting.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import msgspec

# The native index is imported where it is used: without it a server must still start.
from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from statecache import CostModel

__all__ = [
    "ADMISSIONS",
    "BLOCK_ORDERS",
    "CHECKPOINTS",
    "FIELDS",
    "PLUGINS",
    "POLICIES",
    "Given",
    "check",
    "check_type",
    "flag_of",
    "number_in",
    "parse_cost",
]

PLUGINS = ("statecache",)
POLICIES = ("gds", "lru", "learned")
ADMISSIONS = ("engine", "ends+fork", "dense")
BLOCK_ORDERS = ("reuse", "gds", "stock")
CHECKPOINTS = ("native", "int8")


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the user gave, as it travels in `STATECACHE_CONFIG`; `None` is "not given"."""

    kv_cache_plugin: str | None = None
    policy: str | None = None
    admission: str | None = None
    cost: str | None = None
    int8: bool | None = None
    int8_slots: int | None = None
    strict: bool | None = None
    block_order: str | None = None
    checkpoints: str | None = None
    checkpoint_slots: int | None = None
    checkpoint_interval: int | None = None
    record: str | None = None
    record_mib: int | None = None
    dry_run: bool | None = None


FIELDS = Given.__struct_fields__

# Whole numbers: the least that is taken, and what they are numbers of.
_NUMBERS = {
    "int8_slots": (1, "states"),
    "checkpoint_slots": (1, "states"),
    "checkpoint_interval": (0, "tokens"),
    "record_mib": (1, "MiB"),
}
_SWITCHES = ("int8", "strict", "dry_run")
_MOST = 10**9


def flag_of(name: str) -> str:
    """Return the command line flag of the setting `name`."""
    flag = "--" + name.replace("_", "-")
    return flag if name == "kv_cache_plugin" else flag.replace("--", "--statecache-", 1)


def check_type(name: str, value: object) -> None:
    """Raise `SettingsError` for a name that is none, or a value of another type."""
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, 1)
        what = f": statecache_{near[0]} is one" if near else ""
        raise SettingsError(escape_control_chars(f"there is no setting 'statecache_{name}'{what}"))
    if name in _NUMBERS:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _bad(name, value, f"use {_numbers_of(name)}")
    elif name in _SWITCHES:
        if not isinstance(value, bool):
            raise _bad(name, value, "use true or false")
    elif not isinstance(value, str):
        raise _bad(name, value, "use a text")


def _numbers_of(name: str) -> str:
    least, what = _NUMBERS[name]
    return f"a number of {what} from {least} to {_MOST}"


def _check_numbers(given: Given) -> None:
    for name, (least, _) in _NUMBERS.items():
        value = getattr(given, name)
        if value is not None and not least <= value <= _MOST:
            raise _bad(name, value, f"use {_numbers_of(name)}")


def number_in(name: str, text: object) -> object:
    """Return the number in `text` where the setting `name` is one; `text` where it holds none."""
    if name in _NUMBERS and isinstance(text, str) and re.fullmatch(r"[+-]?[0-9]{1,99}", text):
        return int(text)
    return text


def check(given: Given) -> None:
    """Raise `SettingsError` for values that cannot be, alone or together."""
    plugin, policy, slots = given.kv_cache_plugin, given.policy, given.int8_slots
    if plugin is not None and plugin not in PLUGINS:
        raise _bad("kv_cache_plugin", plugin, f"use {' or '.join(PLUGINS)}")
    if policy is not None and policy not in POLICIES:
        raise _bad("policy", policy, f"use {' or '.join(POLICIES)}")
    _check_numbers(given)
    if slots is not None and not given.int8:
        raise SettingsError(f"{flag_of('int8_slots')} needs {flag_of('int8')}")
    admission = given.admission
    if admission is not None and admission not in ADMISSIONS:
        raise _bad("admission", admission, f"use {' or '.join(ADMISSIONS)}")
    _check_checkpoints(given)
    _check_record(given)


def _check_checkpoints(given: Given) -> None:
    order, mode = given.block_order, given.checkpoints
    slots, interval = given.checkpoint_slots, given.checkpoint_interval
    if order is not None and order not in BLOCK_ORDERS:
        raise _bad("block_order", order, f"use {' or '.join(BLOCK_ORDERS)}")
    if mode is not None and mode not in CHECKPOINTS:
        raise _bad("checkpoints", mode, f"use {' or '.join(CHECKPOINTS)}")
    if mode == "native" and given.int8:
        raise SettingsError(
            f"{flag_of('int8')} and {flag_of('checkpoints')} native exclude each other"
        )
    if order == "gds" and (mode is not None or given.int8):
        raise SettingsError(
            f"{flag_of('block_order')} gds and a checkpoint pool exclude each other: states"
            " that are kept apart are ruled there"
        )
    if interval is not None and given.admission == "ends+fork":
        raise SettingsError(
            f"{flag_of('admission')} ends+fork and {flag_of('checkpoint_interval')}"
            " exclude each other"
        )
    if slots is not None and given.int8_slots is not None:
        raise SettingsError(
            f"give {flag_of('int8_slots')} or {flag_of('checkpoint_slots')}, not both"
        )
    if slots is not None and mode is None and not given.int8:
        raise SettingsError(
            f"{flag_of('checkpoint_slots')} needs {flag_of('checkpoints')} or {flag_of('int8')}"
        )


def _check_record(given: Given) -> None:
    most = given.record_mib
    if given.record is not None and not given.record:
        raise _bad("record", "", "name a file")
    try:
        (given.record or "").encode()
    except UnicodeEncodeError:
        raise _bad("record", given.record, "name a file in UTF-8") from None
    if most is not None and given.record is None:
        raise SettingsError(f"{flag_of('record_mib')} needs {flag_of('record')}")


def parse_cost(flag: str, text: str) -> CostModel:
    """Return the cost model that `text`, "LINEAR,QUADRATIC", describes. `flag` is for the error."""
    from statecache import CostModel

    linear, _, quadratic = text.partition(",")
    try:
        coefficients = float(linear), float(quadratic)
    except ValueError:
        advice = "use two numbers, LINEAR,QUADRATIC"
    else:
        try:
            return CostModel(*coefficients)
        except ValueError as error:
            advice = str(error)
    raise SettingsError(escape_control_chars(f"{flag} cannot be '{text}': {advice}"))


def _bad(name: str, value: object, advice: str) -> SettingsError:
    return SettingsError(escape_control_chars(f"{flag_of(name)} cannot be '{value}': {advice}"))
