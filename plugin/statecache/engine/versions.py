"""What people are told of an engine's version: what moved in it, and which one to install."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from statecache.errors import group_by_reason

__all__ = ["describe_broken", "pip_line"]


def pip_line(package: str, tested: Iterable[str]) -> str:
    """Return the command that installs the newest of the `tested` versions of a package."""
    newest = max(tested, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    return f"pip install '{package}=={newest}'"


def describe_broken(
    title: str,
    package: str,
    version: str,
    tested: Sequence[str],
    broken: Sequence[tuple[str, str]],
    total: int,
) -> str:
    """Return one line: what moved in this version, which are tested, and how to get one.

    `broken`: the seams, of `total`, that are not in place, and their states. Those with one kind of
    state are named together, three at most; a reason is said where all of them share it.
    """
    reasons: dict[str, set[str]] = {}
    for _, state in broken:
        reasons.setdefault(_kind(state), set()).add(state)
    labels = {kind: min(said) if len(said) == 1 else kind for kind, said in reasons.items()}
    where = f"statecache doctor --engine {package} --seams"
    grouped = group_by_reason(((name, labels[_kind(state)]) for name, state in broken), where)
    known = f"tested: {', '.join(tested)}: {pip_line(package, tested)}"
    if version in tested:
        known = "a tested version"  # so something else is wrong with it
    return (
        f"{title} {version} does not fit ({known}): of {total} seams {len(broken)}"
        f" {'is' if len(broken) == 1 else 'are'} not in place: "
        + "; ".join(f"{names}: {label}" for label, names in grouped)
    )


def _kind(state: str) -> str:
    return state.partition(" ")[0]
