"""Pinned prefixes and the report of the prefix cache over HTTP, on the real engine with a small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import LiveServer

from llmsched.cli.serve.prefix_routes import pin_prefixes, read_prefixes
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError

MESSAGES = [{"role": "system", "content": "You answer in rhymes, and only in rhymes, whatever the question may be."}]
QUESTION = {"role": "user", "content": "why?"}


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Engine:
    config = EngineConfig(
        model=str(tiny_model("llama")),
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=32,
        max_model_len=320,
        max_num_batched_tokens=64,
    )
    return build_engine(config)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    server = LiveServer(engine, name="tiny").start()
    yield server
    server.close()
    engine.check_integrity()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
        for pin in client.get("/v1/prefixes").json()["data"]:
            assert client.delete(f"/v1/prefixes/{pin['id']}").status_code == 200
        assert client.post("/reset_prefix_cache").status_code == 200


def complete(http: httpx.Client, prompt: Any, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    """Return the usage of a request, after all earlier requests have been computed."""
    named = "messages" if "chat" in path else "prompt"
    body = {named: prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["usage"])


def cached(http: httpx.Client, prompt: Any, path: str = "/v1/completions", **fields: Any) -> int:
    return int(complete(http, prompt, path, **fields)["prompt_tokens_details"]["cached_tokens"])


def flood(http: httpx.Client) -> None:
    """Evict all blocks that can be evicted, including those hit more than once."""
    for seed in range(8):
        complete(http, [10 + (seed * 37 + i * (seed + 3)) % 290 for i in range(300)])


def pin(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/prefixes", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_pinned_text_survives_a_flood(http: httpx.Client) -> None:
    text = "All that glitters is not gold. " * 3
    made = pin(http, prompt=text, ttl=None)
    assert made["object"] == "prefix"
    assert made["expires_in"] is None
    kept = made["tokens"]
    assert kept > 48
    complete(http, "something else")
    (listed,) = http.get("/v1/prefixes").json()["data"]
    assert listed == {**made, "written_tokens": kept}
    flood(http)
    assert cached(http, text + "Or is it?") == kept
    http.post("/reset_prefix_cache")
    assert cached(http, text + "Or is it?") == kept
    assert http.delete(f"/v1/prefixes/{made['id']}").json() == {"id": made["id"], "object": "prefix", "deleted": True}
    http.post("/reset_prefix_cache")
    assert cached(http, text + "Or is it?") == 0


def test_messages_are_pinned_as_chats_begin(http: httpx.Client) -> None:
    made = pin(http, messages=MESSAGES, ttl=3600)
    assert 3500 < made["expires_in"] <= 3600
    flood(http)
    asked = [*MESSAGES, QUESTION]
    assert cached(http, asked, "/v1/chat/completions") == made["tokens"]
    whole = pin(http, messages=asked)
    assert whole["tokens"] >= made["tokens"]


def test_prefixes_of_a_salt_are_for_that_salt(http: httpx.Client) -> None:
    ids = list(range(40, 88))
    made = pin(http, prompt=ids, cache_salt="a")
    assert made["tokens"] == 48
    assert "a" not in made.values()
    flood(http)
    assert cached(http, [*ids, 9], cache_salt="a") == 48
    assert cached(http, [*ids, 9], cache_salt="b") == 0


def test_prompts_are_found_only_by_those_who_have_their_salt(http: httpx.Client) -> None:
    salted, plain = [*range(40, 88), 9], [*range(140, 188), 9]
    assert cached(http, salted, cache_salt="a") == 0
    assert cached(http, salted, cache_salt="a") == 48
    assert cached(http, salted, cache_salt="b") == 0
    assert cached(http, salted) == 0
    assert cached(http, plain) == 0
    assert cached(http, plain, cache_salt="a") == 0
    assert cached(http, plain) == 48
    assert cached(http, plain, cache_salt="") == 48  # an empty salt is the same as no salt


def test_the_cap_is_told(http: httpx.Client) -> None:
    pin(http, prompt=list(range(40, 40 + 96)))
    error = refused(http, prompt=[5] * 48)
    assert "takes 3 more blocks of 16; 6 are pinned, and at most 8 may be" in error["message"]
    assert error["param"] == "prompt"
    assert http.get("/v1/cache").json()["blocks"]["max_pinned"] == 8


def refused(http: httpx.Client, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/prefixes", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    return dict(answer.json()["error"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "too short"}, "prompt"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**7] * 20}, "prompt"),
        ({"prompt": [7] * 321}, "prompt"),
        ({"prompt": "x" * 10_000}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "hi"}] * 200}, "messages"),
        ({"prompt": [7] * 20, "ttl": 0}, "ttl"),
        ({"prompt": [7] * 20, "ttl": -1.5}, "ttl"),
        ({"prompt": [7] * 20, "ttl": "1h"}, "ttl"),
        ({"prompt": [7] * 20, "time": 1}, "time"),
    ],
)
def test_what_is_no_prefix_is_refused_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refused(http, **body)["param"] == param
    assert http.get("/v1/prefixes").json() == {"object": "list", "data": []}


def test_unknown_models_and_prefixes_are_not_found(http: httpx.Client) -> None:
    assert refused(http, 404, prompt=[7] * 20, model="other")["code"] == "model_not_found"
    answer = http.delete("/v1/prefixes/pin-999")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prefix_id", "prefix_not_found")
    assert "there is no pin 'pin-999'" in error["message"]


def test_the_cache_tells_what_it_did(http: httpx.Client) -> None:
    before = http.get("/v1/cache").json()
    ids = list(range(100, 156))
    complete(http, ids)
    complete(http, ids)
    complete(http, ids, cache_salt="other")
    after = http.get("/v1/cache").json()
    assert after["prompt_tokens"]["queried"] - before["prompt_tokens"]["queried"] == 3 * 56
    assert after["prompt_tokens"]["hit"] - before["prompt_tokens"]["hit"] == 48, "whole blocks stay when a request ends"
    assert 0 < after["prompt_tokens"]["hit_rate"] < 1
    new = {kind: count - before["requests"][kind] for kind, count in after["requests"].items()}
    assert new == {**dict.fromkeys(new, 0), "hit": 1, "cold": 2}, "other salts are nobody's business"
    blocks = after["blocks"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == blocks["total"] == 32
    assert after["prompt_change"] is None


def test_changing_prompts_are_told_but_not_what_clients_wrote(http: httpx.Client, engine: Engine) -> None:
    for number in range(50):
        complete(http, [*range(40, 70), 100 + number, *range(60, 250)], max_tokens=1)
    change = http.get("/v1/cache").json()["prompt_change"]
    assert change["position"] == 30
    assert change["count"] >= 45
    assert change["examples"] is None
    engine.prefixes.changes.quote_prompts = True
    change = http.get("/v1/cache").json()["prompt_change"]
    assert [set(example) for example in change["examples"]] == [{"before", "after"}] * 2
    for number in range(50):
        complete(http, [*range(40, 70), 100 + number, *range(60, 250)], max_tokens=1, cache_salt="tenant")
    assert http.get("/v1/cache").json()["prompt_change"]["examples"] is None


def test_files_are_pinned_at_the_start(engine: Engine, http: httpx.Client, tmp_path: Any) -> None:
    text, chat = tmp_path / "prefix.txt", tmp_path / "chat.json"
    text.write_text("All that glitters is not gold. ")
    chat.write_text(json.dumps({"messages": MESSAGES, "ttl": 60}))
    files = read_prefixes([text, chat])
    pin_prefixes(engine, files[:1])  # the server is idle: no other thread steps the engine now
    assert [state["expires_in"] for state in http.get("/v1/prefixes").json()["data"]] == [None]
    pin_prefixes(engine, files[1:])
    assert len(http.get("/v1/prefixes").json()["data"]) == 2
    assert cached(http, [*MESSAGES, QUESTION], "/v1/chat/completions") >= 16


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "gone.txt: no such file"),
        ("latin.txt", b"caf\xe9", "is not UTF-8 text"),
        ("bad.json", b"{", "bad.json: the body is not valid JSON"),
        ("odd.json", b'{"prompt": [1], "size": 3}', "odd.json: unknown field 'size'"),
        ("both.json", b"{}", "either as prompt or as messages"),
    ],
)
def test_files_that_cannot_be_read_are_told(tmp_path: Any, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prefixes([tmp_path / name])


def test_a_file_that_cannot_be_pinned_is_named(engine: Engine, tmp_path: Any) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"pin_prefix: .*short.txt: the prefix has \d tokens"):
        pin_prefixes(engine, read_prefixes([tmp_path / "short.txt"]))


def test_a_file_names_a_model_that_is_served(engine: Engine, tmp_path: Any) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"model": "other", "prompt": list(range(40, 70))}))
    files = read_prefixes([tmp_path / "other.json"])
    with pytest.raises(ConfigError, match=r"pin_prefix: .*other.json: model 'other' is not served here; name one of "):
        pin_prefixes(engine, files)
    pin_prefixes(engine, files, "other")
    assert len(engine.prefixes.pins()) == 1
