"""From what the user wrote, a file or options, to the test that is run."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from statecache.ab.arms import check_arms, parse_arm, parse_arm_config
from statecache.ab.config import build_struct, parse_pairs
from statecache.ab.server_arm import build_server_settings, parse_servers
from statecache.ab.statistics import default_repeats, least_repeats
from statecache.ab.trial import Cell, Trial
from statecache.ab.workloads import KINDS, Workload
from statecache.errors import SettingsError, escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from statecache.ab.arms import AnyArm

__all__ = ["Plan", "parse_workload", "read_plan", "trial_of"]

_MOST_REPEATS = 10_000
_MOST_SEED = 2**63 - _MOST_REPEATS  # each repeat has the next one, and all are below 2 ** 63


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says; its tables become arms, a workload and settings of servers."""

    arms: list[dict[str, Any]] = []
    workload: dict[str, Any] = {}
    name: str = "ab"
    repeats: int | None = None
    seed: int | None = None
    warm_up: float | None = None
    servers: dict[str, Any] = {}


def read_plan(
    path: Path | None,
    arms: Sequence[str],
    workload: str | None,
    repeats: int | None,
    seed: int | None,
    warm_up: float | None,
    python: str | None,
    servers: str | None,
    speed: float | None,
) -> Trial:
    """Return the test of a TOML file, of options, or of both: what an option says wins."""
    plan, planned, asked = (Plan(), [], Workload()) if path is None else _read(path)
    if workload:
        asked = parse_workload(workload)
    all_arms = planned + [parse_arm(text) for text in arms]
    check_arms(all_arms)
    cell = Cell(name=asked.kind, workload=asked, arms=all_arms)
    asking = plan.servers | (parse_servers(servers) if servers else {})
    if speed is not None:
        asking["speed"] = speed
    trial = trial_of(
        [cell],
        plan.name,
        plan.repeats if repeats is None else repeats,
        plan.seed if seed is None else seed,
        plan.warm_up if warm_up is None else warm_up,
        python,
        "",
    )
    return _with_servers(trial, cell, asking)


def trial_of(
    cells: Sequence[Cell],
    name: str,
    repeats: int | None,
    seed: int | None,
    warm_up: float | None,
    python: str | None,
    axis: str,
) -> Trial:
    """Fill in the rest. Raises `SettingsError` for repeats that could never find anything."""
    if python is not None:
        cells = [
            msgspec.structs.replace(cell, arms=[arm.with_python(python) for arm in cell.arms])
            for cell in cells
        ]
    seeded = [pair for cell in cells if cell.seeded for pair in cell.pairs]
    timed = sum(cell.timed_pairs for cell in cells if cell.seeded)
    if repeats is not None and not 1 <= repeats <= _MOST_REPEATS:
        raise SettingsError(f"--repeats: {repeats} is not in 1 to {_MOST_REPEATS}")
    if repeats is None:
        repeats = default_repeats(len(seeded), timed) if seeded else 1
    elif seeded and 1 != repeats < least_repeats(len(seeded)):
        raise SettingsError(
            f"--repeats: {repeats} can never reach significance in {len(seeded)} comparisons:"
            f" give {default_repeats(len(seeded), timed)}, or 1 for equal or different"
        )
    if seed is not None and not 0 <= seed <= _MOST_SEED:
        raise SettingsError(f"--seed: {seed} is not in 0 to {_MOST_SEED}")
    share = 0.1 if warm_up is None else warm_up
    if not 0 <= share < 1:
        raise SettingsError(f"--warm-up: {share:g} is no share from 0 to below 1")
    return Trial(
        name=name, cells=list(cells), repeats=repeats, seed=seed or 0, warm_up=share, axis=axis
    )


def parse_workload(text: str) -> Workload:
    """Read a workload written as "kind:key=value,...". Raises `SettingsError`."""
    kind, _, rest = text.partition(":")
    values: dict[str, Any] = {"kind": kind}
    if rest:
        values = parse_pairs(rest, f"--workload: {text!r} is not kind:key=value,...", values)
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise SettingsError(escape_control_chars(f"--workload: unknown kind {kind!r}: use {known}"))
    return build_struct(Workload, values, "--workload", strict=False)


def _with_servers(trial: Trial, cell: Cell, asking: dict[str, Any]) -> Trial:
    """Add how servers are asked. Raises `SettingsError` for what would not be a fair test."""
    if not any(arm.timed for arm in cell.arms):
        if asking:
            raise SettingsError("--servers and --speed are for servers, and no arm is one")
        return trial
    for arm in cell.arms:
        arm.check()
    if not all(arm.seeds_tokens for arm in cell.arms) and not cell.workload.seeded:
        raise SettingsError(
            f"workload: {cell.workload.kind} is the same at each seed, so only servers can repeat"
            " it: leave the other arms out"
        )
    if "speed" in asking and cell.workload.loop == "closed":
        raise SettingsError("--speed: a closed loop has no times: set loop=open")
    settings = build_server_settings({"salt": secrets.randbits(32)} | asking)
    return msgspec.structs.replace(trial, servers=settings)


def _read(path: Path) -> tuple[Plan, list[AnyArm], Workload]:
    """Return what a file says, its arms and its workload. Raises `SettingsError` with its name."""
    try:
        plan = build_struct(Plan, msgspec.toml.decode(path.read_bytes()), "plan", strict=True)
        build_server_settings(plan.servers)
        arms = [parse_arm_config(values, strict=True) for values in plan.arms]
        return plan, arms, build_struct(Workload, plan.workload, "workload", strict=True)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except RecursionError:
        problem = "it is nested too deeply"
    except (msgspec.DecodeError, ValueError) as error:
        problem = str(error)
    raise SettingsError(escape_control_chars(f"{path}: {problem}"))
