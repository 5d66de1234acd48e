"""The count at the end of `make test`, on reports made here, and the groups that run before it."""

import os
import subprocess
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

import tally

ROOT = Path(__file__).parents[2]
FLOORS = {"lint": {}, "cpp": {"cpp": 2}, "python": {"unit": 2, "golden": 1, "gpu": 2}}
GROUPS = ("lint", "cpp", "python")
CPP = ("cpp.a", "cpp.b")
UNIT = ("tests.unit.test_x.test_a", "tests.unit.test_x.test_b")
GOLDEN = ("tests.golden.test_y.test_a",)
GPU = ("tests.gpu.test_z.test_a", "tests.gpu.test_z.test_b")
NO_GPU = dict.fromkeys(GPU, '<skipped message="no CUDA device"/>')


def report(path: Path, names: tuple[str, ...], inside: dict[str, str]) -> None:
    cases = [
        f"<testcase classname={quoteattr(name.rpartition('.')[0])}"
        f" name={quoteattr(name.rpartition('.')[2])}>{inside.get(name, '')}</testcase>"
        for name in names
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a GPU where all is well."""
    monkeypatch.setattr(tally, "FLOORS", FLOORS)
    report(tmp_path / "cpp.xml", CPP, {})
    report(tmp_path / "python.xml", UNIT + GOLDEN + GPU, NO_GPU)
    for group in GROUPS:
        (tmp_path / f"{group}.passed").touch()
    return tmp_path


def outcome(reports: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The status and the lines that were printed."""
    status = tally.main(str(reports), *GROUPS)
    return status, capsys.readouterr().out.splitlines()


def test_what_passed_is_counted_by_group(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = outcome(reports, capsys)
    assert [" ".join(line.split()) for line in lines] == [
        "lint passed",
        "cpp 2 passed 0 failed 0 skipped",
        "golden 1 passed 0 failed 0 skipped",
        "gpu 0 passed 0 failed 2 skipped",
        "unit 2 passed 0 failed 0 skipped",
        "5 passed, 0 failed, 2 skipped",
    ]
    assert status == 0


@pytest.mark.parametrize("inside", ['<failure message="no"/>', '<error message="no"/>'])
def test_a_test_that_failed_is_named(
    inside: str, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(reports / "python.xml", UNIT + GOLDEN + GPU, NO_GPU | {UNIT[1]: inside})
    (reports / "python.passed").unlink()
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert f"unit: {UNIT[1]} failed" in lines
    assert lines[-1] == "4 passed, 1 failed, 2 skipped"


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_failed_fails_the_tally_whatever_its_tests_say(
    group: str, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reports / f"{group}.passed").unlink()
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert f"{group}: failed or did not run, see its output above" in lines
    assert lines[-1] == "5 passed, 0 failed, 2 skipped"


def test_a_group_that_did_not_run_does_not_hide_the_others(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reports / "cpp.xml").unlink()
    (reports / "cpp.passed").unlink()
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert "cpp        failed" in lines
    assert lines[-1] == "3 passed, 0 failed, 2 skipped"


def test_a_golden_test_that_was_skipped_fails_the_tally(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = {GOLDEN[0]: '<skipped message="the traces are not here"/>'}
    report(reports / "python.xml", UNIT + GOLDEN + GPU, NO_GPU | skipped)
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert f"golden: {GOLDEN[0]} was skipped: the traces are not here" in lines
    assert "golden: 0 tests passed, expected 1 or more" in lines


def test_a_file_that_is_skipped_as_a_whole_fails_the_tally(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its case has no class."""
    whole = '<testcase classname="" name="tests.unit.test_w"><skipped message="no w"/></testcase>'
    text = (reports / "python.xml").read_text()
    (reports / "python.xml").write_text(text.replace("</testsuite>", f"{whole}</testsuite>"))
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert "unit: tests.unit.test_w was skipped: no w" in lines


def test_a_skip_of_ctest_fails_the_tally(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = {CPP[0]: '<skipped message="SKIP_RETURN_CODE=77"/>'}
    report(reports / "cpp.xml", CPP, skipped)
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert f"cpp: {CPP[0]} was skipped: SKIP_RETURN_CODE=77" in lines


@pytest.mark.parametrize("folder", ["unit", "golden", "gpu"])
def test_tests_that_have_vanished_fail_the_tally(
    folder: str, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in UNIT + GOLDEN + GPU if name.split(".")[1] != folder]
    report(reports / "python.xml", tuple(names), NO_GPU)
    status, lines = outcome(reports, capsys)
    assert status == 1
    (line,) = (line for line in lines if "expected" in line)
    assert line.startswith(f"{folder}: 0 tests passed, expected ")


def test_a_report_of_nothing_fails_the_tally(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (reports / "cpp.xml").unlink()
    status, lines = outcome(reports, capsys)
    assert status == 1
    assert "cpp: 0 tests passed, expected 2 or more" in lines


def test_of_many_failures_the_first_are_shown(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tuple(f"cpp.{number}" for number in range(50))
    report(reports / "cpp.xml", names, dict.fromkeys(names, "<failure/>"))
    _, lines = outcome(reports, capsys)
    assert [line for line in lines if line.startswith("cpp: ")] == [
        *(f"cpp: cpp.{number} failed" for number in range(tally.MOST_LINES)),
        "cpp: and 30 more",
        "cpp: 0 tests passed, expected 2 or more",
    ]
    assert lines[-1] == "3 passed, 50 failed, 2 skipped"


def test_make_test_runs_all_groups_and_keeps_the_status(tmp_path: Path) -> None:
    """The first group fails; a report of an earlier time is not counted."""
    (tmp_path / "groups.mk").write_text(
        "bad:\n\t@exit 3\nunbuilt:\n\t@exit 3\ngood: ; $(passed)\nwithout: unbuilt ; $(passed)\n"
    )
    reports = tmp_path / "reports"
    reports.mkdir()
    report(reports / "bad.xml", ("bad.a",), {})
    (reports / "bad.passed").touch()
    groups = "bad without good"
    done = subprocess.run(
        ["make", "--no-print-directory", "test", f"GROUPS={groups}", f"REPORTS={reports}"],
        cwd=ROOT,
        env={**os.environ, "MAKEFILES": str(tmp_path / "groups.mk"), "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert {path.name for path in reports.iterdir()} == {"good.passed"}
    summary = done.stdout[done.stdout.index("bad  ") :].splitlines()
    assert summary[0].split() == ["bad", "failed"]
    assert summary[1].split() == ["without", "failed"]
    assert "bad: failed or did not run, see its output above" in summary
    assert summary[-1] == "0 passed, 0 failed, 0 skipped"
