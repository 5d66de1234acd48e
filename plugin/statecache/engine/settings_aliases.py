"""Names of settings that were renamed. They go on working for one release, and say so once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from statecache.engine.settings_schema import RawSettings, check_number, flag_of
from statecache.errors import SettingsError
from statecache.index.admissions import current_admission

__all__ = ["OLD_NAMES", "CarriedSettings", "with_new_names"]

_log = logging.getLogger("statecache.settings")

OLD_NAMES = ("int8", "int8_slots", "block_order")

_said: set[str] = set()


class CarriedSettings(RawSettings, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`STATECACHE_CONFIG` as it may be written, old names included."""

    int8: bool | None = None
    int8_slots: int | None = None
    block_order: str | None = None


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under their names of today. Raises `SettingsError` for two that clash.

    A value of None takes back what was given elsewhere.
    """
    found = {name: value for name, value in given.items() if name not in OLD_NAMES}
    if "int8" in given:
        _int8(found, on=given["int8"])
    if (slots := given.get("int8_slots")) is not None:
        if found.get("checkpoint_slots") is not None:
            raise SettingsError(
                f"give {flag_of('int8_slots')} or {flag_of('checkpoint_slots')}, not both"
            )
        check_number("int8_slots", slots)
        found["checkpoint_slots"] = slots
        _say(flag_of("int8_slots"), flag_of("checkpoint_slots"))
    if (policy := given.get("block_order")) is not None:
        found.setdefault("block_policy", policy)
        _say(flag_of("block_order"), flag_of("block_policy"))
    admission = found.get("admission")
    if admission is not None and (current := current_admission(admission)) != admission:
        found["admission"] = current
        flag = flag_of("admission")
        _say(f"{flag} {admission}", f"{flag} {current}")
    return found


def _int8(found: dict[str, Any], *, on: bool) -> None:
    if not on:
        if found.get("checkpoints") is None:
            found |= {"checkpoints": None, "checkpoint_slots": None}
        return
    if found.get("checkpoints") == "native":
        raise SettingsError(
            f"{flag_of('int8')} and {flag_of('checkpoints')} native exclude each other"
        )
    found["checkpoints"] = "int8"
    _say(flag_of("int8"), f"{flag_of('checkpoints')} int8")


def _say(old: str, new: str) -> None:
    if old not in _said:
        _said.add(old)
        _log.warning("statecache: %s is now %s; the old name goes with the next release", old, new)
