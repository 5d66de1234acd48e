"""Values of the command's options: text in, settings out, or `SettingsError` naming the option."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from statecache.cli.output import say_renamed, split_at_commas
from statecache.engine.cost import parse_cost
from statecache.errors import SettingsError
from statecache.index.admissions import POOL, SLOTS, admission_names, current_admission
from statecache.index.policies import (
    BASELINE,
    DEFAULT,
    DEFAULT_WITHOUT_PROMPTS,
    REPLAY,
    policy_names,
    pool_policy_names,
)
from statecache.replay.block_policies import (
    block_policy_names,
    current_block_policy,
    earlier_block_policy,
)
from statecache.replay.block_pools import kv_blocks_beside
from statecache.replay.settings import CostSettings, PoolSettings, ReplaySettings
from statecache.replay.shared_pool import MOST_BLOCKS
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["Options", "pool_settings", "replay_settings"]

_STATE_BLOCKS = 3.0
_COMPARED = [
    BASELINE,
    DEFAULT_WITHOUT_PROMPTS,
]  # unless asked for others; on state slots the default too


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options as given; None is not given."""

    policy: list[str] | None
    slots: list[str] | None
    kv_tokens: str
    pool_blocks: list[str] | None
    block_policy: list[str] | None
    order: list[str] | None  # what block_policy was called before
    state_blocks: float | None
    checkpoint_slots: list[str] | None
    admission: list[str] | None
    chunk: int
    limit: int | None
    cost: str

    def refuse(self, names: str, why: str) -> None:
        """Raise `SettingsError` if one of these options is given."""
        for name in names.split():
            if getattr(self, name) is not None:
                raise SettingsError(f"--{name.replace('_', '-')}: {why}")


def replay_settings(options: Options) -> ReplaySettings:
    """Read the options of a replay on slots alone."""
    options.refuse(
        "block_policy order state_blocks checkpoint_slots",
        "describes a pool of blocks: give --pool-blocks as well",
    )
    return ReplaySettings(
        policies=_known("--policy", options.policy or [*_COMPARED, DEFAULT], policy_names(REPLAY)),
        slots=_numbers("--slots", options.slots or ["64,128,256,1024"]),
        admissions=_admissions(options, SLOTS, "dense"),
        kv_tokens=_kv_tokens(options.kv_tokens),
        chunk_tokens=_chunk(options.chunk),
        limit=options.limit,
        cost=_cost(options.cost),
    )


def pool_settings(options: Options) -> PoolSettings:
    """Read the options of a replay on a pool of blocks."""
    options.refuse("slots", "has no place in --pool-blocks: give --checkpoint-slots")
    if options.kv_tokens != "unlimited":
        raise SettingsError("--kv-tokens: --pool-blocks says how much KV fits: leave it out")
    pools = _numbers("--pool-blocks", options.pool_blocks or [], most=MOST_BLOCKS)
    state = _above_0("--state-blocks", options.state_blocks) or _STATE_BLOCKS
    apart = options.checkpoint_slots is not None
    if apart:
        options.refuse(
            "block_policy order", "orders a pool without --checkpoint-slots: leave one of them out"
        )
    else:
        options.refuse(
            "policy", "rules slots of their own: give --checkpoint-slots, or --block-policy"
        )
        if state != int(state):
            raise SettingsError(
                f"--state-blocks: {state:g} is no whole number: give one, or --checkpoint-slots"
            )
    slots = _numbers("--checkpoint-slots", options.checkpoint_slots or [])
    _check_fit(pools, slots, state)
    block_policies = None if apart else _block_policies(options)
    policies = _known("--policy", options.policy or _COMPARED, pool_policy_names())
    return PoolSettings(
        pool_blocks=pools,
        state_blocks=state,
        block_policies=block_policies,
        checkpoint_slots=slots if apart else None,
        policies=policies if apart else None,
        admissions=_admissions(options, POOL, "dense" if apart else "branch-points"),
        chunk_tokens=_chunk(options.chunk),
        limit=options.limit,
        cost=_cost(options.cost),
        orders=block_policies and [earlier_block_policy(name) for name in block_policies],
    )


def _block_policies(options: Options) -> list[str]:
    if options.order is not None:
        if options.block_policy is not None:
            raise SettingsError("--order: is what --block-policy was called: give that alone")
        say_renamed("--order", "--block-policy")
    given = options.block_policy or options.order or list(block_policy_names())
    return _known("--block-policy", given, block_policy_names(), current_block_policy)


def _admissions(options: Options, place: str, default: str) -> list[str]:
    given = options.admission or [default]
    return _known("--admission", given, admission_names(place), current_admission)


def _check_fit(pools: list[int], slots: list[int], state_blocks: float) -> None:
    for pool in pools:
        for number in slots:
            try:
                kv_blocks_beside(pool, number, state_blocks)
            except SettingsError as error:
                raise SettingsError(f"--checkpoint-slots: {error}") from error


def _known(
    flag: str, values: list[str], known: tuple[str, ...], current: Callable[[str], str] = str
) -> list[str]:
    """Return the names given, as `current` calls them today."""
    names = split_at_commas(values)
    for name in names:
        if current(name) not in known:
            what = flag[2:].replace("-", " ")
            raise SettingsError(f"{flag}: unknown {what} {name!r}: use {', '.join(known)}")
        if current(name) != name:
            say_renamed(f"{flag} {name}", f"{flag} {current(name)}")
    return list(dict.fromkeys(map(current, names)))


def _numbers(flag: str, values: list[str], most: int | None = None) -> list[int]:
    numbers = [_integer(flag, part, least=1) for part in split_at_commas(values)]
    if most is not None and numbers and max(numbers) > most:
        raise SettingsError(f"{flag}: {max(numbers)} is above {most}")
    return list(dict.fromkeys(numbers))  # 8 and 08 are one


def _kv_tokens(text: str) -> int | None:
    return None if text == "unlimited" else _integer("--kv-tokens", text, least=BLOCK_TOKENS)


def _chunk(tokens: int) -> int:
    if tokens < BLOCK_TOKENS or tokens % BLOCK_TOKENS:
        raise SettingsError(f"--chunk: {tokens} is no multiple of {BLOCK_TOKENS}: give e.g. 8192")
    return tokens


def _integer(flag: str, text: str, least: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and int(digits) >= least):
        raise SettingsError(f"{flag}: {text!r} is no whole number from {least} up")
    return int(digits)


def _above_0(flag: str, number: float | None) -> float | None:
    if number is not None and not 0 < number < math.inf:
        raise SettingsError(f"{flag}: {number:g} is no number above 0")
    return number


def _cost(text: str) -> CostSettings:
    model = parse_cost("--cost", text)
    return CostSettings(model.linear, model.quadratic)
