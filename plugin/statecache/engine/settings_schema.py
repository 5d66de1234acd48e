"""What may be given as a setting: names, types, limits, and what goes together.

Every refusal is a `SettingsError` of one line with the flag of the setting.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Collection

import msgspec

from statecache.checkpoint.formats import FORMATS
from statecache.engine.sizes import bytes_in
from statecache.errors import SettingsError, escape_control_chars
from statecache.index.admissions import SERVER, admission_names
from statecache.index.policies import ENGINE, policy_names

__all__ = [
    "ADMISSIONS",
    "ENGINE_BLOCK_POLICIES",
    "CHECKPOINTS",
    "FIELDS",
    "PLUGINS",
    "RawSettings",
    "check",
    "check_number",
    "check_type",
    "flag_of",
    "memory_in",
    "number_in",
]

PLUGINS = ("statecache",)
ADMISSIONS = admission_names(SERVER)
ENGINE_BLOCK_POLICIES = ("reuse", "stock")  # that of the replay's table, and the engine's own
CHECKPOINTS = tuple(FORMATS)
ON_OFF = ("on", "off")
MEMORIES = ("device", "host")


class RawSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the user gave, as it travels in `STATECACHE_CONFIG`; `None` is "not given"."""

    kv_cache_plugin: str | None = None
    policy: str | None = None
    admission: str | None = None
    wait_for_head: str | None = None
    cost: str | None = None
    strict: bool | None = None
    block_policy: str | None = None
    checkpoints: str | None = None
    checkpoint_slots: int | None = None
    checkpoint_memory: str | None = None
    checkpoint_interval: int | None = None
    verify: float | None = None
    record: str | None = None
    record_mib: int | None = None
    dry_run: bool | None = None


FIELDS = RawSettings.__struct_fields__

# Whole numbers: the least that is taken, and what they are numbers of.
_NUMBERS = {
    "int8_slots": (1, "states"),
    "checkpoint_slots": (1, "states"),
    "checkpoint_interval": (0, "tokens"),
    "record_mib": (1, "MiB"),
}
_RATES = ("verify",)
_OF_A_POOL = ("checkpoint_slots", "checkpoint_memory", "verify")
_SWITCHES = ("int8", "strict", "dry_run")
_CHOICES = {
    "kv_cache_plugin": PLUGINS,
    "admission": ADMISSIONS,
    "block_policy": ENGINE_BLOCK_POLICIES,
    "checkpoints": CHECKPOINTS,
    "wait_for_head": ON_OFF,
}
# Values that there were, and what to do instead.
_GONE = {
    ("block_policy", "gds"): (
        "it lost to every other one in all that was measured (docs/tuning.md): use"
        f" {' or '.join(ENGINE_BLOCK_POLICIES)}"
    )
}
_MOST = 10**9
_A_RATE = "use a number from 0 (none) to 1 (all)"


def flag_of(name: str) -> str:
    """Return the command line flag of the setting `name`."""
    flag = "--" + name.replace("_", "-")
    return flag if name == "kv_cache_plugin" else flag.replace("--", "--statecache-", 1)


def check_type(name: str, value: object, old_names: Collection[str] = ()) -> None:
    """Raise `SettingsError` for a name that is none, or a value of another type.

    `old_names` are those that settings had before.
    """
    if name not in FIELDS and name not in old_names:
        near = difflib.get_close_matches(name, FIELDS, 1)
        what = f": statecache_{near[0]} is one" if near else ""
        raise SettingsError(escape_control_chars(f"there is no setting 'statecache_{name}'{what}"))
    if name in _NUMBERS:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _invalid(name, value, f"use {_numbers_of(name)}")
    elif name in _RATES:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise _invalid(name, value, _A_RATE)
    elif name in _SWITCHES:
        if not isinstance(value, bool):
            raise _invalid(name, value, "use true or false")
    elif not isinstance(value, str):
        raise _invalid(name, value, "use a text")


def _numbers_of(name: str) -> str:
    least, what = _NUMBERS[name]
    return f"a number of {what} from {least} to {_MOST}"


def check_number(name: str, value: int) -> None:
    """Raise `SettingsError` for a number that the setting `name` cannot be."""
    if not _NUMBERS[name][0] <= value <= _MOST:
        raise _invalid(name, value, f"use {_numbers_of(name)}")


def number_in(name: str, text: object) -> object:
    """Return the number in `text` where the setting `name` is one; `text` where it holds none."""
    if name in _NUMBERS and isinstance(text, str) and re.fullmatch(r"[+-]?[0-9]{1,99}", text):
        return int(text)
    if name in _RATES and isinstance(text, str) and re.fullmatch(r"[+-]?[0-9.e+-]{1,99}", text):
        with contextlib.suppress(ValueError):
            return float(text)
    return text


def check(given: RawSettings) -> None:
    """Raise `SettingsError` for values that cannot be, alone or together."""
    for name, known in (_CHOICES | {"policy": policy_names(ENGINE)}).items():
        value = getattr(given, name)
        if value is not None and value not in known:
            raise _invalid(name, value, _GONE.get((name, value), f"use {' or '.join(known)}"))
    for name in _NUMBERS:
        value = getattr(given, name, None)
        if value is not None:
            check_number(name, value)
    for name in _RATES:
        rate = getattr(given, name)
        if rate is not None and not 0 <= rate <= 1:
            raise _invalid(name, rate, _A_RATE)
    if given.checkpoint_interval is not None and given.admission == "branch-points":
        raise SettingsError(
            f"{flag_of('admission')} branch-points and {flag_of('checkpoint_interval')}"
            " exclude each other"
        )
    if given.checkpoint_memory is not None:
        _, size = memory_in(given.checkpoint_memory)
        if size is not None and given.checkpoint_slots is not None:
            raise SettingsError(
                f"{flag_of('checkpoint_memory')} host:SIZE and {flag_of('checkpoint_slots')}"
                " exclude each other"
            )
    for name in _OF_A_POOL:
        if getattr(given, name) and given.checkpoints is None:
            raise SettingsError(f"{flag_of(name)} needs {flag_of('checkpoints')}")
    _check_record(given)


def memory_in(text: str) -> tuple[str, int | None]:
    """Return where checkpoints are kept, "device" or "host", and in how many bytes if it says so.

    `SettingsError` for any other text.
    """
    place, colon, size = text.partition(":")
    asked = bytes_in(size) if colon else None
    if place not in MEMORIES or (colon and (place == "device" or asked is None)):
        advice = "use device, host or host:SIZE, as host:64GiB"
        raise _invalid("checkpoint_memory", text, advice)
    return place, asked


def _check_record(given: RawSettings) -> None:
    most = given.record_mib
    if given.record is not None and not given.record:
        raise _invalid("record", "", "name a file")
    try:
        (given.record or "").encode()
    except UnicodeEncodeError:
        raise _invalid("record", given.record, "name a file in UTF-8") from None
    if most is not None and given.record is None:
        raise SettingsError(f"{flag_of('record_mib')} needs {flag_of('record')}")


def _invalid(name: str, value: object, advice: str) -> SettingsError:
    return SettingsError(escape_control_chars(f"{flag_of(name)} cannot be '{value}': {advice}"))
