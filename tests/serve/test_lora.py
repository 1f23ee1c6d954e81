"""Adapters over HTTP: a request chooses one by its model's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from lora_files import ATTENTION, MLP, merged, save_adapter
from scripted import LiveServer
from transformers import AutoModelForCausalLM

from llmsched.cli.serve.banner import start_rows
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError

PROMPT = list(range(40, 73))
TARGETS = {"sql": (*ATTENTION, *MLP), "chat": ("q_proj", "down_proj")}


@pytest.fixture(scope="module")
def plain(tiny_model: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def directories(plain: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(root / name, plain, targets, seed=len(name)) for name, targets in TARGETS.items()}


@pytest.fixture(scope="module")
def config(tiny_model: Any, directories: dict[str, Path]) -> EngineConfig:
    lora = tuple(f"{name}={directory}" for name, directory in directories.items())
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 48}
    return EngineConfig(model=str(tiny_model("llama")), max_num_batched_tokens=24, lora=lora, **settings)


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[LiveServer]:
    server = LiveServer(build_engine(config), name="tiny").start()
    yield server
    server.close()
    server.engine.check_integrity()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_the_name_of_the_model_chooses_the_adapter(http: httpx.Client, plain: Any, directories: Any) -> None:
    wanted = {"tiny": plain, **{name: merged(plain, directory) for name, directory in directories.items()}}
    found = {}
    for name, model in wanted.items():
        body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
        expected = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer["model"] == name
        found[name] = answer["choices"][0]["token_ids"]
        assert found[name] == expected[0, len(PROMPT) :].tolist()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        (choice,) = http.get(f"/v1/requests/{answer['id']}/explain").json()["choices"]
        told = [entry["why"] for entry in choice["entries"] if entry["what"] == "adapter"]
        assert told == ([] if name == "tiny" else [f"computed with the LoRA adapter {name}"])
    assert len(set(map(tuple, found.values()))) == 3
    for route, fields in (("chat/completions", {"max_tokens": 2}), ("responses", {"max_output_tokens": 2})):
        named = "input" if route == "responses" else "messages"
        body = {"model": "sql", named: [{"role": "user", "content": "hi"}], **fields}
        assert http.post(f"/v1/{route}", json=body).json()["model"] == "sql"
    assert http.post("/tokenize", json={"model": "chat", "prompt": "hi"}).status_code == 200


def test_adapters_are_listed_beside_the_model(http: httpx.Client, config: EngineConfig, directories: Any) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
        ("tiny", None, config.model),
        *((name, "tiny", str(directory)) for name, directory in directories.items()),
    ]
    assert http.get("/v1/models/sql").json() == cards[1]
    for answer in (
        http.get("/v1/models/other"),
        http.post("/v1/completions", json={"model": "other", "prompt": PROMPT}),
    ):
        assert answer.status_code == 404
        assert "this server has 'tiny', 'sql', 'chat'" in answer.json()["error"]["message"]


def test_a_pinned_prefix_belongs_to_its_adapter(http: httpx.Client) -> None:
    prompt = list(range(100, 140))
    pinned = http.post("/v1/prefixes", json={"model": "sql", "prompt": prompt})
    assert pinned.status_code == 200
    for name, cached in (("tiny", 0), ("chat", 0), ("sql", 32)):
        usage = http.post("/v1/completions", json={"model": name, "prompt": prompt, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert http.delete(f"/v1/prefixes/{pinned.json()['id']}").status_code == 200


def test_the_plan_counts_them_and_the_banner_shows_them(server: LiveServer, config: EngineConfig) -> None:
    plan = server.engine.plan
    assert plan is not None
    widths = {"qo": 2 * (64 + 64), "kv": 2 * (64 + 32), "mlp": 3 * (64 + 96)}
    assert plan.adapter_bytes == 2 * 4 * 3 * sum(widths.values()) * 4
    assert plan.fixed_parts["adapters"] == plan.adapter_bytes
    layers: Any = server.engine.executor._model._layers  # type: ignore[attr-defined]
    products = [each for layer in layers for each in (layer.project, layer.output, layer.mlp.up, layer.mlp.down)]
    assert sum(each.lora.a.nbytes + each.lora.b.nbytes for each in products) == plan.adapter_bytes
    row = dict(start_rows(server.engine, "tiny"))["adapters"]
    assert row.startswith("sql (rank 4), chat (rank 4): 87.0 KiB; ")
    with pytest.raises(ConfigError, match="sql is the name of the model; give the adapter another one"):
        build_engine(config, served_model_name="sql")
