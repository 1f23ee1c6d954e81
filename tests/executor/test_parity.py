"""Parity with plain transformers: logits and greedy tokens of the paged, packed, chunked computation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import ARCHITECTURES, VOCAB_SIZE, build_model

from llmsched.engine.executor.torch_executor import TorchExecutor

BLOCK_SIZE = 4
LENGTHS = (37, 5, 16, 1, 64)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@cache
def reference(arch: str) -> list[torch.Tensor]:
    """Return the logits of plain transformers with eager attention, each prompt alone."""
    model = plain(arch)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts()]


def plain(arch: str) -> Any:
    model = build_model(arch, seed=3)
    model.set_attn_implementation("eager")
    return model


@cache
def executor(arch: str) -> TorchExecutor:
    model = build_model(arch, seed=3)
    return TorchExecutor(model, num_blocks=120, block_size=BLOCK_SIZE, device="cpu", kv_dtype=torch.float32)


@pytest.mark.parametrize("chunks", [(1000,), (1,), (7,), (16,), (17,), (1, 7, 1000, 16)], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits(arch: str, chunks: tuple[int, ...]) -> None:
    sequences = [make_sequence(str(index), prompt) for index, prompt in enumerate(prompts())]
    found = Stepper(executor(arch), sequences, max(LENGTHS), seed=len(chunks)).logits(chunks)
    for logits, expected in zip(found, reference(arch), strict=True):
        assert float((logits - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_alone_and_mixed(arch: str) -> None:
    lengths, count = (19, 3, 8), 12
    model = plain(arch)
    expected = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=3
        )[0, len(prompt) :].tolist()
        for prompt in prompts(lengths)
    ]
    for chunks in ((1000,), (5, 1, 1000)):
        sequences = [
            make_sequence(str(index), prompt, min_tokens=count, stop=[2])
            for index, prompt in enumerate(prompts(lengths))
        ]
        assert Stepper(executor(arch), sequences, 32).generate(count, chunks) == expected
    for index, prompt in enumerate(prompts(lengths)):
        alone = Stepper(executor(arch), [make_sequence("x", prompt, min_tokens=count, stop=[2])], 32, seed=index)
        assert alone.generate(count) == [expected[index]]
