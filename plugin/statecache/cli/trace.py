"""The commands `statecache trace ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statecache.cli.output import check_new_output, write_lines
from statecache.errors import SettingsError
from statecache.trace.convert import FORMATS, trace_lines

__all__ = ["trace"]

trace = typer.Typer(help="Convert recorded workloads to the trace format.")


@trace.callback()
def _trace() -> None:
    """Convert recorded workloads to the trace format."""


@trace.command("convert")
def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The folder traces of kv-cache-tester, one conversation of it, or a trace of"
            " Mooncake; plain or gzip, - for stdin.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="New file (.gz compresses), - for stdout."
        ),
    ],
    source_format: Annotated[
        str, typer.Option("--format", help=f"Format of SOURCE: {', '.join(FORMATS)}.")
    ] = FORMATS[0],
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Select and time the requests as for the published tables: the first 100"
            " conversations of under 900,000 bytes, or the first 6,000 requests of Mooncake.",
        ),
    ] = False,
) -> None:
    """Convert a public trace, sorted by time, for replay, plan and ab.

    Two sources are known, told apart by what is in them:

    kv-cache-tester: https://github.com/callanjfox/kv-cache-tester, coding agents
    mooncake: https://github.com/kvcache-ai/Mooncake, folder FAST25-release
    """
    if not source:
        raise SettingsError("SOURCE is empty: name a folder or a file, or - for stdin")
    if source_format not in FORMATS:
        raise SettingsError(f"--format: unknown {source_format!r}: use {', '.join(FORMATS)}")
    check_new_output("--output", output, source)
    lines = trace_lines(source, source_format=source_format, published=as_published)
    write_lines("--output", output, lines)
