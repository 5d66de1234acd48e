"""Counts the tests that ran, by group, from JUnit files; fails when a group has shrunk.

A group is a folder under tests/, a C++ build, or an engine. The floors below are raised when tests
are added, and lowered only in a commit that says why.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

FLOORS = {
    "cpp-plain": 49,
    "cpp-asan": 49,
    "cpp-tsan": 52,
    "unit": 1730,
    "property": 32,
    "golden": 140,
    "mutation": 30,
    "packaging": 8,
    "fuzz": 2,
    "gpu": 56,
    "sglang": 432,
    "vllm": 533,
}


def group_of(case: ElementTree.Element, report: Path) -> str:
    if report.stem != "python":
        return report.stem
    return case.get("classname", "").split(".")[1]


def outcome_of(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in {"failure", "error"}:
            return "failed"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def main(reports: list[str]) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    for report in map(Path, reports):
        for case in ElementTree.parse(report).iter("testcase"):
            counts[group_of(case, report), outcome_of(case)] += 1
    shrunk = []
    for group in sorted({*FLOORS, *(group for group, _ in counts)}):
        passed, skipped = counts[group, "passed"], counts[group, "skipped"]
        print(
            f"{group:10} {passed:5} passed {counts[group, 'failed']:3} failed {skipped:3} skipped"
        )
        if passed + skipped < FLOORS.get(group, 1):
            shrunk.append(f"group {group} ran {passed + skipped} tests, expected {FLOORS[group]}")
    total = Counter(
        {
            o: sum(n for (_, x), n in counts.items() if x == o)
            for o in ("passed", "failed", "skipped")
        }
    )
    for line in shrunk:
        print(line, file=sys.stderr)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if shrunk or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
