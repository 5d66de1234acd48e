"""`vllm serve` with the plugin, in processes of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

from engine import document, require_build, run, texts

from support.waiting import DEADLINE_SECONDS, wait_until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORT = free_port()  # several processes may run tests with servers at once
FLAGS = ["--kv-cache-plugin", "statecache", "--statecache-checkpoints", "native"]
FLAGS += ["--statecache-checkpoint-slots", "8"]


def start(model, out, *flags, path=None):
    """Start a server; Python looks for modules in `path` first."""
    require_build()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--port", str(PORT), "--dtype", "bfloat16", "--enforce-eager", "--block-size", "32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    command += ["--num-gpu-blocks-override", "40", "--enable-prompt-tokens-details", *flags]
    command += ["--mamba-ssm-cache-dtype", "bfloat16"]  # as in engine.py
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.Popen(
        command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


@contextmanager
def serve(model, log, *flags, path=None):
    """A server that is ready; stopped with its children at the end."""
    with log.open("w") as out:
        process = start(model, out, *flags, path=path)
    try:
        wait_until(lambda: ready() or process.poll() is not None, every=1)
        assert process.poll() is None, log.read_text()[-4000:]
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):  # one that was stopped while it started leaves children
            os.killpg(process.pid, signal.SIGKILL)


def ready():
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask(model, prompt):
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as reply:
        answer = json.load(reply)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return details.get("cached_tokens") or 0, answer["choices"][0]["token_ids"]


def test_a_server_with_the_plugin_serves_what_it_served_before(model, tmp_path):
    """A prompt cold and again, then again after others had its blocks: the tokens of vLLM alone."""
    prompts = [document(1, 276)] * 2 + [document(i, 276) for i in (2, 3, 1)]
    with run(model) as engine:
        alone = texts(engine.ask(prompts))
    with serve(model, tmp_path / "log", *FLAGS):
        answers = [ask(model, prompt) for prompt in prompts]
    assert [cached for cached, _ in answers[:2]] == [0, 256]
    assert texts(answers) == alone
    log = (tmp_path / "log").read_text()
    assert "block policy reuse" in log
    assert "8 native checkpoints" in log
    assert "each 3 slots of the pool" in log  # one in each group of state layers
    assert "smallest prefix that can be reused is 32 tokens" in log
    worker = [line for line in log.splitlines() if "native slots of" in line]
    assert len(worker) == 1, "a worker has handlers of vLLM and of the root logger"
    assert worker[0].startswith("(Worker")
