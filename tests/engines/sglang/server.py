"""A real SGLang server on a CPU, started as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

STANDINS = Path(__file__).parent / "standins"
READY_SECONDS = 600  # under 40 on a free machine with two cores


def environment(**extra: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")},
        "PYTHONPATH": str(STANDINS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        **extra,
    }


LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


def command(start: tuple[str, ...], model: Path, *flags: str) -> list[str]:
    fixed = (
        "--device cpu --attention-backend torch_native --sampling-backend pytorch"
        " --disable-overlap-schedule --host 127.0.0.1 --mem-fraction-static 0.5"
        " --max-total-tokens 8192 --context-length 4096 --max-mamba-cache-size 24"
        " --max-running-requests 6 --skip-server-warmup --log-level info"
    )
    return [*start, "--model-path", str(model), *fixed.split(), *flags]


class Server:
    def __init__(self, port: int, log: Path):
        self.port, self.log = port, log

    def post(self, path: str, body: dict, timeout: float = READY_SECONDS):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read()

    def generate(self, tokens: list[int], new: int = 8, **extra) -> dict:
        """Greedy: the new tokens, their log-probabilities, and how many tokens were reused."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **extra,
        }
        answer = json.loads(self.post("generate", body))
        meta = answer["meta_info"]
        return {
            "tokens": answer["output_ids"],
            "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            "cached": meta["cached_tokens"],
        }

    def flush(self) -> None:
        # The last answer is out a moment before its request has ended: no flush until then.
        self.post("flush_cache?timeout=300", {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen, log: Path, port: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server stopped with {process.returncode}: {tail(log)}")
        # That it is fired up is said a moment before it listens.
        if "The server is fired up" in log.read_text(errors="replace"):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                return
        time.sleep(0.3)
    raise TimeoutError(f"not ready after {READY_SECONDS} s: {tail(log)}")


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _launch(command: list[str], log: Path, variables: dict[str, str]) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen(
            command,
            env=environment(**variables),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def running(
    model: Path, log: Path, *flags: str, start=LAUNCH, process_of=_launch, **variables: str
):
    """Start a server, wait until it is ready, and take its whole process group down after."""
    port = free_port()
    log.touch()
    process = process_of(command(start, model, "--port", str(port), *flags), log, variables)
    try:
        _wait_until_ready(process, log, port)
        yield Server(port, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(READY_SECONDS)


def refused(model: Path, *flags: str, status: int = 2, **variables: str) -> str:
    """Start a server that must stop at once with this exit status; return what it wrote."""
    process = subprocess.Popen(
        command(LAUNCH, model, *flags),
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        written, _ = process.communicate(timeout=READY_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == status, written[-3000:]
    return written
