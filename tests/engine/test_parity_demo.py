"""The demo model: greedy float32 tokens are those of transformers' generate, for 16 varied prompts x 48 tokens."""

from __future__ import annotations

from dataclasses import dataclass
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
from llmsched.engine.text.chat import render_chat

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
    #: Per prompt, what generate gives, cut before the first near tie.
    expected: list[list[int]]


@pytest.fixture(scope="module")
def demo(demo_dir: Any) -> Demo:
    source = locate("demo")
    config = load_config(source)
    tokenizer = load_tokenizer(source)
    model: Any = load_model(source, config, device="cpu", dtype=torch.float32)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [render_chat(tokenizer, [{"role": "user", "content": text}]) for text in CHATS]
    return Demo(model, load_info(source, config, tokenizer), tokenizer, prompts, [generate(model, p) for p in prompts])


def generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(found.logits).topk(2, dim=1).values
    ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero().flatten().tolist()
    return found.sequences[0, len(prompt) :].tolist()[: ties[0] if ties else NUM_TOKENS]


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
    for prompt, choice, expected in zip(demo.prompts, choices, demo.expected, strict=True):
        assert choice.tokens[: len(expected)] == expected, demo.tokenizer.decode(prompt)
        assert len(choice.tokens) == NUM_TOKENS
        assert choice.text == demo.tokenizer.decode(choice.tokens)


def test_the_reference_is_long_enough_to_mean_something(demo: Demo) -> None:
    assert len(demo.prompts) == 16
    assert sum(len(expected) for expected in demo.expected) >= 0.9 * 16 * NUM_TOKENS


def test_together(demo: Demo) -> None:
    choices, engine = serve(demo, num_blocks=256, max_num_batched_tokens=256)
    assert engine.stats().num_preemptions == 0
    assert_right(demo, choices)


def test_in_small_chunks_with_too_few_blocks(demo: Demo) -> None:
    choices, engine = serve(demo, num_blocks=40, max_num_batched_tokens=33)
    assert engine.stats().num_preemptions > 0
    assert_right(demo, choices)


def test_with_weights_that_stay_quantised(demo: Demo) -> None:
    """The model is a fifth of the size, and the reference is still generate with dequantised weights."""
    source = locate("demo")
    model: Any = load_model(source, load_config(source), device="cpu", dtype=torch.float32, packed=True)
    assert source.gguf is not None
    assert tensor_bytes(model) < source.gguf.stat().st_size < tensor_bytes(demo.model) / 5
    choices, _ = serve(demo, num_blocks=256, model=model, max_num_batched_tokens=256)
    assert_right(demo, choices)
