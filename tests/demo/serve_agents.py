"""The main job, for real: one agent workload against `vllm serve`, with the plugin and without.

A tiny hybrid model with random weights is made and served on the CPU three times, with as many
bytes for the cache each time: vLLM alone; with the plugin (block order `reuse`); with the plugin
and an int8 checkpoint pool, whose bytes are taken from the blocks. Each server is asked the same
prompts, one after the other, over HTTP. Run it with the Python of the engines' environment:

    .venv-engines/bin/python tests/demo/serve_agents.py out

Written to the folder: the model, the servers' logs, demo.json (one record a request) and demo.png.
Missed-by-state tokens are those whose KV was resident and that were prefilled again: which KV is
resident is followed by the events that vLLM itself publishes, with the plugin and without.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

ENGINE_TESTS = Path(__file__).parents[1] / "engines" / "vllm"
sys.path.append(str(ENGINE_TESTS))

import msgspec  # noqa: E402
from tiny_models import make_tiny_model  # noqa: E402
from vllm.distributed.kv_events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

from statecache.trace.generate_agent import AgentWorkload, agent_lines  # noqa: E402

WORKLOAD = AgentWorkload(sessions=8, turns=8, seed=0)
BLOCK, BLOCKS, ANSWER_TOKENS = 32, 264, 8
# A state is 411,648 bytes in three blocks of 137,216, and 122,880 bytes in int8.
SLOTS, POOL_BLOCKS = 33, 30
ON = ("--kv-cache-plugin", "statecache")
INT8 = ("--statecache-checkpoints", "int8", "--statecache-checkpoint-slots", str(SLOTS))
ARMS = {
    "vLLM alone": (BLOCKS, ()),
    "statecache": (BLOCKS, ON),
    "statecache, int8": (
        BLOCKS - POOL_BLOCKS,
        (*ON, *INT8, "--statecache-checkpoint-interval", str(16 * BLOCK)),
    ),
}
ATTENTION = "full_attention"
READY_SECONDS = 300


class Record(msgspec.Struct):
    """What one request came to."""

    arm: str
    prompt_tokens: int
    reused_tokens: int
    missed_by_state_tokens: int
    first_token_seconds: float
    answer: list[int]


def prompts() -> list[list[int]]:
    """One block of the served model for each 512 tokens of the generated workload."""
    return [
        [token for block in json.loads(line)["hash_ids"] for token in block_tokens(block)]
        for line in agent_lines(WORKLOAD)
    ]


def block_tokens(number: int) -> list[int]:
    return [3 + (number // 500 ** (at % 3) + at) % 500 for at in range(BLOCK)]


class ResidentBlocks:
    """The KV blocks that are in the cache, by the events of one server."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._copies: Counter = Counter()
        self._hash_of: dict = {}
        self._group: int | None = None

    def update(self) -> None:
        """Take in what has arrived; events come at the end of each step of the engine."""
        while self._socket.poll(30):
            for event in self._decoder.decode(self._socket.recv_multipart()[2]).events:
                self._take(msgspec.convert(event, BlockStored | BlockRemoved | AllBlocksCleared))

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self._copies.clear()
        elif isinstance(event, BlockRemoved):
            if event.group_idx == self._group:
                self._copies.subtract(event.block_hashes)
        elif event.kv_cache_spec_kind == ATTENTION:
            self._group = event.group_idx
            parent = event.parent_block_hash
            for at, own in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
                self._hash_of[parent, tokens] = parent = own
                self._copies[own] += 1

    def resident_tokens(self, prompt: list[int]) -> int:
        """Tokens from the start whose KV is there; the last block is always computed."""
        parent, found = None, 0
        for start in range(0, len(prompt) - BLOCK, BLOCK):
            own = self._hash_of.get((parent, tuple(prompt[start : start + BLOCK])))
            if own is None or self._copies[own] <= 0:
                break
            parent, found = own, found + BLOCK
        return found

    def close(self) -> None:
        self._socket.close(linger=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: Path, log: Path, blocks: int, flags: tuple[str, ...]) -> Iterator[tuple]:
    """A server that is ready: its port and its events. Its whole process group ends after."""
    port, events = free_port(), free_port()
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--port", port]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--block-size", BLOCK, "--seed", 0]
    # By itself vLLM 0.32 makes states float32, and a block 64, on a CPU with AVX-512 BF16.
    command += ["--mamba-ssm-cache-dtype", "bfloat16"]
    command += ["--max-model-len", 4096, "--max-num-seqs", 4]
    command += ["--max-num-batched-tokens", 16 * BLOCK, "--num-gpu-blocks-override", blocks]
    command += ["--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publish), *flags]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By itself vLLM keeps one core more where there is a connector.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    resident = ResidentBlocks(events)
    try:
        wait_until_ready(process, port, log)
        yield port, resident
    finally:
        resident.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    stopped = "stopped" if process.poll() is not None else f"was not ready in {READY_SECONDS} s"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise SystemExit(f"demo: the server {stopped}; see {log}:\n{last}")


def ask(port: int, model: Path, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Return the seconds to the first token, how many tokens were reused, and the answer."""
    body = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start, first, reused, answer = time.perf_counter(), None, 0, []
    with urllib.request.urlopen(request, timeout=300) as reply:
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"]:
                first = first or time.perf_counter() - start
                answer += chunk["choices"][0].get("token_ids") or []
            if chunk.get("usage"):
                reused = (chunk["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return first or 0.0, reused, answer


def run_arm(name: str, model: Path, log: Path, asked: list[list[int]]) -> list[Record]:
    blocks, flags = ARMS[name]
    records = []
    say(f"{name}: starting the server ({log})")
    with serving(model, log, blocks, flags) as (port, resident):
        ask(port, model, [3] * (BLOCK - 1))  # the first request of a server is slow
        start = time.monotonic()
        for number, prompt in enumerate(asked, 1):
            resident.update()
            there = resident.resident_tokens(prompt)
            seconds, reused, answer = ask(port, model, prompt)
            missed = max(0, there - reused)
            records.append(Record(name, len(prompt), reused, missed, seconds, answer))
            if number % 25 == 0 or number == len(asked):
                left = (time.monotonic() - start) / number * (len(asked) - number)
                say(f"{name}: {number} of {len(asked)} requests, {left:.0f} s left")
    return records


def say(what: str) -> None:
    print(what, flush=True)


def table(by_arm: dict[str, list[Record]]) -> str:
    lines = [
        f"{'':18}{'reused':>8}{'prefilled':>11}{'missed by state':>17}{'TTFT p50':>10}{'p90':>8}"
        f"{'same answers':>14}"
    ]
    first = next(iter(by_arm.values()))
    for name, records in by_arm.items():
        asked = sum(record.prompt_tokens for record in records)
        reused = sum(record.reused_tokens for record in records)
        missed = sum(record.missed_by_state_tokens for record in records) / len(records)
        times = statistics.quantiles([record.first_token_seconds for record in records], n=10)
        same = sum(a.answer == b.answer for a, b in zip(records, first, strict=True))
        lines.append(
            f"{name:18}{reused / asked:8.1%}{asked - reused:11,}{missed:9,.0f} a req."
            f"{1000 * times[4]:7.0f} ms{1000 * times[8]:5.0f} ms{same:7} of {len(records)}"
        )
    return "\n".join(lines)


def plot(by_arm: dict[str, list[Record]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, records in by_arm.items():
        total, sums = 0, []
        for record in records:
            total += record.prompt_tokens - record.reused_tokens
            sums.append(total / 1000)
        left.plot(range(1, len(sums) + 1), sums, label=name)
        times = sorted(1000 * record.first_token_seconds for record in records)
        right.plot(times, [(at + 1) / len(times) for at in range(len(times))], label=name)
    left.set(xlabel="requests", ylabel="thousand tokens prefilled")
    right.set(xlabel="time to first token, ms", ylabel="share of requests", xscale="log")
    left.legend()
    figure.suptitle("One agent workload, one cache size, three servers")
    figure.savefig(path)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    asked = prompts()
    say(f"{len(asked)} requests of {WORKLOAD.sessions} agents, {sum(map(len, asked)):,} tokens")
    model = make_tiny_model("qwen3_next", folder / "tiny-qwen3-next")
    by_arm = {
        name: run_arm(name, model, folder / f"server-{number}.log", asked)
        for number, name in enumerate(ARMS)
    }
    records = [record for records in by_arm.values() for record in records]
    (folder / "demo.json").write_bytes(msgspec.json.encode(records) + b"\n")
    plot(by_arm, folder / "demo.png")
    say(table(by_arm))
    say(f"Each request: {folder / 'demo.json'}, plot: {folder / 'demo.png'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    try:
        main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
