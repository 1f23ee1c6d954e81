"""The demo model: greedy float32 tokens are those of transformers, for 16 varied prompts x 48 tokens.

The engine's tokens are compared with the best tokens of one full pass of transformers over prompt and output. By
induction, they are equal up to a position exactly if transformers' generate gives the same tokens up to there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from configs import resolved
from engines import Choice, Collector, assert_idle, sampling

from llmsched.engine.build import tensor_bytes
from llmsched.engine.core import Engine
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.model.loader import load_config, load_info, load_model, load_tokenizer
from llmsched.engine.model.source import locate
from llmsched.engine.parity.logit_comparison import Reference
from llmsched.engine.text.chat_template import render_chat

NUM_TOKENS = 48

#: Where the best two logits are closer than this, rounding decides; what follows is another text.
NEAR_TIE = 2e-3

TEXTS = (
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\n",
    "SELECT name, price FROM products WHERE",
    "1, 2, 4, 8, 16, 32,",
    "Die Hauptstadt von Deutschland ist",
    "Il était une fois",
    "A",
    "The following is a list of prime numbers: 2, 3, 5, 7, 11",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "<html>\n<head>\n<title>",
)
CHATS = (
    "Write a haiku about the ocean.",
    "Explain gravity to a child in two sentences.",
    "List five animals that can fly.",
    "Translate 'good morning' into Spanish.",
)


@dataclass(frozen=True)
class Demo:
    model: Any
    info: Any
    tokenizer: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def demo(demo_dir: Any) -> Demo:
    source = locate("demo")
    config = load_config(source)
    tokenizer = load_tokenizer(source)
    model: Any = load_model(source, config, device="cpu", dtype=torch.float32)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in CHATS]
    return Demo(model, load_info(source, config, tokenizer), tokenizer, prompts)


@cache
def best_tokens(model: Any, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
    """Return the best token after the prompt and after each token of the output, up to the first near tie."""
    logits = Reference(model).logits(prompt + output, len(prompt))
    values, ids = logits.topk(2, dim=1)
    ties = (values[:, 0] - values[:, 1] < NEAR_TIE).nonzero().flatten().tolist()
    return ids[: ties[0] if ties else None, 0].tolist()


def serve(demo: Demo, *, num_blocks: int, model: Any = None, **config: Any) -> tuple[list[Choice], Engine]:
    """Serve all prompts together."""
    executor = TorchExecutor(
        model or demo.model, num_blocks=num_blocks, block_size=16, device="cpu", kv_dtype=torch.float32
    )
    settings = resolved(max_model_len=1024, **config)
    engine = Engine(settings, demo.info, demo.tokenizer, executor, make_kv(settings, num_blocks))
    collector = Collector(engine)
    for index, prompt in enumerate(demo.prompts):
        engine.add_request(str(index), prompt, sampling(max_tokens=NUM_TOKENS))
    collector.run()
    assert_idle(engine)
    return [collector.choices[str(index), 0] for index in range(len(demo.prompts))], engine


def assert_right(demo: Demo, choices: list[Choice]) -> None:
    num_compared = 0
    for prompt, choice in zip(demo.prompts, choices, strict=True):
        assert len(choice.tokens) == NUM_TOKENS
        expected = best_tokens(demo.model, tuple(prompt), tuple(choice.tokens))
        assert choice.tokens[: len(expected)] == expected, demo.tokenizer.decode(prompt)
        assert choice.text == demo.tokenizer.decode(choice.tokens)
        num_compared += len(expected)
    assert num_compared >= 0.9 * 16 * NUM_TOKENS


def test_the_reference_is_generate(demo: Demo) -> None:
    for prompt in (demo.prompts[0], demo.prompts[-1]):
        output = Reference(demo.model).continuation(prompt, 16).token_ids
        assert best_tokens(demo.model, tuple(prompt), output) == list(output)


def test_together(demo: Demo) -> None:
    choices, engine = serve(demo, num_blocks=256, max_num_batched_tokens=256)
    assert engine.stats().num_preemptions == 0
    assert_right(demo, choices)


def test_in_small_chunks_with_too_few_blocks(demo: Demo) -> None:
    choices, engine = serve(demo, num_blocks=40, max_num_batched_tokens=33)
    assert engine.stats().num_preemptions > 0
    assert_right(demo, choices)


def test_with_weights_that_stay_quantised(demo: Demo) -> None:
    """The model is a fifth of the size, and the reference still has dequantised weights."""
    source = locate("demo")
    model: Any = load_model(source, load_config(source), device="cpu", dtype=torch.float32, packed=True)
    assert source.gguf is not None
    assert tensor_bytes(model) < source.gguf.stat().st_size < tensor_bytes(demo.model) / 5
    choices, _ = serve(demo, num_blocks=256, model=model, max_num_batched_tokens=256)
    assert_right(demo, choices)
