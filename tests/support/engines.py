"""Engines on a small model with the real executor, and helpers that run requests through them step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from configs import resolved
from fake_graphs import capture_fake_graphs
from tiny_models import MAX_POSITION, VOCAB_SIZE, build_model, build_tokenizer

from llmsched.engine.architecture.adapter_files import read_adapters
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.core import Engine
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout, group_layers
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.recurrent_state import num_state_slots
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.request import FinishReason, RequestOutput, TokenLogprob
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.text.tokenizer import Tokenizer

EOS = 2
#: Rows of the largest fake graph. Some steps of tests have more.
MAX_GRAPH = 6
BLOCK = 16
#: Engines with too little memory for a few requests.
SMALL_POOL: dict[str, Any] = {"num_blocks": 14, "headroom": 0.0, "block_size": 16, "max_model_len": 128}
SWAP = {"preemption_mode": "swap", "swap_blocks": 24, "enable_prefix_caching": False}
#: Names of all checks against transformers.
PARITY_CHECKS = ("alone", "mixed batch", *(f"chunks of {size}" for size in (1, 7, 16, 17)), "prefix hits")
PARITY_CHECKS += ("preemption", "preemption, prefix cache", "preemption, swap")


@cache
def model(arch: str = "llama") -> Any:
    return build_model(arch, seed=3)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


def layout_of(arch: str, block_size: int = BLOCK, longest: int = MAX_POSITION) -> KVLayout:
    """Return the KV cache layout that `serve` would use for the model of `arch`."""
    return group_layers(kv_geometry(model(arch).config), block_size, longest).layout


def make_engine(
    arch: str = "llama",
    *,
    num_blocks: int = 256,
    swap_blocks: int = 0,
    looks_ahead: bool = False,
    graphs: bool = False,
    kv_dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> Engine:
    """Make a new engine on the shared model of `arch`. `config` has values for its settings.

    By default, the engine admits a request if the prompt fits into free memory, without a reserve for the output. So a
    small pool of blocks leads to preemptions. With `graphs`, decodes run as fake graphs.
    """
    settings = {"max_model_len": MAX_POSITION, "max_num_batched_tokens": 256, "block_size": BLOCK}
    settings |= {"output_prediction": "none"} | config
    adapters = read_adapters(settings.get("lora"))
    layout = layout_of(arch, settings["block_size"], settings["max_model_len"])
    config = resolved(**settings | {"swap_space": swap_blocks})
    num_states = num_state_slots(config.max_num_seqs, enable_prefix_caching=config.enable_prefix_caching)
    host_states = min(swap_blocks, config.max_num_seqs) if layout.recurrent else 0
    executor = TorchExecutor(
        model(arch),
        num_blocks=num_blocks,
        block_size=settings["block_size"],
        device="cpu",
        kv_dtype=kv_dtype,
        num_host_blocks=swap_blocks,
        num_states=num_states,
        num_host_states=host_states,
        layout=layout,
        adapters=Adapters.fit(model(arch), adapters) if adapters else None,
    )
    executor.looks_ahead = looks_ahead
    if graphs:
        capture_fake_graphs(executor, MAX_GRAPH, settings["max_model_len"])
    swap = SwapSpace(swap_blocks, executor.kv_cache_bytes // max(1, num_blocks), host_states)
    info = ModelInfo(arch, arch, VOCAB_SIZE, MAX_POSITION, frozenset({EOS}))
    return Engine(config, info, tokenizer(), executor, make_kv(config, num_blocks, swap, layout), clock=clock)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of `length` random token ids, without special tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()


def sampling(**fields: Any) -> SamplingParams:
    """Return parameters for 16 greedy tokens that ignore end-of-sequence. `fields` replace these values."""
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **fields})


@dataclass
class Choice:
    """Complete output of one sequence."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the last"
        self.text += output.text
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        self.num_prompt_tokens = output.num_prompt_tokens
        self.finish_reason, self.error = output.finish_reason, output.error
        assert output.num_output_tokens == len(self.tokens)


class Collector:
    """Collector of an engine's outputs by (request_id, index). It checks the engine's integrity after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.choices: dict[tuple[str, int], Choice] = {}

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.choices.setdefault((output.request_id, output.index), Choice()).add(output)

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.check_integrity()

    def run(self) -> None:
        while self.engine.has_work():
            self.step()

    def all(self, request_id: str) -> list[Choice]:
        found = {index: choice for (name, index), choice in self.choices.items() if name == request_id}
        return [found[index] for index in sorted(found)]


def generate(engine: Engine, *requests: tuple[list[int], SamplingParams]) -> list[Choice]:
    """Serve all requests together, and return the first choice of each."""
    return [choices[0] for choices in generate_all(engine, *requests)]


def generate_all(engine: Engine, *requests: tuple[list[int], SamplingParams]) -> list[list[Choice]]:
    """Serve all requests together, and return all choices of each."""
    collector = Collector(engine)
    for index, (token_ids, params) in enumerate(requests):
        engine.add_request(str(index), token_ids, params)
    collector.run()
    assert_idle(engine)
    return [collector.all(str(index)) for index in range(len(requests))]


def alone(token_ids: list[int], params: SamplingParams, arch: str = "llama") -> Choice:
    """Return the request's output from a separate engine without prefix cache and with enough blocks."""
    return generate(make_engine(arch, enable_prefix_caching=False), (token_ids, params))[0]


def assert_idle(engine: Engine) -> None:
    """Assert that the engine has no work, and that every block is free or cached."""
    engine.check_integrity()
    stats = engine.stats()
    assert not engine.has_work()
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


class Failing:
    """Function that calls `right`. Every third call fails, in turn before and after the call of `right`."""

    def __init__(self, right: Callable[..., Any]) -> None:
        self.right = right
        self.calls = 0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls % 6 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        result = self.right(*arguments, **more)
        if self.calls % 6 == 4:
            raise MemoryError
        return result
