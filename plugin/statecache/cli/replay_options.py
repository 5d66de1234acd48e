"""Values of the command's options: text in, settings out, or `SettingsError` naming the option."""

from __future__ import annotations

import math

import msgspec

from statecache.engine.cost import parse_cost
from statecache.errors import SettingsError
from statecache.index.policies import (
    BASELINE,
    DEFAULT,
    REPLAY,
    policy_names,
    pool_policy_names,
)
from statecache.replay.block_policies import ORDERS
from statecache.replay.block_pools import kv_blocks_beside
from statecache.replay.report import CostSettings, PoolSettings, ReplaySettings
from statecache.replay.schedule import ADMISSIONS
from statecache.replay.shared_pool import MOST_BLOCKS, POOL_ADMISSIONS
from statecache.trace.format import BLOCK_TOKENS

__all__ = ["Options", "pool_settings", "replay_settings"]

_STATE_BLOCKS = 3.0
_COMPARED = [BASELINE, DEFAULT]  # unless asked for others


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options as given; None is not given."""

    policy: list[str] | None
    slots: list[str] | None
    kv_tokens: str
    pool_blocks: list[str] | None
    order: list[str] | None
    state_blocks: float | None
    checkpoint_slots: list[str] | None
    interior_weight: float | None
    queue_ratio: float | None
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
        "order state_blocks checkpoint_slots interior_weight queue_ratio",
        "describes a pool of blocks: give --pool-blocks as well",
    )
    return ReplaySettings(
        policies=_known("--policy", options.policy or _COMPARED, policy_names(REPLAY)),
        slots=_numbers("--slots", options.slots or ["64,128,256,1024"]),
        admissions=_known("--admission", options.admission or ["dense"], ADMISSIONS),
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
        options.refuse("order", "orders a pool without --checkpoint-slots: leave one of them out")
    else:
        options.refuse("policy", "rules slots of their own: give --checkpoint-slots, or --order")
        options.refuse("interior_weight", "weighs slots of their own: give --checkpoint-slots")
        if state != int(state):
            raise SettingsError(
                f"--state-blocks: {state:g} is no whole number: give one, or --checkpoint-slots"
            )
    orders = None if apart else _known("--order", options.order or [",".join(ORDERS)], ORDERS)
    if orders is not None and "reuse" not in orders:
        options.refuse("queue_ratio", "is one of the order reuse: add it to --order")
    slots = _numbers("--checkpoint-slots", options.checkpoint_slots or [])
    _check_fit(pools, slots, state)
    default = "dense" if apart else "junctions"
    return PoolSettings(
        pool_blocks=pools,
        state_blocks=state,
        orders=orders,
        checkpoint_slots=slots if apart else None,
        policies=_slot_policies(options) if apart else None,
        admissions=_known("--admission", options.admission or [default], POOL_ADMISSIONS),
        interior_weight=_weight(options.interior_weight),
        queue_ratio=_above_0("--queue-ratio", options.queue_ratio),
        chunk_tokens=_chunk(options.chunk),
        limit=options.limit,
        cost=_cost(options.cost),
    )


def _slot_policies(options: Options) -> list[str]:
    policies = _known("--policy", options.policy or _COMPARED, pool_policy_names())
    if "gds" not in policies:
        options.refuse("interior_weight", "weighs gains, which lru has none of: add gds")
    return policies


def _check_fit(pools: list[int], slots: list[int], state_blocks: float) -> None:
    for pool in pools:
        for number in slots:
            try:
                kv_blocks_beside(pool, number, state_blocks)
            except SettingsError as error:
                raise SettingsError(f"--checkpoint-slots: {error}") from error


def _parts(values: list[str]) -> list[str]:
    """Split each value at its commas and drop what comes again."""
    return list(dict.fromkeys(part.strip() for value in values for part in value.split(",")))


def _known(flag: str, values: list[str], known: tuple[str, ...]) -> list[str]:
    names = _parts(values)
    for name in names:
        if name not in known:
            raise SettingsError(f"{flag}: unknown {flag[2:]} {name!r}: use {', '.join(known)}")
    return names


def _numbers(flag: str, values: list[str], most: int | None = None) -> list[int]:
    numbers = [_integer(flag, part, least=1) for part in _parts(values)]
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


def _weight(number: float | None) -> float | None:
    if number is not None and not 0 <= number <= 1:
        raise SettingsError(f"--interior-weight: {number:g} is no number from 0 to 1")
    return number


def _cost(text: str) -> CostSettings:
    model = parse_cost("--cost", text)
    return CostSettings(model.linear, model.quadratic)
