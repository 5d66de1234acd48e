"""Runs the doctor on an installation that was changed, and before small servers."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

import statecache

INSTALLED = Path(statecache.__file__).parent
WITHOUT_ENGINE = pytest.mark.skipif(
    any(find_spec(name) for name in ("sglang", "vllm")), reason="an engine is installed here"
)
# A line of a server's metrics, its value left out.
ACTIVE = 'statecache_active{engine="sglang",policy="gds",pid="7"} '


def doctor(*arguments: object, path: Path | None = None, **variables: str):
    """Run it; `path` is searched for modules before what is installed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "statecache", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, "PYTHONPATH": str(path or ""), **variables},
    )


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """The last finding about each thing."""
    report = json.loads(done.stdout)
    assert report["schema"] == "statecache.doctor/1"
    assert report["works"] == (done.returncode == 0)
    return {finding["about"]: (finding["level"], finding["text"]) for finding in report["findings"]}


def planted(folder: Path, broken: str, content: bytes | None) -> Path:
    """A copy of the package in which one extension module is something else, or not there."""
    copy = folder / "statecache"
    shutil.copytree(INSTALLED, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (found,) = copy.glob(f"{broken}.*.so")
    if content:
        found.write_bytes(content)
    else:
        found.unlink()
    return folder


@contextmanager
def server(status: int, body: str):
    """Answers /metrics only."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 418)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()
            thread.join()
