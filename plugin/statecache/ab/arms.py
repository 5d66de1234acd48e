"""Arms of a test: an engine, a policy, a pool and its sizes."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from statecache import CostModel
from statecache.ab.config import build_struct
from statecache.ab.server_arm import ServerArm
from statecache.engine.cost import cost_text, default_cost, parse_cost
from statecache.engine.spec import engines
from statecache.errors import SettingsError, escape_control_chars
from statecache.index import policies
from statecache.index.admissions import POOL, SLOTS, admission_names, current_admission
from statecache.replay.block_policies import block_policy_names, current_block_policy
from statecache.replay.shared_pool import MOST_BLOCKS
from statecache.trace.format import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = [
    "POOLS",
    "REPLAY",
    "AnyArm",
    "Arm",
    "admissions_of",
    "arm_engines",
    "check_arms",
    "parse_arm",
    "parse_arm_config",
    "policies_of",
]

_log = logging.getLogger("statecache.ab")

REPLAY = "core"  # the built-in replay stands in the place of an engine
POOLS = ("native", "int8", "shared")
_MOST = 2**48  # of any size: far within 64 bits
_MOST_BYTES = 2**62
_STATE_BLOCKS = 3
_STOCK = "stock"  # the engine without the plugin


def arm_engines() -> tuple[str, ...]:
    """Return what an arm can have as its engine: the replay, and engines with a cache driver."""
    return (REPLAY, *(name for name, spec in engines().items() if spec.cache_driver is not None))


def policies_of(engine: str, pool: str) -> tuple[str, ...]:
    """Return what may rule such a pool; nothing where the engine has none of this kind.

    "stock" is the engine without the plugin.
    """
    if engine == REPLAY:
        return block_policy_names() if pool == "shared" else policies.policy_names(policies.REPLAY)
    named = engines()[engine].arms.get(pool, ())
    if pool == "shared" or not named:
        return named
    own = tuple(name for name in named if name == _STOCK)
    return own + policies.policy_names(policies.ENGINE)


def admissions_of(engine: str, pool: str) -> tuple[str, ...]:
    """Return where an engine can set states."""
    if engine != REPLAY:
        return engines()[engine].arm_admissions
    return admission_names(POOL if pool == "shared" else SLOTS)


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to run a cache. Sizes are those of the memory, which arms to compare should share.

    `slots` counts native states: an int8 pool of the same bytes holds `int8_ratio` times as many,
    and a shared pool of blocks gets `state_blocks` blocks for each. Each of `running` requests
    keeps `slots_a_request` of them for itself. `kv_tokens` 0 is unlimited (core alone). `baseline`
    names the arm to compare with, by default the first. `python` starts the engine. `state_mib` is
    what a native state of your model takes (`statecache plan` says it), for the report alone.
    `states_per_path` is the engine's own limit on the states from the root to a leaf, 0 for none.
    """

    name: str
    engine: str = REPLAY
    policy: str = policies.DEFAULT
    pool: str = "native"
    slots: int = 256
    int8_ratio: float = 1.85
    kv_tokens: int = 0
    admission: str = "dense"
    chunk: int = 8192
    cost: str = cost_text(default_cost())
    running: int = 0
    slots_a_request: int = 5
    state_blocks: float = _STATE_BLOCKS
    baseline: str | None = None
    python: str | None = None
    state_mib: float | None = None
    states_per_path: int = 0

    def __post_init__(self) -> None:
        self._known("engine", arm_engines())
        self._known("pool", POOLS)
        known = policies_of(self.engine, self.pool)
        if not known:
            raise self.error(f"engine {self.engine} has no pool {self.pool!r}")
        self._known("policy", known)
        self._known("admission", admissions_of(self.engine, self.pool))
        self._above(0, "slots", "int8_ratio", "slots_a_request", "state_blocks")
        self._above(-1, "running", "kv_tokens", "states_per_path")
        if self.states_per_path and "states_per_path" not in _keys_of(self.engine):
            raise self.error(
                f"engine {self.engine} has no limit on the states of a path:"
                " leave states_per_path out"
            )
        if self.state_mib is not None:
            self._above(0, "state_mib")
        if (self.state_slot_bytes or 0) >= _MOST_BYTES:
            raise self.error(f"{self.slots} slots of {self.state_mib:g} MiB are too many bytes")
        if self.chunk < BLOCK_TOKENS or self.chunk % BLOCK_TOKENS:
            raise self.error(f"chunk {self.chunk} is no multiple of {BLOCK_TOKENS}")
        if self.kv_tokens < BLOCK_TOKENS and (self.kv_tokens or self._needs_kv):
            raise self.error(f"kv_tokens must be {BLOCK_TOKENS} or more here")
        fixed = None if self.engine == REPLAY else engines()[self.engine].state_blocks
        if fixed is not None and self.state_blocks not in (fixed, _STATE_BLOCKS):
            raise self.error(
                f"a state takes {fixed} blocks in {self.engine}: leave state_blocks out"
            )
        if self.pool == "shared" and self.state_blocks != int(self.state_blocks):
            raise self.error(f"state_blocks {self.state_blocks:g} is no whole number")
        if self.free_slots < 1:
            raise self.error(
                f"{self.running} running requests need {self.running * self.slots_a_request}"
                f" slots, there are {self.slots}"
            )
        if not self.states < _MOST:
            raise self.error(f"{self.free_slots} slots hold too many int8 states: give fewer")
        if self.pool == "shared" and self.pool_blocks > MOST_BLOCKS:
            raise self.error(f"{self.pool_blocks} blocks are too many: give {MOST_BLOCKS} at most")
        self.cost_model()

    @property
    def driver(self) -> str:
        """What plays the workload: the built-in replay, or the engine's own cache layer."""
        return "replay" if self.engine == REPLAY else "cache_layer"

    @property
    def driver_key(self) -> Hashable:
        """What arms that one driver plays have in common: for engines it is their process."""
        return self.driver if self.engine == REPLAY else (self.engine, self.python)

    @property
    def seeds_tokens(self) -> bool:
        """Whether another seed gives other tokens where the workload is the same."""
        return False

    @property
    def timed(self) -> bool:
        """Whether there are times to compare."""
        return False

    def check(self) -> None:
        """Everything was checked when it was made."""

    def with_python(self, python: str) -> Arm:
        """Return the arm with this Python, unless it has one of its own."""
        return self if self.python else msgspec.structs.replace(self, python=python)

    def without_keys(self) -> Arm:
        """Return the arm as it may be shown: as it is."""
        return self

    @property
    def free_slots(self) -> int:
        """Slots that running requests leave, in native states."""
        return self.slots - self.running * self.slots_a_request

    @property
    def states(self) -> int:
        """How many cached states fit in a pool of their own."""
        ratio = self.int8_ratio if self.pool == "int8" else 1
        return math.floor(self.free_slots * ratio)

    @property
    def state_slot_bytes(self) -> int | None:
        """The memory of all slots, those of running requests too; None if it was not said."""
        return None if self.state_mib is None else round(self.slots * self.state_mib * 2**20)

    @property
    def kv_blocks(self) -> int | None:
        """Blocks of KV alone; None is unlimited."""
        return self.kv_tokens // BLOCK_TOKENS or None

    @property
    def pool_blocks(self) -> int:
        """Blocks of KV and states in one pool."""
        return (self.kv_blocks or 0) + math.floor(self.free_slots * self.state_blocks)

    def cost_model(self) -> CostModel:
        """Return the cost model of the order gds."""
        return parse_cost(f"arm {self.name}: cost", self.cost)

    def error(self, problem: str) -> SettingsError:
        """Return an error that names the arm."""
        return SettingsError(escape_control_chars(f"arm {self.name}: {problem}"))

    @property
    def _needs_kv(self) -> bool:
        return self.engine != REPLAY or self.pool == "shared"

    def _known(self, field: str, known: Sequence[str]) -> None:
        value = getattr(self, field)
        if value not in known:
            raise self.error(f"unknown {field} {value!r}: use {', '.join(known)}")

    def _above(self, bound: float, *fields: str) -> None:
        for field in fields:
            if not bound < getattr(self, field) < _MOST:
                raise self.error(
                    f"{field} {getattr(self, field)} must be above {bound} and below {_MOST}"
                )


