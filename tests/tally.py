"""Counts the tests of `make test`, by group, and says what failed.

usage: tests/tally.py REPORTS GROUP...

A group that passed leaves GROUP.passed in the folder REPORTS, and one with tests its JUnit file,
GROUP.xml. The tests of the group `python` are counted by their folder under tests/. The tally fails
when a group failed or did not run, when a test was skipped for a reason that is not listed below,
and when fewer tests passed than the floor says. Floors are raised when tests are added, and lowered
only in a commit that says why.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# Of each group of `make test`, the fewest tests that must have passed; one of them by folder.
FLOORS = {
    "lint": {},
    "cpp-plain": {"cpp-plain": 75},
    "cpp-asan": {"cpp-asan": 75},
    "cpp-tsan": {"cpp-tsan": 78},
    "sanitized": {"sanitized": 448},
    "python": {
        "unit": 2681,
        "property": 46,
        "golden": 73,
        "mutation": 37,
        "packaging": 12,
        "fuzz": 3,
        "gpu": 63,
    },
    "sglang": {"sglang": 1305},
    "vllm": {"vllm": 987},
}
# A test skipped for one of these counts towards its floor: no machine can do both.
ALLOWED_SKIPS = ("no CUDA device", "root writes everywhere")
MOST_LINES = 20  # about tests of one group


class Test(NamedTuple):
    """A test that ran: its name, passed, failed or skipped, and the reason of a skip."""

    name: str
    outcome: str
    reason: str = ""


def test_of(case: ElementTree.Element) -> Test:
    name = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
    if case.find("failure") is not None or case.find("error") is not None:
        return Test(name, "failed")
    skipped = case.find("skipped")
    if skipped is not None:
        return Test(name, "skipped", skipped.get("message") or skipped.text or "no reason")
    return Test(name, "passed")


def tests_by_group(folder: Path, group: str) -> dict[str, list[Test]]:
    """Read a group's report; {} if there is none."""
    report = folder / f"{group}.xml"
    found: dict[str, list[Test]] = defaultdict(list)
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            test = test_of(case)
            found[test.name.split(".")[1] if group == "python" else group].append(test)
    return found


def problems_of(name: str, tests: list[Test], floor: int) -> list[str]:
    """Return a line for each test that failed or may not be skipped, and one if tests are lost."""
    skipped = [test for test in tests if test.outcome == "skipped"]
    forbidden = [test for test in skipped if test.reason not in ALLOWED_SKIPS]
    lines = [f"{test.name} failed" for test in tests if test.outcome == "failed"]
    lines += [f"{test.name} was skipped: {test.reason}" for test in forbidden]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    counted = sum(test.outcome == "passed" for test in tests) + len(skipped) - len(forbidden)
    if counted < floor:
        lines.append(f"{counted} tests passed, expected {floor} or more")
    return [f"{name}: {line}" for line in lines]


def counts_of(tests: list[Test]) -> list[str]:
    outcomes = [test.outcome for test in tests]
    return [f"{outcomes.count(name)} {name}" for name in ("passed", "failed", "skipped")]


def main(folder: str, *groups: str) -> int:
    """Print the summary; the status is 1 if anything is wrong."""
    problems: list[str] = []
    everything: list[Test] = []
    for group in groups:
        found = tests_by_group(Path(folder), group)
        floors = FLOORS.get(group, {group: 1})
        passed = (Path(folder) / f"{group}.passed").exists()
        if not passed:
            problems.append(f"{group}: failed or did not run, see its output above")
        if not found and not (passed and floors):
            print(f"{group:10} {'passed' if passed else 'failed'}")
            continue
        for name in sorted({*floors, *found}):
            print(f"{name:10} {'  '.join(f'{part:>12}' for part in counts_of(found[name]))}")
            problems += problems_of(name, found[name], floors.get(name, 1))
            everything += found[name]
    print("\n".join([*problems, ", ".join(counts_of(everything))]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
