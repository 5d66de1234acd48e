"""Every command that README and docs show is one that statecache or the adapters take."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import typer

from statecache.cli import app
from statecache.settings import add_flags

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(start: str) -> list[str]:
    """Indented lines that begin with `start`; usage with [choices] or (remarks) is left out."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"^    ({start} .*)$", text, re.M):
            command = line.split(" # ")[0].strip()
            if not set(command) & set("[]|"):
                found.append(command)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("command", commands("statecache"))
def test_a_command_of_statecache_parses(command: str) -> None:
    """Options, values and arguments are taken; nothing is run."""
    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="statecache")
    while words and hasattr(group, "commands"):
        group = group.commands[words.pop(0)]
    group.make_context("statecache", words, parent=context)


def test_there_are_commands_of_every_kind() -> None:
    named = {command.split()[1] for command in commands("statecache")}
    assert {"doctor", "fit", "generate", "replay"} <= named


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_flag_of_a_server_is_one_that_its_adapter_has(engine: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, engine)
    known = {option for action in parser._actions for option in action.option_strings}
    for page in PAGES:
        for line in re.findall(rf"^    {engine} serve .*$", page.read_text(), re.M):
            used = re.findall(r"--(?:statecache|kv-cache-plugin)[\w-]*", line)
            assert used
            assert set(used) <= known


def test_every_file_that_a_page_links_to_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
