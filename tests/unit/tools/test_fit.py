"""`statecache fit`: values worked by hand, planted ones, what is refused, a small server."""

import json
import os
import random
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest

from statecache.cli.fit import fit_command
from statecache.errors import SettingsError
from statecache.tools import fit_server
from statecache.tools.fit import Measurement, fit_cost, read_measurements
from statecache.tools.fit_server import default_lengths
from support.replay_support import assert_one_line, run
from support.waiting import Clock

pytest.importorskip("scipy")

# 0.5 + 0.001 n + 0.4 n n / 2e5: 0.5 + 1 + 2, 0.5 + 2 + 8, 0.5 + 3 + 18, 0.5 + 4 + 32
BY_HAND = {1000: 3.5, 2000: 10.5, 3000: 21.5, 4000: 36.5}
clock = Clock()
LENGTHS = "200,400,800,1600"
HAND_CSV = "tokens,seconds\n1000,3.5\n2000,10.5\n3000,21.5\n4000,36.5\n"


def measured(times: dict[int, float]) -> list[Measurement]:
    return [Measurement(*pair) for pair in times.items()]


def test_values_worked_by_hand() -> None:
    fit = fit_cost(measured(BY_HAND))
    assert fit.overhead_seconds == pytest.approx(0.5)
    assert fit.linear == pytest.approx(0.001)
    assert fit.quadratic == pytest.approx(0.4)
    assert fit.flag == "0.001,0.4"
    assert fit.error == pytest.approx(0, abs=1e-9)
    assert [point.fitted for point in fit.points] == pytest.approx([3.5, 10.5, 21.5, 36.5])


@pytest.mark.parametrize("planted", [(2e-5, 0.0), (0.0, 4e-6), (1.862e-5, 3.33e-6)])
def test_exact_times_give_back_what_was_planted(planted: tuple[float, float]) -> None:
    linear, quadratic = planted
    times = {n: linear * n + quadratic * n * n / 2e5 for n in (512, 4096, 32_768, 131_072)}
    fit = fit_cost(measured(times))
    assert fit.linear == pytest.approx(linear, rel=1e-6, abs=1e-12)
    assert fit.quadratic == pytest.approx(quadratic, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_two_percent_moves_the_fit_little(seed: int) -> None:
    rng = random.Random(seed)
    times = [
        Measurement(n, (0.02 + 2e-5 * n + 4e-5 * n * n / 2e5) * rng.gauss(1, 0.02))
        for n in (1024 << k for k in range(8))
        for _ in range(5)
    ]
    fit = fit_cost(times)
    assert fit.linear == pytest.approx(2e-5, rel=0.1)
    assert fit.quadratic == pytest.approx(4e-5, rel=0.05)
    assert fit.error < 0.02


def test_no_other_coefficients_have_a_smaller_relative_error() -> None:
    times = {256: 0.05, 1024: 0.06, 4096: 0.12, 16_384: 0.5, 65_536: 3.0}
    fit = fit_cost(measured(times))
    best = (fit.overhead_seconds, fit.linear, fit.quadratic)

    def squares(overhead: float, linear: float, quadratic: float) -> float:
        fitted = {n: overhead + linear * n + quadratic * n * n / 2e5 for n in times}
        return sum((fitted[n] / seconds - 1) ** 2 for n, seconds in times.items())

    assert min(best) > 0
    assert fit.error == pytest.approx((squares(*best) / 5) ** 0.5)
    for at in range(3):
        for factor in (0.99, 1.01):
            moved = [value * (factor if i == at else 1) for i, value in enumerate(best)]
            assert squares(*moved) > squares(*best)


def test_one_stall_among_repeats_has_no_weight() -> None:
    stalled = [Measurement(1000, 60.0), Measurement(1000, 3.5), *measured(BY_HAND)]
    fit = fit_cost(stalled)
    assert fit.flag == "0.001,0.4"
    assert [point.measurements for point in fit.points] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({}, "there is no measurement"),
        ({512: 1.0}, "every measurement has the same length, 512 tokens"),
        ({512: 1.0, 1024: 2.0, 2048: 4.0}, "3 different lengths cannot tell the coefficients"),
        ({1000: 1.0, 1100: 1.1, 1200: 1.2, 1999: 2.0}, "from 1000 to 1999 are too close"),
        (dict.fromkeys((1000, 2000, 4000, 8000), 0.7), "the times do not grow with the length"),
        ({n: n**0.5 for n in range(1000, 7000, 1000)}, "quadratic coefficient that fits"),
        ({1000: 8.0, 2000: 7.0, 3000: 6.0, 4000: 5.0, 5000: 4.0}, "linear coefficient that fits"),
        ({1000: 1.0, 2000: 9.0, 4000: 1.0, 8000: 9.0, 16_000: 2.0}, "fit: the error is "),
    ],
)
def test_times_that_say_nothing_are_refused_with_the_reason(
    times: dict[int, float], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        fit_cost(measured(times))


def test_the_command_prints_the_flag_the_error_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"# measured by hand\n\n{HAND_CSV}")
    plot, report = tmp_path / "fit.svg", tmp_path / "fit.json"
    done = run("fit", tmp_path / "t.csv", "--plot", plot, "--json", report)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["tokens", "measured,", "s", "tokens/s", "fitted,", "s", "error"]
    assert lines[1].split() == ["1,000", "3.5000", "285.7", "3.5000", "+0.0%"]
    assert lines[-2] == "error 0.0% (root mean square, relative); 0.5 s a request besides"
    assert lines[-1] == "--statecache-cost 0.001,0.4"
    assert "<!-- without the quadratic part -->" in plot.read_text()
    found = json.loads(report.read_text())
    assert (found["schema"], found["statecache_cost"]) == ("statecache.fit/1", "0.001,0.4")
    assert found["fit"]["points"][3]["seconds"] == 36.5