def _keys_of(engine: str) -> tuple[str, ...]:
    return () if engine == REPLAY else engines()[engine].arm_keys


AnyArm = Arm | ServerArm


def parse_arm(text: str) -> AnyArm:
    """Read an arm written as "name:key=value,...". Raises `SettingsError`."""
    name, colon, rest = text.partition(":")
    values: dict[str, Any] = {"name": name.strip()}
    key = ""
    for part in rest.split(",") if rest.strip() else []:
        field, equals, value = part.partition("=")
        if equals:
            key = field.strip()
            if key in values:
                raise SettingsError(escape_control_chars(f"--arm: {text!r} gives {key} twice"))
            values[key] = value.strip()
        elif key == "cost":  # its value has a comma of its own
            values[key] += f",{part.strip()}"
        else:
            colon = ""
    if not name.strip() or (rest and not colon):
        raise SettingsError(escape_control_chars(f"--arm: {text!r} is not name:key=value,..."))
    return parse_arm_config(values, strict=False)


def parse_arm_config(values: dict[str, Any], *, strict: bool) -> AnyArm:
    """Build an arm of what was given; texts stand for numbers unless `strict`."""
    values = _current_names(values)
    is_server = bool({"driver", "url", "command"} & values.keys())
    kind: type[AnyArm] = ServerArm if is_server else Arm
    return build_struct(kind, values, f"arm {values.get('name', '?')}", strict=strict)


def _current_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values by the names of today. Names of before work for one release."""
    found = dict(values)
    if isinstance(admission := values.get("admission"), str):
        found["admission"] = current_admission(admission)
    policy = values.get("policy")
    is_replay = values.get("engine", REPLAY) == REPLAY
    if isinstance(policy, str) and is_replay and values.get("pool") == "shared":
        found["policy"] = current_block_policy(policy)
    for key, value in found.items():
        if value != values[key]:
            _log.warning(
                "statecache: arm %s: %s %s is now %s; the old name goes with the next release",
                values.get("name", "?"),
                key,
                values[key],
                value,
            )
    return found


def check_arms(arms: Sequence[AnyArm]) -> None:
    """Raise `SettingsError` unless names differ and each baseline is an arm."""
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise SettingsError("--arm: give two arms or more: one is compared with another")
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(escape_control_chars(f"arm {name}: the name is taken"))
    for arm in arms:
        if arm.baseline is not None and arm.baseline not in names:
            raise arm.error(f"baseline {arm.baseline!r} is no arm: use {', '.join(names)}")
