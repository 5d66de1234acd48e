"""The commands `statecache generate ...`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from statecache.cli.output import check_output, write_lines
from statecache.errors import SettingsError
from statecache.trace.generate_agent import AgentWorkload, agent_lines
from statecache.trace.generate_mixed import CHOICES, MixedWorkload, mixed_lines
from statecache.trace.generate_prefixes import DistinctPrefixes, SharedPrefix, prefix_lines

__all__ = ["generate"]

generate = typer.Typer(help="Make a workload in the trace format.")

_Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="File (.gz compresses), - for stdout."),
]
_Seed = Annotated[int, typer.Option(help="Another seed, another workload.")]


@generate.callback()
def _generate() -> None:
    """Make a workload in the trace format."""


@generate.command("agent")
def generate_agent(
    output: _Output,
    sessions: Annotated[int, typer.Option(help="Agent sessions.")] = 64,
    turns: Annotated[int, typer.Option(help="Turns a session, on average.")] = 40,
    seed: _Seed = 0,
) -> None:
    """Growing coding-agent sessions, interleaved in time; the same seed gives the same bytes."""
    with _named_options():
        lines = agent_lines(AgentWorkload(sessions, turns, seed))
    _write(output, lines)


def _generate_prefixes(kind: type[DistinctPrefixes | SharedPrefix]) -> Callable[..., None]:
    def command(
        output: _Output,
        count: Annotated[int, typer.Option(help="Prefixes.")] = 256,
        rounds: Annotated[int, typer.Option(help="Requests for each prefix, on average.")] = 4,
        prefix_tokens: Annotated[
            int, typer.Option(help="Tokens of a prefix, a multiple of 512.")
        ] = 1024,
        own_tokens: Annotated[
            int, typer.Option(help="Tokens of a request's own, a multiple of 512.")
        ] = 512,
        seed: _Seed = 0,
    ) -> None:
        with _named_options():
            workload = kind(
                count=count,
                rounds=rounds,
                prefix_tokens=prefix_tokens,
                own_tokens=own_tokens,
                seed=seed,
            )
        _write(output, prefix_lines(workload))

    return command


generate.command(
    "distinct-prefixes",
    help="Prefixes asked one after the other, round by round, each request with an end of its own."
    " They are the same at every seed.",
)(_generate_prefixes(DistinctPrefixes))
generate.command(
    "shared-prefix", help="Requests on prefixes drawn at random, the first ones far more often."
)(_generate_prefixes(SharedPrefix))


@generate.command("mixed")
def generate_mixed(
    output: _Output,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 3_000,
    sessions: Annotated[int, typer.Option(help="Sessions at a time.")] = 100,
    choice: Annotated[
        str, typer.Option(help=f"Which session comes next: {', '.join(CHOICES)}.")
    ] = "uniform",
    rewinds: Annotated[float, typer.Option(help="Share of turns that go back.")] = 0.05,
    subagents: Annotated[int, typer.Option(help="Sub-agents that a session sends out.")] = 0,
    prompts: Annotated[int, typer.Option(help="Shared system prompts, 1 to 5.")] = 1,
    restarts: Annotated[float, typer.Option(help="Share of turns that start afresh.")] = 0.01,
    turn_blocks: Annotated[int, typer.Option(help="Most blocks of 512 tokens a turn.")] = 8,
    most_blocks: Annotated[int, typer.Option(help="Blocks at which a session ends.")] = 300,
    phase: Annotated[
        str | None, typer.Option(help="Half way, other sessions, chosen so.", metavar="CHOICE")
    ] = None,
    seed: _Seed = 0,
) -> None:
    """Growing sessions with traits to choose; the same settings give the same bytes."""
    with _named_options():
        workload = MixedWorkload(
            requests=requests,
            sessions=sessions,
            choice=choice,
            rewinds=rewinds,
            subagents=subagents,
            prompts=prompts,
            restarts=restarts,
            turn_blocks=turn_blocks,
            most_blocks=most_blocks,
            phase=phase,
            seed=seed,
        )
    _write(output, mixed_lines(workload))


@contextmanager
def _named_options() -> Iterator[None]:
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"--{error}") from error


def _write(output: Path, lines: Iterable[bytes]) -> None:
    check_output("--output", output)
    write_lines("--output", output, lines)
