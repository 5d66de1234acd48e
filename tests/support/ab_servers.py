"""Plans of `statecache ab` with servers that stand in for real ones."""

import json
import sys
from pathlib import Path
from typing import Any

from statecache.ab.results import Run
from statecache.ab.server_arm import ServerArm
from statecache.ab.server_results import Answers
from support import stand_in_server
from support.stand_in_server import VOCABULARY

PROGRAM = f"{sys.executable} {stand_in_server.__file__} --port {{port}}"
# Twelve requests a run, two blocks each: four prefixes, three times.
WORK = "distinct-prefixes:count=4,rounds=3,prefix_tokens=512,own_tokens=512,loop=closed,at_once=2"
ASKING = ("--workload", WORK, "--servers", "tokens_a_block=8,output_tokens=2")


def attached(name: str, url: str) -> tuple[str, str]:
    return "--arm", f"{name}:url={url},vocabulary={VOCABULARY}"


def plan(folder: Path, **commands: str) -> Path:
    """A plan with a launched server for each command, or an attached one for a URL."""
    path = folder / "plan.toml"
    arms = [
        f'[[arms]]\nname = "{name}"\nvocabulary = {VOCABULARY}\n'
        f'{"url" if command.startswith("http:") else "command"} = "{command}"\n'
        for name, command in commands.items()
    ]
    path.write_text("".join(arms))
    return path


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_bytes())
    return found


def server_run(cell: str, arm: str, seed: int, answers: Answers, warm_up: int) -> Run:
    return answers.total(cell, ServerArm(name=arm, url="http://127.0.0.1:1"), seed, warm_up)
