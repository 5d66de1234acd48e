"""A little of what `make fuzz` runs for long: the corpus, and changed copies of it."""

import gzip
import random
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = {"trace": 300_000, "convert": 80_000, "settings": 30_000}  # about 15 seconds each


def changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return a copy with a few bytes changed, left out or put in, or the end of another."""
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(data))
        what = rng.randrange(5)
        if what == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif what == 1:
            data = data[:at] + rng.choice((b'"', b"-", b"\n", b",", b"9" * 20, b"[")) + data[at:]
        elif what == 2:
            data = data[:at] + data[at + rng.randint(1, 8) :]
        elif what == 3:
            data = data[:at] + other[rng.randint(0, len(other)) :]
        else:
            data = data[:at] + data[at : at + 40] * 2 + data[at + 40 :]
    return data


@pytest.mark.parametrize("target", TARGETS)
def test_no_bytes_do_harm(target: str, share: float) -> None:
    files = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    assert len(files) >= 4
    for data in files:
        TARGETS[target](data)
    rng = random.Random(7)
    for _ in range(int(INPUTS[target] * share)):
        data = changed(rng.choice(files), rng.choice(files), rng)
        TARGETS[target](data if rng.random() < 0.8 else gzip.compress(data))
