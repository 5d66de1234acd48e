"""Every setting of the plugin, for both engines: flags, environment, checks.

"Given explicitly" is kept apart from the value: an adapter hands over only what the user gave
(`None` means not given) and `Settings.given` remembers which names those were.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from statecache.engine.cost import cost_text, default_cost, parse_cost
from statecache.engine.settings_aliases import OLD_NAMES, CarriedSettings, with_new_names
from statecache.engine.settings_schema import (
    ADMISSIONS,
    CHECKPOINTS,
    ENGINE_BLOCK_POLICIES,
    FIELDS,
    PLUGINS,
    RawSettings,
    check,
    check_type,
    flag_of,
    memory_in,
    number_in,
)
from statecache.errors import SettingsError, escape_control_chars
from statecache.index.policies import DEFAULT, ENGINE, policy_names

if TYPE_CHECKING:
    from statecache import CostModel
    from statecache.engine.spec import EngineSpec

__all__ = [
    "ADMISSIONS",
    "ENGINE_BLOCK_POLICIES",
    "CHECKPOINTS",
    "CONFIG_VARIABLE",
    "FIELDS",
    "OPTIONAL",
    "PLUGINS",
    "STRICT_VARIABLE",
    "Settings",
    "add_flags",
    "flag_of",
    "given_on",
    "memory_in",
]

CONFIG_VARIABLE = "STATECACHE_CONFIG"
STRICT_VARIABLE = "STATECACHE_STRICT"
# Settings for some engines alone: those whose spec names them.
OPTIONAL = ("block_policy", "checkpoint_interval", "checkpoint_memory")

# What changes an engine.
_NOT_IN_A_DRY_RUN = (
    "admission",
    "wait_for_head",
    "block_policy",
    "checkpoints",
    "checkpoint_slots",
    "checkpoint_memory",
    "checkpoint_interval",
    "verify",
)

_FLAGS: dict[str, dict[str, Any]] = {
    "kv_cache_plugin": {
        "metavar": "NAME",
        "help": f"switch a cache plugin on: {', '.join(PLUGINS)}. Without it nothing changes.",
    },
    "policy": {
        "metavar": "NAME",
        "help": lambda: (
            f"which recurrent state to drop first: {', '.join(policy_names(ENGINE))}"
            f" (default: {DEFAULT})"
        ),
    },
    "admission": {
        "metavar": "NAME",
        "help": "which states to cache: engine (where the engine does, the default), branch-points "
        "(prompt ends, and where the cached KV of a prompt ended), dense (also one every so many "
        "tokens, where the engine lets the plugin choose)",
    },
    "wait_for_head": {
        "metavar": "on|off",
        "help": "have a queued request wait, once, for the state of tokens that it shares with one "
        "that is being computed, where that costs less than computing them again (default: on)",
    },
    "cost": {
        "metavar": "LINEAR,QUADRATIC",
        "help": "cost of computing tokens a to b: LINEAR*(b-a) + QUADRATIC*(b*b-a*a)/2e5 "
        "(default: 1.862e-5,3.33e-6)",
    },
    "strict": {
        "action": "store_true",
        "help": "stop the server on an engine version that statecache was not tested with",
    },
    "block_policy": {
        "metavar": "NAME",
        "help": "which cached block to drop first where KV and states share one pool: "
        f"{', '.join(ENGINE_BLOCK_POLICIES)} (default: reuse)",
    },
    "checkpoints": {
        "metavar": "MODE",
        "help": "keep cached states in a pool of their own: native (exact copies) or int8",
    },
    "checkpoint_slots": {
        "metavar": "N",
        "help": "states that pool holds (default: what fits in the share of memory that the docs "
        "name)",
    },
    "checkpoint_memory": {
        "metavar": "PLACE",
        "help": "where that pool is: device (the default), host (a tenth of the host memory that "
        "is free) or host:SIZE, as host:64GiB, which the ranks of a server share",
    },
    "checkpoint_interval": {
        "metavar": "TOKENS",
        "help": "keep a state every so many tokens beside those at prompt ends and branch points: "
        "a multiple of the block size (default: 8192 rounded up with a checkpoint pool, else none)",
    },
    "verify": {
        "metavar": "RATE",
        "help": "share of checkpoints, from 0 to 1, whose bytes are added up at store and restore "
        "and compared, and of which the error of int8 is measured (default: 0)",
    },
    "record": {
        "metavar": "FILE",
        "help": "write the requests served to a file that must not exist yet, in the trace format: "
        "times, lengths and ids of prompt blocks, no text (.gz compresses)",
    },
    "record_mib": {
        "metavar": "N",
        "help": "most MiB of that file; the recording ends there (default: 256)",
    },
    "dry_run": {
        "action": "store_true",
        "help": "leave the engine as it is, and show in its metrics what each policy would reuse",
    },
}


# What was renamed: the flag of today, and the options of the old one.
_OLD_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("--statecache-checkpoints int8", {"action": "store_true"}),
    "int8_slots": ("--statecache-checkpoint-slots", {"metavar": "N"}),
    "block_order": ("--statecache-block-policy", {"metavar": "NAME"}),
}
_RENAMED = {"int8_slots": "checkpoint_slots", "block_order": "block_policy"}


class Settings(msgspec.Struct, frozen=True):
    """The settings in force. Build them with `from_given` or `from_environment`.

    A `cost` of None is the default of the native index, which need not be there yet.
    """

    kv_cache_plugin: str | None = None
    policy: str = DEFAULT
    admission: str = "engine"
    wait_for_head: str = "on"
    cost: tuple[float, float] | None = None
    strict: bool = False
    block_policy: str = "reuse"
    checkpoints: str | None = None
    checkpoint_slots: int | None = None
    checkpoint_memory: str = "device"
    checkpoint_interval: int | None = None
    verify: float = 0.0
    record: str | None = None
    record_mib: int = 256
    dry_run: bool = False
    given: tuple[str, ...] = ()

    @property
    def enabled(self) -> bool:
        """Whether this plugin was switched on."""
        return self.kv_cache_plugin is not None

    @property
    def in_force(self) -> Settings:
        """What of these settings changes the engine: under a dry run nothing."""
        if not self.dry_run:
            return self
        nothing = Settings(block_policy="stock", wait_for_head="off")
        off = {name: getattr(nothing, name) for name in _NOT_IN_A_DRY_RUN}
        return msgspec.structs.replace(self, **off)

    @property
    def on_host(self) -> bool:
        """Whether the checkpoint pool is in host memory."""
        return memory_in(self.checkpoint_memory)[0] == "host"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Flags that were given and that the dry run does not put in place."""
        return tuple(flag_of(name) for name in self.given if name in _NOT_IN_A_DRY_RUN)

    def require_engine(self, engine: EngineSpec) -> None:
        """Raise `SettingsError` if something was given that `engine` has no use for."""
        for name in self.given:
            if not _has_use(engine, name):
                raise SettingsError(f"{flag_of(name)} {_for_others(engine, name)}")
            value = getattr(self, name)
            reason = engine.refused.get((name, value)) if isinstance(value, str) else None
            if reason is not None:
                raise SettingsError(f"{flag_of(name)} {value} {reason}")

    @classmethod
    def from_given(
        cls, given: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Settings:
        """Check what the user gave, on top of what `environment` carries, and fill the rest.

        A name given here wins over the environment. Raises `SettingsError` with one line.
        """
        carried = _carried(os.environ if environment is None else environment)
        asked = {name: value for name, value in given.items() if value is not None}
        for name, value in asked.items():
            check_type(name, value, OLD_NAMES)
        return _filled(msgspec.convert(carried | with_new_names(asked), RawSettings))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read `STATECACHE_CONFIG` and `STATECACHE_STRICT`."""
        return cls.from_given({}, environment)

    def to_environment(self, environment: dict[str, str] | os._Environ[str] | None = None) -> None:
        """Write the given values to `STATECACHE_CONFIG`, which child processes inherit."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.given}
        if "cost" in values:
            values["cost"] = cost_text(self.cost_model())
        target = os.environ if environment is None else environment
        target[CONFIG_VARIABLE] = msgspec.json.encode(RawSettings(**values)).decode()

    def cost_model(self) -> CostModel:
        """Return the cost model these settings ask for."""
        from statecache import CostModel

        return default_cost() if self.cost is None else CostModel(*self.cost)


def add_flags(parser: argparse.ArgumentParser, engine: EngineSpec | None = None) -> None:
    """Add the flags of `engine` in a group of their own, each `None` unless given."""
    _let_costs_be_values(parser)
    group = parser.add_argument_group("statecache")
    old = {name: {"help": f"old name of {now}", **rest} for name, (now, rest) in _OLD_FLAGS.items()}
    for name, options in (_FLAGS | old).items():
        if _has_use(engine, _RENAMED.get(name, name)):
            text = options["help"]
            options = {**options, "help": text() if callable(text) else text}
            group.add_argument(flag_of(name), dest=_destination(name), default=None, **options)


def _destination(name: str) -> str:
    return flag_of(name).removeprefix("--").replace("-", "_")


def _has_use(engine: EngineSpec | None, name: str) -> bool:
    return name not in OPTIONAL or (engine is not None and name in engine.own_settings)


def _for_others(engine: EngineSpec, name: str) -> str:
    """Return the end of a sentence that begins with the flag of the setting `name`."""
    from statecache.engine.spec import engines

    others = [other.name for other in engines().values() if name in other.own_settings]
    return f"is for {' and '.join(others)} only" if others else f"is not for {engine.name}"


def _let_costs_be_values(parser: argparse.ArgumentParser) -> None:
    """Take "-1,2" for a value, as "-1" is: a bad cost is then refused by its name."""
    matcher = getattr(parser, "_negative_number_matcher", None)
    if matcher is not None:
        pattern = re.compile(rf"{matcher.pattern}|^-[\d.][^,]*,")
        parser._negative_number_matcher = pattern  # noqa: SLF001


def given_on(holder: Any) -> dict[str, Any]:
    """Return the settings given on a parsed command line.

    A text that should be a number stays one, for `from_given` to refuse: argparse would do so
    below a usage of hundreds of lines.
    """
    values = {name: getattr(holder, _destination(name), None) for name in (*FIELDS, *OLD_NAMES)}
    return {name: number_in(name, value) for name, value in values.items() if value is not None}


def _carried(environment: Mapping[str, str]) -> dict[str, Any]:
    carried: dict[str, Any] = {}
    strict = environment.get(STRICT_VARIABLE, "")
    if strict not in ("", "0", "1"):
        raise SettingsError(
            escape_control_chars(f"{STRICT_VARIABLE} must be 0 or 1, not '{strict}'")
        )
    if strict:
        carried["strict"] = strict == "1"
    text = environment.get(CONFIG_VARIABLE, "")
    if not text:
        return carried
    try:
        # Bytes that are no UTF-8 come as surrogates: back to bytes, for the decoder to refuse.
        data = text.encode(errors="surrogateescape")
        given = msgspec.json.decode(data, type=CarriedSettings)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SettingsError(escape_control_chars(f"{CONFIG_VARIABLE}: {error}")) from error
    names = CarriedSettings.__struct_fields__
    found = {name: value for name in names if (value := getattr(given, name)) is not None}
    return carried | with_new_names(found)


def _filled(given: RawSettings) -> Settings:
    check(given)
    names = tuple(name for name in FIELDS if getattr(given, name) is not None)
    if given.kv_cache_plugin is None and set(names) - {"strict"}:
        first = next(name for name in names if name != "strict")
        raise SettingsError(f"{flag_of(first)} needs {flag_of('kv_cache_plugin')} statecache")
    values = {name: getattr(given, name) for name in names}
    if given.cost is not None:
        model = parse_cost(flag_of("cost"), given.cost)
        values["cost"] = (model.linear, model.quadratic)
    return Settings(**values, given=names)
