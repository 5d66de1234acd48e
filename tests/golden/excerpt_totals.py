"""What the plain replay counts on the excerpts: makes excerpt.json, anew when a rule changes.

usage: PYTHONPATH=tests .venv/bin/python tests/golden/excerpt_totals.py

Takes minutes: each row is played by tests/support/replay_oracle.py, which shares no code with the
replay.
"""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from support.replay_oracle import Totals, oracle

HERE = Path(__file__).parent
SLOTS = {"agent_coding": (16, 32, 64, 128), "conversation": (32, 64, 128, 256)}
LEARNED = 400  # requests, of which the plain form of learned takes seconds; of all, minutes


class Cell(NamedTuple):
    """One replay: `requests` is how many of the excerpt's first ones, None for all."""

    trace: str
    requests: int | None
    admission: str
    policy: str
    slots: int


def cells() -> Iterator[Cell]:
    for trace, admission in product(SLOTS, ("dense", "ends")):
        for policy, slots in product(("lru", "gds"), SLOTS[trace]):
            yield Cell(trace, None, admission, policy, slots)
        yield Cell(trace, LEARNED, admission, "learned", SLOTS[trace][0])
        yield Cell(trace, LEARNED // 4, admission, "learned", SLOTS[trace][0])


def plain_totals(cell: Cell) -> Totals:
    lines = gzip.decompress((HERE / f"excerpt/{cell.trace}.jsonl.gz").read_bytes()).splitlines()
    requests = [json.loads(line) for line in lines[: cell.requests]]
    whole = [r["hash_ids"][: r["input_length"] // 512] for r in requests]
    return oracle([ids for ids in whole if ids], cell.policy, cell.slots, cell.admission)


def main() -> None:
    todo = list(cells())
    with ProcessPoolExecutor(2) as pool:
        rows = [
            cell._asdict() | {"totals": vars(totals)}
            for cell, totals in zip(todo, pool.map(plain_totals, todo), strict=True)
        ]
    text = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "excerpt.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
