"""The alert rules before made-up series: each fires when it should, and not when it should not."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[3] / "docs" / "alerts.yml"
REASON = "{{ $labels.reason }}"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is missing")

LABELS = 'engine="sglang",model_name="m",rank="0"'
SERVER = {"engine": "sglang", "model_name": "m"}
NOT_ACTIVE, SKIPS, MISSED = (
    "StatecacheNotActive",
    "StatecacheSkipsRising",
    "StatecacheMissedByStateRising",
)


def active(values: str, policy: str = "gds", rank: int = 0) -> dict[str, str]:
    labels = f'engine="sglang",model_name="m",rank="{rank}",policy="{policy}"'
    return {f"statecache_active{{{labels}}}": values}


def skips(values: str, reason: str = "not_cached") -> dict[str, str]:
    return {f'statecache_skips_total{{{LABELS},reason="{reason}"}}': values}


def tokens(missed: str, prompt: str = "0+6000x300") -> dict[str, str]:
    return {
        f"statecache_missed_by_state_tokens_total{{{LABELS}}}": missed,
        f"statecache_prompt_tokens_total{{{LABELS}}}": prompt,
    }


# A sample a minute; "0+60x120 7200+600x60": 1 a second for two hours, then 10 a second for one.
FIRES = {
    "an error": (NOT_ACTIVE, active("1x30 0x30"), 40, SERVER),
    "an error on one rank": (NOT_ACTIVE, active("1x60") | active("0x60", rank=1), 10, SERVER),
    "never started": (NOT_ACTIVE, {"up": "1x60"}, 10, {}),
    "gone": (NOT_ACTIVE, active("1x30 stale"), 40, {}),
    "skips rise": (SKIPS, skips("0+60x120 7200+600x60"), 150, {**SERVER, "reason": "not_cached"}),
    "skips from none": (SKIPS, skips("0x120 0+60x60"), 150, {**SERVER, "reason": "not_cached"}),
    "skips of a new reason": (
        SKIPS,
        skips("_x120 1+60x60", "not_reused"),
        150,
        {**SERVER, "reason": "not_reused"},
    ),
    "skips of a new server": (SKIPS, skips("0+60x60"), 40, {**SERVER, "reason": "not_cached"}),
    # 5 % of the tokens, then 30 %
    "missed rise": (MISSED, tokens("0+300x120 36300+1800x60"), 150, SERVER),
    "missed rise from none": (MISSED, tokens("0x120 0+1800x60"), 150, SERVER),
}
QUIET = {
    "active": (NOT_ACTIVE, active("1x60"), 30),
    "a dry run": (NOT_ACTIVE, active("0x60", policy="dry_run"), 30),
    "an error just now": (NOT_ACTIVE, active("1x30 0x30"), 33),
    "skips as ever": (SKIPS, skips("0+60x300"), 250),
    "skips rise a little": (SKIPS, skips("0+60x120 7200+90x60"), 150),
    "few skips": (SKIPS, skips("0x120 0+3x60"), 150),
    "skips fall": (SKIPS, skips("0+600x120 72000+60x60"), 150),
    "a busier hour just begun": (SKIPS, skips("0+60x120 7200+600x60"), 130),
    "skips of a server that started again": (SKIPS, skips("0+60x120 0+60x60"), 150),
    "not finite": (SKIPS, skips("0x120 0+600x60", "not_finite"), 150),
    "missed as ever": (MISSED, tokens("0+1800x300"), 250),
    "missed rise with the load": (
        MISSED,
        tokens("0+1800x120 216000+18000x60", "0+6000x120 720000+60000x60"),
        150,
    ),
    "missed rise to little": (MISSED, tokens("0x120 0+300x60"), 150),
    "missed fall": (MISSED, tokens("0+3000x120 360000+1000x60"), 150),
    "no load an hour ago": (MISSED, tokens("0x120 0+1800x60", "0x120 0+6000x60"), 150),
    "no load": (MISSED, tokens("0x300", "0x300"), 250),
}


def outcome(
    folder: Path, alert: str, series: dict[str, str], minute: int, labels: dict[str, str] | None
) -> subprocess.CompletedProcess[str]:
    expected = []
    if labels is not None:
        rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
        (said,) = (rule["annotations"] for rule in rules if rule["alert"] == alert)
        reason = labels.get("reason", "")
        said = {name: text.replace(REASON, reason) for name, text in said.items()}
        expected = [{"exp_labels": {"severity": "warning", **labels}, "exp_annotations": said}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}
        ],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    return subprocess.run(
        [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("name", FIRES)
def test_a_rule_fires(name: str, tmp_path: Path) -> None:
    done = outcome(tmp_path, *FIRES[name])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", QUIET)
def test_a_rule_does_not_fire(name: str, tmp_path: Path) -> None:
    done = outcome(tmp_path, *QUIET[name], None)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_sound() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "check", "rules", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rules found" in done.stdout
