"""The report: one file, nothing to fetch, and what a browser makes of it."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest

from statecache.ab.report.charts import LINES, line_chart, share_chart
from statecache.ab.report.html import report_page
from statecache.ab.report.result import Machine, Result
from statecache.ab.server_arm import ServerArm
from statecache.ab.server_results import Answered, Answers
from statecache.ab.trial import Cell, Failure, Trial
from statecache.ab.workloads import Workload
from support.ab_servers import server_run
from support.browser import PROGRAM, browsing
from support.replay_support import run

NAME = "a<b>&"
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no browser here")


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
    assert [row[1] for row in verdicts[1:2]] == [f"gds vs {NAME}"]
    assert {row[2] for row in verdicts if row[0] == "agent"} <= {
        "better",
        "worse",
        "not distinguishable",
        "exactly equal",
    }


def test_points_are_where_their_values_are() -> None:
    """Axis 0 to 1 is 236 high from y 12; 0.25 and 0.75 have their mean at the middle, y 130."""
    drawing = line_chart([[[0.25, 0.75], None, [1.0]]], ["a", "b", "c"], "axis <1>")
    points = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"', drawing)
    # Three places over the 400 from 64 to 464: the first in the middle of the first third.
    assert [(float(x), float(y)) for x, y in points] == [
        (pytest.approx(130.667, abs=0.001), 130),
        (pytest.approx(397.333, abs=0.001), 12),
    ]
    assert re.search(r'd="M 130.66\d+ 189\s+L 130.66\d+ 71\s+"', drawing)
    assert "axis &lt;1&gt;" in drawing


def test_shares_are_where_their_values_are() -> None:
    """Quantiles 0, 50 and 100 % from 20 to 200 ms, and from 0, which is off the scale, to 20.

    The axis goes from 20 to 200 over the 388 from x 64; 50 is 0.398 of the way in powers of ten.
    """
    drawing = share_chart([[20, 50, 200], [0, 20, 20]], "axis <1>")
    paths = [
        re.search(rf'd="([^"]+)" style="fill: none; stroke: {colour}; stroke-width: 2', drawing)
        for colour in LINES[:2]
    ]
    assert [re.findall(r"[\d.]+", path[1]) for path in paths if path] == [
        ["64", "248", "218.400723", "130", "452", "12"],
        ["64", "248", "64", "130", "64", "12"],
    ]
    assert re.findall(r">([\d.%,]+)</text>", drawing) == [
        *("20", "50", "100", "200"),
        *("0%", "25%", "50%", "75%", "100%"),
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
    assert found[:-5] == ticks


# Of each plot: where it stands in the page, and what it draws in which colour.
PLOTS = """[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const colours = [...svg.querySelectorAll('path')].map(e => getComputedStyle(e)).filter(
    style => style.stroke != 'none' && style.strokeWidth == '2px').map(style => style.stroke);
  return {left: box.left, top: box.top + scrollY, width: box.width, height: box.height,
          colours: [...new Set(colours)]}})"""
# What sticks out to the right, unless it is in a box of its own that scrolls.
WIDER = """[...document.querySelectorAll('body *')].filter(
  e => !e.closest('.scroll, pre') && e.getBoundingClientRect().right > innerWidth).length"""
# Words of a plot that lie on one another.
ON_ONE_ANOTHER = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect());
  return boxes.filter((a, n) => boxes.slice(n + 1).some(b =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom))}).length"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


def look_at(browser: Any, page: Path, width: int, *, dark: bool = False) -> str:
    """See that the page is drawn at this width, each plot in its place; return the document."""
    browser.show(page, width, dark=dark)
    wide = browser.value_of("document.documentElement.scrollWidth")
    assert wide <= width
    assert browser.value_of(WIDER) == 0
    assert browser.value_of(ON_ONE_ANOTHER) == 0
    shot = browser.picture().astype(int)
    paper = shot[2, 2]
    assert (paper.mean() < 60) == dark
    plots = browser.value_of(PLOTS)
    assert plots
    for plot in plots:
        left, top, across, down = (round(plot[key]) for key in ("left", "top", "width", "height"))
        assert across > 0.85 * min(width, 640)
        inside = shot[top : top + down, left : left + across]
        drawn = numpy.abs(inside - paper).max(axis=2) > 40
        assert 0.002 < drawn.mean() < 0.5
        assert plot["colours"]
        palette = [[int(line[at : at + 2], 16) for at in (1, 3, 5)] for line in LINES]
        for colour in plot["colours"]:
            wanted = [int(part) for part in re.findall(r"\d+", colour)]
            assert wanted in palette
            assert (numpy.abs(inside - wanted).max(axis=2) < 12).sum() >= 10, colour
    return str(browser.value_of("document.documentElement.outerHTML"))


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_a_browser_draws_it_at_every_width(
    page: Path, browser: Any, width: int, dark: bool
) -> None:
    """What stands in the page is seen in the picture, and nothing is wider than the screen."""
    document = look_at(browser, page, width, dark=dark)
    assert document.count("<use") == 6  # two arms in each of three plots


def answered(first: float) -> Answered:
    return Answered(
        prompt_tokens=100,
        cached_tokens=None,
        output_tokens=2,
        asked_at=0,
        ended_at=first + 0.01,
        pieces=[(first, 1), (first + 0.01, 1)],
    )


@needs_browser
def test_a_browser_shows_the_times_of_servers_on_a_phone(browser: Any, tmp_path: Path) -> None:
    """Servers that report no hits: a curve an arm, and points for the other eight measures."""
    arms = [ServerArm(name=name, url="http://127.0.0.1:1") for name in ("a", "b")]
    cell = Cell(name="chat", workload=Workload(kind="distinct-prefixes"), arms=arms)
    runs = [
        server_run("chat", arm, seed, Answers(asked, None, 900 << 20), 0)
        for seed in range(2)
        for arm, slower in (("a", 1), ("b", 2))
        for asked in [[answered(slower * (n + seed) / 10) for n in (1, 2, 30)]]
    ]
    result = Result(
        revision="0123456789" * 4 + "-dirty",  # a long word
        engines={},
        machine=Machine.here(),
        settings=Trial(name="t", cells=[cell], repeats=2),
        seeds={"chat": [0, 1]},
        complete=True,
        runs=runs,
        comparisons=[],
        failures=[Failure("chat", "c", "the server ended with status 1; server-c.log: boom")],
    )
    page = tmp_path / "report.html"
    page.write_bytes(report_page(result))
    document = look_at(browser, page, 390)
    assert "<h2>Time to first token, chat</h2>" in document
    assert "Token hit rate (" not in document
    assert document.count("not measured") == 2 * 2  # hit rate and ceiling of each arm
    assert document.count("<use") == 2 * 8  # a point of each arm and measure
    assert document.count("<svg") == 1 + 8
    assert document.count("900 MiB, processes") == 2
    assert "chat, arm c left out: the server ended with status 1; server-c.log: boom" in document
