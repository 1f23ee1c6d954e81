"""The HTTP face on the real engine with a small random-weight model: what only real logits can show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from scripted import LiveServer
from transformers import AutoModelForCausalLM

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig

PATH = "/v1/completions"
PROMPT = list(range(40, 73))


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> str:
    return str(tiny_model("llama"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[LiveServer]:
    config = EngineConfig(
        model=folder, dtype="float32", device="cpu", num_gpu_blocks_override=48, max_num_batched_tokens=24
    )
    server = LiveServer(build_engine(config), name="tiny").start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def choice(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def ids(http: httpx.Client, **fields: Any) -> list[int]:
    return list(choice(http, **fields)["token_ids"])


def test_greedy_equals_transformers(http: httpx.Client, reference: Any) -> None:
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert ids(http, max_tokens=12) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_prompt_logprobs_equal_transformers_warm_and_cold(http: httpx.Client, reference: Any, length: int) -> None:
    prompt = list(range(100, 100 + length))
    with torch.no_grad():
        rows = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(rows[position, token]) for position, token in enumerate(prompt[1:])]
    for _ in range(2):
        values = choice(http, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["logprobs"]["token_logprobs"]
        assert values[0] is None
        assert values[1:length] == pytest.approx(expected, abs=1e-4)
        assert len(values) == length + 1
    alone = choice(http, prompt=prompt, echo=True, logprobs=1, max_tokens=0)["logprobs"]["token_logprobs"]
    assert alone[1:] == pytest.approx(expected, abs=1e-4)


def test_filters_down_to_one_token_are_greedy(http: httpx.Client) -> None:
    greedy = ids(http, max_tokens=6)
    for fields in ({"top_p": 1e-9}, {"min_p": 1}, {"top_k": 1}, {"top_p": 0}):
        assert ids(http, max_tokens=6, temperature=1, **fields) == greedy
    assert ids(http, max_tokens=6, top_p=0) == greedy


def test_choices_differ_and_are_reproducible(http: httpx.Client) -> None:
    def texts() -> list[list[int]]:
        body = {"prompt": PROMPT, "temperature": 1.3, "seed": 7, "n": 6, "max_tokens": 8, "return_token_ids": True}
        return [c["token_ids"] for c in http.post(PATH, json=body).json()["choices"]]

    first = texts()
    assert len({tuple(tokens) for tokens in first}) > 1
    assert texts() == first


def test_min_tokens_and_ignore_eos(http: httpx.Client) -> None:
    eos, last = {"2": 100}, {"319": 100}
    barred = ids(http, ignore_eos=False, min_tokens=8, max_tokens=8, logit_bias=eos)
    assert len(barred) == 8
    assert 2 not in barred
    assert ids(http, ignore_eos=False, min_tokens=3, max_tokens=8, logit_bias=eos)[3:] == [2]
    assert ids(http, max_tokens=8, logit_bias=eos) == [2] * 8
    assert ids(http, max_tokens=8, logit_bias=last) == [319] * 8


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"temperature": 2, "top_k": (1 << 63) - 1},
        {"temperature": 1, "top_p": 5e-324},
        {"temperature": 1, "repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": -2},
        {"temperature": 1, "seed": -(1 << 63)},
        {"temperature": 1, "seed": (1 << 63) - 1},
        {"temperature": 1, "logit_bias": {str(token): -100 for token in range(320)}},
        {"temperature": 1, "logit_bias": {str(token): 100 for token in range(320)}, "logprobs": 5},
        {"logprobs": 5, "n": 16},
        {"stop": ["x" * 1024] * 16},
        {"priority": 1000},
        {"cache_salt": "\u0000天"},
    ],
)
def test_extremes_of_what_is_allowed_are_served(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, **fields}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3 * fields.get("n", 1)