def test_the_flag_it_prints_is_one_that_a_server_takes() -> None:
    from statecache.engine.settings import Settings

    given = {"kv_cache_plugin": "statecache", "cost": fit_cost(measured(BY_HAND)).flag}
    assert Settings.from_given(given, {}).cost == (0.001, 0.4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1000,3\n2000;4\n", "t.csv, line 2: '2000;4' is no pair of tokens,seconds"),
        ("1000,x\n", "t.csv, line 1: '1000,x' is no pair"),
        ("1000,3\n\n0,1\n", "t.csv, line 3: 0 is no number of tokens"),
        ("1.5,3\n", "t.csv, line 1: 1.5 is no number of tokens"),
        ("9e99,3\n", "line 1: 9e+99 is no number of tokens"),
        ("nan5,3\n", "'nan5,3' is no pair"),
        ("nan,nan\n1000,3.5\n", "line 1: nan is no number of tokens"),
        ("n,t\n1000,3.5\n", "line 1: 'n,t' is no pair of tokens,seconds, and no line of names"),
        ("tokens,seconds\ntokens,seconds\n", "line 2: 'tokens,seconds' is no pair"),
        ("tokens,milliseconds\n1000,3500\n", "line 1: 'tokens,milliseconds' is no pair"),
        ("1,024,3.5\n", "t.csv, line 1: '1,024,3.5' is no pair of tokens,seconds"),
        ("tokens,seconds,gpu\n1000,3.5,1\n", "line 1: 'tokens,seconds,gpu' is no pair"),
        ("seconds,tokens\n1000,3.5\n", "line 2: 3.5 is no number of tokens"),
        ("seconds,tokens\n1,2,3\n", "line 2: '1,2,3' is no pair of seconds,tokens"),
        ("1000\n", "line 1: '1000' is no pair"),
        ("1,1000\n2,2000\n3,3000\n6,9000\n", "every prompt took more than a second a token"),
        ("1000,3500\n2000,9500\n", "is this tokens,seconds, in this order, or are these milli"),
        ("1000,1e-310\n", "line 1: 1e-310 s is no time of a prefill: give 1e-06 to 1e+06 s"),
        ("1000,3e303\n", "line 1: 3e+303 s is no time of a prefill"),
        ("1000,0\n", "line 1: 0 is no number of seconds above 0"),
        ("1000,-1\n", "line 1: -1 is no number of seconds above 0"),
        ("1000,1e999\n", "line 1: inf is no number of seconds above 0"),
        ("", "t.csv: there is no measurement"),
        ("tokens,seconds\n1000,1\n", "t.csv: every measurement has the same length"),
        ("1000,8\n2000,7\n3000,6\n4000,5\n5000,4\n", "t.csv: the linear coefficient that fits"),
        (f"1000,3\n{'9' * 200_000},1\n", "t.csv, line 2: field larger than field limit"),
    ],
)
def test_a_bad_file_is_one_line(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    done = run("fit", tmp_path / "t.csv")
    assert_one_line(done, problem)
    assert done.stderr.startswith(f"statecache: {tmp_path}/t.csv")


@pytest.mark.parametrize("header", ["seconds,tokens", " Seconds , TOKENS"])
def test_columns_are_taken_as_the_first_line_names_them(header: str, tmp_path: Path) -> None:
    rows = "".join(f"{seconds},{tokens}\n" for tokens, seconds in BY_HAND.items())
    (tmp_path / "t.csv").write_text(f"# measured by hand\n{header}\n{rows}")
    assert read_measurements(tmp_path / "t.csv") == measured(BY_HAND)


def test_one_stall_in_a_file_is_not_taken_for_swapped_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1,3\n" + HAND_CSV.partition("\n")[2])
    assert len(read_measurements(tmp_path / "t.csv")) == 5


@pytest.mark.parametrize("times", [(1e-6, 1e6), (1e6, 1e-6)])
def test_the_longest_and_shortest_times_are_fitted_or_refused(times: tuple[float, float]) -> None:
    """Nothing that a file may have ends in an error of the arithmetic."""
    for lengths in ((1, 2, 3, 4), (1, 2, 3, 2**31 - 1), (1, 2**30, 2**30 + 1, 2**31 - 1)):
        for pattern in product(times, repeat=4):
            with suppress(SettingsError):
                fit_cost(measured(dict(zip(lengths, pattern, strict=True))))


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    csv = tmp_path / "t.csv"
    csv.write_text(HAND_CSV)
    assert_one_line(run("fit"), "fit: give a file of measurements or --url, one of them")
    assert_one_line(run("fit", csv, "--url", "http://x"), "one of them")
    assert_one_line(run("fit", csv, "--lengths", "1"), "--lengths: needs --url")
    assert_one_line(run("fit", csv, "--save", "f"), "--save: needs --url")
    assert_one_line(run("fit", csv, "--json", csv), "is the input itself")
    both = ("--json", tmp_path / "a.svg", "--plot", tmp_path / "." / "a.svg")
    assert_one_line(run("fit", csv, *both), "--plot: names the same file as --json: name another")
    both = ("--url", "http://127.0.0.1:9", "--save", "-", "--json", "-")
    assert_one_line(run("fit", *both), "--json: names the same file as --save: name another")
    assert_one_line(run("fit", tmp_path / "none"), "none: No such file or directory")
    assert_one_line(run("fit", "--url", "x:1"), "--url: 'x:1' is no address")
    assert_one_line(run("fit", "--url", "http://127.0.0.1:9"), "Connection refused")
    csv.write_bytes(b"\xff\xfe1,2\n")
    assert_one_line(run("fit", csv), f"{csv}: is no text in UTF-8")


def test_a_wrong_path_or_address_is_said_before_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statecache.tools.fit.find_spec", lambda _name: None)
    with pytest.raises(SettingsError, match="none: No such file"):
        fit_command(tmp_path / "none", repeats=1, request_seconds=1)
    with pytest.raises(SettingsError, match="Connection refused"):
        fit_command(None, "http://127.0.0.1:9", repeats=1, request_seconds=1)
    (tmp_path / "t.csv").write_text(HAND_CSV)
    with pytest.raises(SettingsError, match="fit: numpy and scipy are missing"):
        fit_command(tmp_path / "t.csv", repeats=1, request_seconds=1)
    with model_server() as (url, seen), pytest.raises(SettingsError, match="are missing"):
        fit_command(None, url, repeats=1, request_seconds=60)
    assert seen == []


def test_the_help_says_which_lengths_are_measured() -> None:
    shown = " ".join(run("fit", "--help", env={**os.environ, "COLUMNS": "200"}).stdout.split())
    assert "9/10 of the longest prompt, 131072 at most, its half, and so on" in shown
    assert "at most 8, none below 64" in shown
    lengths = [default_lengths(most) for most in (10_000, 10_000_000)]
    assert [(len(found), found[-1]) for found in lengths] == [(8, 9000), (8, 131_072)]
    assert default_lengths(4096)[0] >= 64


def test_default_lengths_are_powers_of_two_of_the_longest() -> None:
    assert default_lengths(4096) == [115, 230, 460, 921, 1843, 3686]
    assert default_lengths(10_000_000) == [1024 << k for k in range(8)]
    assert default_lengths(60) == [54]


@contextmanager
def model_server(reused: int | None = 0, status: int = 200, most: int = 2048):
    """Takes 10 ms, 50 us a token and 100 ms * n * n / 1e6 by its clock, which nothing else moves.

    Speaks as the OpenAI API.
    """
    seen: list[list[int]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.answer(200, {"data": [{"id": "tiny", "max_model_len": most}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, body["model"], body["max_tokens"]) == ("/v1/completions", "tiny", 1)
            n = len(body["prompt"])
            seen.append(body["prompt"])
            clock.now += 0.01 + 5e-5 * n + 0.1 * n * n / 1e6
            details = None if reused is None else {"cached_tokens": reused}
            self.answer(status, {"usage": {"prompt_tokens": n, "prompt_tokens_details": details}})

        def answer(self, code: int, body: object) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}", seen
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize("reused", [0, None])
def test_a_server_is_measured_with_prompts_of_its_own_each_time(
    reused: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, out = tmp_path / "m.csv", tmp_path / "fit.json"
    monkeypatch.setattr(fit_server, "time", clock)
    with model_server(reused) as (url, seen):
        asked = {"lengths": LENGTHS, "repeats": 2, "request_seconds": 600}
        fit_command(None, url, **asked, save=saved, json=out, plot=tmp_path / "fit.png")
    found = json.loads(out.read_bytes())
    assert found["model"] == "tiny"
    # 0.1 / 1e6 = 0.02 / 2e5
    assert found["fit"]["quadratic"] == pytest.approx(0.02)
    assert found["fit"]["linear"] == pytest.approx(5e-5)
    assert found["fit"]["overhead_seconds"] == pytest.approx(0.01)
    assert [len(prompt) for prompt in seen] == [200, *[200, 400, 800, 1600] * 2]
    assert len({tuple(prompt[:16]) for prompt in seen}) == 9
    assert [measurement.tokens for measurement in read_measurements(saved)] == [
        200,
        400,
        800,
        1600,
    ] * 2
    assert read_measurements(saved)[0].seconds == pytest.approx(0.01 + 0.01 + 0.004)


def test_a_server_that_reuses_or_refuses_is_one_line() -> None:
    with model_server(reused=64) as (url, _):
        problem = "--url: the server reused 64 of 200 tokens nobody sent before"
        assert_one_line(run("fit", "--url", url, "--lengths", LENGTHS), problem)
    with model_server(status=500) as (url, _):
        assert_one_line(run("fit", "--url", url), f"--url: {url}/v1/completions answers 500: ")


@pytest.mark.parametrize(
    ("lengths", "problem"),
    [
        ("2,9x", "is no list of numbers"),
        ("0", "has 1 token or more"),
        ("200,400", "--lengths: 2 different lengths cannot tell the coefficients apart"),
        ("200,300,350,399", "--lengths: lengths from 200 to 399 are too close"),
        (f"{LENGTHS},2048", "--lengths: 2048 does not fit the 2048 tokens a prompt has"),
    ],
)
def test_lengths_are_refused_before_anything_is_measured(lengths: str, problem: str) -> None:
    with model_server() as (url, seen):
        assert_one_line(run("fit", "--url", url, "--lengths", lengths), problem)
        assert seen == []


def test_a_model_of_short_prompts_is_refused_before_anything_is_measured() -> None:
    with model_server(most=200) as (url, seen):
        assert_one_line(run("fit", "--url", url), "--lengths: 2 different lengths cannot tell")
        assert seen == []
