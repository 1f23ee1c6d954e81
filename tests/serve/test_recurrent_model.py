"""A quantised model with recurrent layers behind the HTTP server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from quantised_files import Checkpoint, save_quantised
from scripted import LiveServer

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig

PROMPT = list(range(40, 81))
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("recurrent")
    return save_quantised(path, "fp8 row", "falcon_h1")


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint) -> Iterator[LiveServer]:
    knobs: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
    server = LiveServer(build_engine(EngineConfig(model=str(checkpoint.path), **knobs)), name="tiny").start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def slots_used(server: LiveServer) -> int:
    states = server.engine.scheduler.kv.states
    assert states is not None
    return states.pool.num_used


def test_greedy_equals_the_dequantised_model_also_from_the_cache(client: openai.OpenAI, checkpoint: Checkpoint) -> None:
    expected = checkpoint.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=3
    )[0, len(PROMPT) :].tolist()
    extra = {"return_token_ids": True, **GREEDY["extra_body"]}
    for cached in (0, len(PROMPT) // 16 * 16):
        answer: Any = client.completions.create(prompt=PROMPT, max_tokens=9, **{**GREEDY, "extra_body": extra})
        assert answer.choices[0].token_ids == expected
        assert answer.usage.prompt_tokens_details.cached_tokens == cached


def test_a_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What does a fox do?"}]
    whole = client.chat.completions.create(messages=messages, max_tokens=12, **GREEDY)
    stream = client.chat.completions.create(messages=messages, max_tokens=12, stream=True, **GREEDY)
    parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    turn = [*messages, {"role": "assistant", "content": "".join(parts)}, {"role": "user", "content": "And then?"}]
    usage: Any = client.chat.completions.create(messages=turn, max_tokens=4, **GREEDY).usage
    assert usage.prompt_tokens_details.cached_tokens >= 16


def test_a_closed_stream_releases_its_state(client: openai.OpenAI, server: LiveServer) -> None:
    stream = client.completions.create(prompt=PROMPT[:20], max_tokens=400, stream=True, **GREEDY)
    next(iter(stream))
    assert slots_used(server) == 1
    stream.close()
    end = time.monotonic() + 20
    while slots_used(server) and time.monotonic() < end:
        time.sleep(0.01)
    assert slots_used(server) == 0
