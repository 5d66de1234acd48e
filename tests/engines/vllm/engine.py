"""A real vLLM in this process: one engine at a time, closed before the next one starts."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",  # more threads than free cores wait for each other for minutes
    TORCHDYNAMO_DISABLE="1",  # compiling the sampler takes longer than the tests that use it
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

BLOCK = 32


def require_build() -> None:
    """Skip a test of a model where vLLM is its Python alone: that version has no build for CPUs."""
    import pytest

    if importlib.util.find_spec("vllm._C") is None:
        pytest.skip("this vLLM has no build for CPUs")


def document(number: int, tokens: int = 400) -> list[int]:
    """A prompt of its own for each number."""
    return [3 + (number * 37 + at * (number + 7)) % 250 for at in range(tokens)]


class Engine:
    """What a test does with an engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def scheduler_side(self) -> Any:
        return self.scheduler.connector.scheduler_side

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int = 8,
        salt: str | None = None,
        **more: Any,
    ) -> list[tuple[int, list[int]]]:
        """One request after the other: cached tokens and the tokens that came out."""
        return [self._ask_all([prompt], tokens, salt, **more)[0] for prompt in prompts]

    def ask_together(
        self, prompts: Sequence[Sequence[int]], *, tokens: int = 8
    ) -> list[tuple[int, list[int]]]:
        """All requests at once."""
        return self._ask_all(prompts, tokens, None)

    def weigh(
        self, prompts: Sequence[Sequence[int]], *, tokens: int
    ) -> list[tuple[list[int], list[dict[int, float]]]]:
        """All requests at once: the tokens that came out, and for each the 20 likeliest."""
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=20)
        outputs = [o.outputs[0] for o in self.llm.generate(inputs, sampling, use_tqdm=False)]
        return [
            (
                list(o.token_ids),
                [
                    {token: candidate.logprob for token, candidate in at.items()}
                    for at in o.logprobs
                ],
            )
            for o in outputs
        ]

    def _ask_all(
        self, prompts: Sequence[Sequence[int]], tokens: int, salt: str | None, **more: Any
    ) -> list[tuple[int, list[int]]]:
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        if salt is not None:
            for request in inputs:
                request["cache_salt"] = salt
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        return [(o.num_cached_tokens or 0, list(o.outputs[0].token_ids)) for o in outputs]


@contextlib.contextmanager
def run(
    model: Path, *, blocks: int = 64, plugin: dict[str, Any] | None = None, **more: Any
) -> Iterator[Engine]:
    """A running engine; `plugin` holds settings by name, None leaves the plugin off."""
    require_build()
    config: dict[str, Any] = {}
    if plugin is not None:
        config = {f"statecache_{name}": value for name, value in plugin.items()}
        config["kv_cache_plugin"] = "statecache"
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": blocks,
        "block_size": BLOCK,
        # By itself vLLM 0.32 makes it float32, and a block 64, on a CPU with AVX-512 BF16.
        "mamba_ssm_cache_dtype": "bfloat16",
    }
    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
        additional_config=config,
        **options | more,
    )
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def cached(answers: Sequence[tuple[int, list[int]]]) -> list[int]:
    """Cached tokens of each answer."""
    return [tokens for tokens, _ in answers]


def texts(answers: Sequence[tuple[int, list[int]]]) -> list[list[int]]:
    """Generated tokens of each answer."""
    return [out for _, out in answers]
