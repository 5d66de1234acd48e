"""The report: one file, nothing to fetch, and what a browser makes of it."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from replay_support import run
from statecache.ab.picture import line_chart, share_chart

NAME = "a<b>&"


class Reader(HTMLParser):
    """Collects tags, attributes and rows of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    arms = ("--arm", f"{NAME}:policy=lru,slots=16", "--arm", "gds:policy=gds,slots=16")
    run("ab", *arms, "--workload", "agent:sessions=6,turns=6", "-o", folder)
    return folder / "report.html"


def test_nothing_is_fetched_and_names_are_escaped(page: Path) -> None:
    reader = Reader()
    reader.feed(page.read_text())
    kinds = {tag for tag, _ in reader.tags}
    assert "svg" in kinds
    assert not kinds & {"script", "link", "img", "iframe", "b"}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in reader.tags)
    assert not re.search(r"https?:|url\(|@import", page.read_text())
    verdicts = [row for row in reader.rows if len(row) == 7]
    assert [row[2] for row in verdicts[1:2]] == [f"gds, not {NAME}"]
    assert {row[1] for row in verdicts if row[0] == "agent"} <= {
        "better",
        "worse",
        "not distinguishable",
        "exactly equal",
    }


def test_points_are_where_their_values_are() -> None:
    """Axis 0 to 1 is 236 high from y 12; 0.25 and 0.75 have their mean at the middle, y 130."""
    drawing = line_chart([[[0.25, 0.75], None, [1.0]]], ["a", "b", "c"], "axis <1>")
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawing)
    # Three places over the 400 from 64 to 464: the first in the middle of the first third.
    assert circles == [("130.7", "130.0"), ("397.3", "12.0")]
    assert 'd="M130.7 189.0V71.0"' in drawing
    assert "axis &lt;1&gt;" in drawing


def test_shares_are_where_their_values_are() -> None:
    """Quantiles 0, 50 and 100 % from 20 to 200 ms, and from 0, which is off the scale, to 20.

    The axis goes from 20 to 200 over the 388 from x 64; 50 is 0.398 of the way in powers of ten.
    """
    drawing = share_chart([[20, 50, 200], [0, 20, 20]], "axis <1>")
    assert re.findall(r'<polyline points="([^"]+)"', drawing) == [
        "64.0,248.0 218.4,130.0 452.0,12.0",
        "64.0,248.0 64.0,130.0 64.0,12.0",
    ]
    assert re.findall(r">([\d.%,]+)</text>", drawing) == [
        *("0%", "25%", "50%", "75%", "100%"),
        *("20", "50", "100", "200"),
    ]
    assert "axis &lt;1&gt;" in drawing


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([10, 10], ["10", "20"]),
        ([0, 0], ["1", "2", "5", "10"]),
        ([3, 40_000], ["1", "10", "100", "1,000", "10,000", "100,000"]),
        ([0.7, 3], ["0.5", "1", "2", "5"]),
    ],
)
def test_the_axis_of_shares_has_few_round_numbers(values: list[float], ticks: list[str]) -> None:
    found = re.findall(r">([\d.%,]+)</text>", share_chart([values], ""))
    assert found[5:] == ticks


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_a_browser_shows_it_on_a_phone(page: Path, tmp_path: Path) -> None:
    """What stands in the page arrives in the document, and nothing is wider than a phone."""
    wide = "<script>document.title=document.documentElement.scrollWidth</script>"
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text() + wide)
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    options = [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probe.as_uri()]
    done = subprocess.run([*browser, *options], capture_output=True, text=True, timeout=120)
    (width,) = re.findall(r"<title>(\d+)</title>", done.stdout)
    assert int(width) <= 500
    assert done.stdout.count("<circle") == 6  # two arms in each of three plots
