"""Prompts of a trace as a server and an engine in this process receive them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from fake_server import FakeServer, steady
from measured_load import measure_load
from virtual_time import run_virtual

from llmsched.cli.load.prompts import COMMON_IDS, WordEncoder
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.trace import Content, Trace, TraceRequest

CHAT = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hello you"})
TEXTS = Trace(
    "log",
    "log",
    (
        TraceRequest(1, 0.0, output_len=3, content=Content.of_messages(CHAT)),
        TraceRequest(2, 2.5, output_len=3, content=Content("hello")),
    ),
    timed=True,
)


def send(trace: Trace, ids: range | None, owner: str = "", seed: int = 0, **options: Any) -> FakeServer:
    server = FakeServer(lambda number: steady(3, first=0.1, gap=0.1), {"data": [{"id": "m", "owned_by": owner}]})
    load = TraceLoad(trace=trace, prompt_seed=seed)
    figures = run_virtual(measure_load("http://fake", load, transport=server, ids=ids, **options))
    assert (figures.requests.completed, figures.rates.asked) == (2, 0.4)
    return server


def test_messages_go_to_the_chat_endpoint_as_they_are() -> None:
    server = send(TEXTS, None, endpoint="chat")
    assert [body["messages"] for body in server.bodies] == [list(CHAT), [{"role": "user", "content": "hello"}]]
    assert [body["max_tokens"] for body in server.bodies] == [3, 3]
    assert server.times == [0, 2.5]


def test_completions_get_their_text() -> None:
    assert [body["prompt"] for body in send(TEXTS, COMMON_IDS).bodies] == ["be kind\n\nhello you", "hello"]


def test_completions_get_token_ids_where_the_tokenizer_is_known() -> None:
    ids = range(7)
    bodies = send(TEXTS, ids, encode=WordEncoder(ids)).bodies
    assert [body["prompt"] for body in bodies] == [
        WordEncoder(ids).prompt(Content("be kind hello you")),
        WordEncoder(ids).prompt(Content("hello")),
    ]


def test_prompts_of_which_a_trace_has_only_the_length_are_token_ids() -> None:
    requests = tuple(TraceRequest(line, 2.5 * line, 600, 3, hash_ids=(0, line)) for line in (0, 1))
    one, two = (body["prompt"] for body in send(Trace("m", "mooncake", requests, timed=True), COMMON_IDS).bodies)
    assert len(one) == len(two) == 600
    assert one[:512] == two[:512] != one[88:]


@pytest.mark.parametrize("owner", ["llmsched", "vllm", "sglang"])
def test_texts_have_a_salt_of_the_run_where_the_server_takes_one(owner: str) -> None:
    salts = [{body["cache_salt"] for body in send(TEXTS, COMMON_IDS, owner=owner, seed=seed).bodies} for seed in (5, 6)]
    assert [len(salt) for salt in salts] == [1, 1]
    assert salts[0] != salts[1]
    lengths = Trace("m", "mooncake", (TraceRequest(1, 0.0, 6, 3), TraceRequest(2, 2.5, 6, 3)), timed=True)
    for server in (
        send(TEXTS, COMMON_IDS, seed=5),
        send(TEXTS, COMMON_IDS, owner=owner),
        send(lengths, COMMON_IDS, owner=owner, seed=5),
    ):
        assert not any("cache_salt" in body for body in server.bodies)


def test_a_chat_log_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Prompts go through the model's tokenizer, so the second hits the first one's cache."""
    log = tmp_path / "log.jsonl"
    same = {"prompt": " ".join(f"word{number}" for number in range(12)), "max_tokens": 4}
    log.write_text("\n".join(json.dumps({**same, "timestamp": f"2024-01-01T00:00:0{at}Z"}) for at in (3, 1)))
    outcome = CommandLine(monkeypatch, capsys)(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu"),
        *("--trace", str(log), "--speedup", "4", "--json"),
    )
    assert outcome.code == 0
    report = outcome.json
    assert (report["completed"], report["output_tokens"], report["asked_rate"]) == (2, 8, 2)
    assert report["input_tokens"] > 24
    assert report["prefix_hit_rate"] == pytest.approx(0.5, abs=0.1)
    assert report["workload"]["trace"] == "log.jsonl"
    assert report["workload"]["load"] == "over 0.5 s at the trace's own times, 4 times as fast"
