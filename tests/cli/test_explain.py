"""`llmsched explain` against a live server, and the class header whose effects it shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from command_line import CommandLine
from fakes import Harness, make_request, repeating_token, tokens
from scripted import ScriptedServer

from llmsched.cli.serve.access import Access
from llmsched.cli.serve.explain_route import LatestAnswers
from llmsched.cli.timeline import timeline_body
from llmsched.cli.timeline_words import _WAITED_FOR, _WORDS, decision_text, summary
from llmsched.engine.core import Timeline
from llmsched.engine.scheduler.ledger import MAX_REQUESTS
from llmsched.engine.scheduler.waiting_queue import WaitReason

pytestmark = pytest.mark.usefixtures("client_key")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(access=Access("k"), max_num_seqs=1).start()
    yield server
    server.close()


@pytest.fixture
def http(server: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20, headers={"Authorization": "Bearer k"}) as client:
        yield client


def complete(http: httpx.Client, prompt: str, class_name: str | None = None, **fields: Any) -> str:
    """Send a request; return its id when it has been served."""
    headers = {} if class_name is None else {"x-llmsched-class": class_name}
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_a_table_shows_the_decisions(command: CommandLine, http: httpx.Client, server: ScriptedServer) -> None:
    name = complete(http, "a b c" * 40)
    outcome = command("explain", name, "--url", server.url)
    assert outcome.code == 0
    title, columns, *rows = outcome.out.splitlines()
    assert title.startswith(f"{name}: waited ")
    assert "ended (length) after " in title
    assert "with 4 tokens" in title
    assert columns.split() == ["ms", "after", "arrival", "decision", "why"]
    decisions = ["queued", "admitted", "computed", "finished"]
    assert [next(d for d in decisions if d in row) for row in rows] == decisions
    assert "no cached prompt matches more of it" in rows[1]
    assert "up to token " in rows[2]
    assert "_" not in "".join(rows)


def test_json_is_the_servers_answer(command: CommandLine, http: httpx.Client, server: ScriptedServer) -> None:
    name = complete(http, "x y", n=2)
    outcome = command("explain", name, "--url", f"{server.url}/", "--json")
    assert outcome.code == 0
    assert outcome.json == http.get(f"/v1/requests/{name}/explain").json()
    assert [choice["index"] for choice in outcome.json["choices"]] == [0, 1]
    table = command("explain", name, "--url", server.url).out
    assert f"{name}, choice 0: " in table
    assert f"{name}, choice 1: " in table


def test_all_prompts_of_a_request_are_under_the_id_of_its_answer(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["a", "b c d", "e f"], "n": 2, "max_tokens": 4}).json()
    body = http.get(f"/v1/requests/{answer['id']}/explain").json()
    assert body["id"] == answer["id"]
    assert [choice["index"] for choice in body["choices"]] == [choice["index"] for choice in answer["choices"]]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    lengths = [next(e for e in c["entries"] if e["what"] == "admitted")["details"]["tokens"] for c in body["choices"]]
    assert lengths[0] == lengths[1] < lengths[4] == lengths[5] < lengths[2] == lengths[3]


@pytest.mark.parametrize("given", [None, "trace/7:a"])
def test_a_request_is_also_known_by_its_x_request_id(
    command: CommandLine, http: httpx.Client, server: ScriptedServer, given: str | None
) -> None:
    complete(http, "someone else's")
    headers = {} if given is None else {"X-Request-Id": given}
    for prompt in ("first", "the latest wins"):
        answer = http.post("/v1/completions", json={"prompt": [prompt, "b"], "max_tokens": 2}, headers=headers)
    outcome = command("explain", answer.headers["x-request-id"], "--url", server.url, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json == http.get(f"/v1/requests/{answer.json()['id']}/explain").json()
    assert outcome.json["id"] == answer.json()["id"]


def test_a_clients_own_id_hides_no_other_answer(http: httpx.Client) -> None:
    name = complete(http, "mine")
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": name})
    assert answer.json()["id"] != name
    assert http.get(f"/v1/requests/{name}/explain").json()["id"] == name


def test_only_the_latest_ids_are_kept() -> None:
    ids = LatestAnswers[str]()
    for number in range(MAX_REQUESTS + 1):
        ids.add(f"r{number}", f"cmpl-{number}")
    assert "r0" not in ids
    assert ids["r1"] == "cmpl-1"


@pytest.mark.parametrize("name", ["cmpl-unknown", "a/b?c=d", "%2e%2e"])
def test_an_unknown_request_ends_with_one_line(command: CommandLine, server: ScriptedServer, name: str) -> None:
    error = command.refused("explain", name, "--url", server.url)
    assert "is unknown" in error or "Not Found" in error


def test_a_wrong_key_or_server_ends_with_one_line(command: CommandLine, server: ScriptedServer) -> None:
    assert "API key is missing or wrong" in command.refused("explain", "x", "--url", server.url, "--api-key", "no")
    for url in ("http://127.0.0.1:9", "nonsense"):
        assert url in command.refused("explain", "x", "--url", url)


def test_interactive_requests_go_before_batch_ones(http: httpx.Client, server: ScriptedServer) -> None:
    server.script.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(complete, http, "first of all", max_tokens=1)
        wait_for(server, 1)
        batch = pool.submit(complete, http, "can wait", "batch")
        wait_for(server, 2)
        chat = pool.submit(complete, http, "cannot wait", "interactive")
        wait_for(server, 3)
        server.script.gate.set()
        names = [future.result() for future in (running, batch, chat)]
    order = sorted(names, key=lambda name: server.engine.explain(name)[0].entries[-1].time)
    assert order == [names[0], names[2], names[1]]


def wait_for(server: ScriptedServer, count: int) -> None:
    """Wait until `count` requests have arrived; the engine's thread waits at the gate."""
    while len(server.service._streams) < count:
        time.sleep(0.005)


def test_priority_in_the_body_goes_before_the_class(http: httpx.Client) -> None:
    complete(http, "urgent", "batch", priority=-3)
    answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"x-llmsched-class": "urgent"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-llmsched-class"
    assert "'urgent'; allowed is interactive or batch" in error["message"]


MISSED = {"running": 0, "cached_tokens": 0, "tokens": 9}
LOST = MISSED | {"prefix": "evicted", "known_tokens": 0}


@pytest.mark.parametrize(
    ("what", "details", "words"),
    [
        ("queued", {"ahead": 3, "running": 2}, "3 waiting, 2 running"),
        ("held back", {"reason": "place kept for r1/0"}, "place kept for r1/0"),
        (
            *("passed", {"by": "r2/0", "by_priority": 1, "times": 2}),
            "r2/0 (priority 1) goes first; overtaken twice so far",
        ),
        ("waits for a prefix", {"tokens": 64}, "another request is computing 64 tokens that both need"),
        (
            "does not fit",
            {"reason": "now", "missing_blocks": 3, "free_blocks": 6, "headroom_blocks": 2, "running": 7},
            "3 blocks short with a headroom of 2; 6 available, 7 running",
        ),
        (
            "admitted",
            {"running": 1, "cached_tokens": 32, "tokens": 50, "prefix": "diverged", "known_tokens": 35},
            "32 of 50 tokens cached, 1 running; same as cached text up to token 35, then different",
        ),
        (
            *("admitted", {"running": 0, "cached_tokens": 95, "tokens": 96, "restored_blocks": 6}),
            "95 of 96 tokens cached, 0 running; 6 blocks copied back from host memory",
        ),
        ("admitted", LOST, "0 of 9 tokens cached, 0 running; the rest was evicted"),  # by windows only: no age
        (
            *("admitted", LOST | {"evicted_s_ago": 2.5}),
            "0 of 9 tokens cached, 0 running; the rest was evicted 2.50 s ago",
        ),
        (
            *("admitted", MISSED | {"waited_for_memory_ms": 1250.0, "waited_for_slot_ms": 20.0}),
            "waited 20.0 ms for room among the running requests (max_num_seqs), 1.25 s for memory; "
            "0 of 9 tokens cached, 0 running",
        ),
        (
            "preempted",
            {"reason": "memory", "how": "recompute", "lost_tokens": 96, "cost_ms": 12.0, "free_blocks": 0},
            "memory ran out; 96 tokens to recompute, about 12.0 ms",
        ),
        (
            "preempted",
            {"reason": "class", "how": "swap", "swapped_blocks": 6, "cost_ms": 1.25, "free_blocks": 0, "running": 1},
            "a request of higher priority needed its room; 6 blocks swapped to host memory, about 1.25 ms out and back",
        ),
        ("computed", {"up_to": 50, "of": 50}, "up to token 50 of 50"),
        (
            "computed",
            {"up_to": 50, "of": 256, "reason": "itl", "step_ms": 228.0, "decoding": 8},
            "up to token 50 of 256; each step is kept within 228 ms for the tokens of 8 decoding requests",
        ),
        ("adapter", {"name": "sql"}, "computed with the LoRA adapter sql"),
        ("finished", {"reason": "stop", "output_tokens": 9}, "stop, 9 tokens"),
        ("something new", {"odd_number": 3}, "odd number 3"),
    ],
)
def test_each_decision_has_its_words(what: str, details: dict[str, Any], words: str) -> None:
    entry = {"what": what, "details": details, "count": 1}
    assert decision_text(entry) == words
    assert decision_text({**entry, "count": 4}) == f"{words} (4 times)"


def test_every_reason_to_wait_has_words() -> None:
    assert set(_WAITED_FOR) == set(WaitReason)


def test_every_decision_of_the_scheduler_has_words() -> None:
    """Run every kind of decision, with its real details."""
    thrash = Harness(10, output_prediction="none", swap_blocks=20)
    thrash.executor.per_swapped_block = 1e-9
    for i in range(3):
        thrash.add(make_request(f"t{i}", tokens(48, seed=i), 64, arrival=float(i)))
    thrash.run()
    classes = Harness(64, max_num_seqs=1)
    classes.add(make_request("low", tokens(40), 40, priority=1))
    classes.step()
    for i in range(2):
        classes.add(make_request(f"high{i}", tokens(40, seed=1), 4, arrival=1.0 + i))
    classes.run()
    passing = Harness(40, budget=256, headroom=0.0, max_passes=2, max_num_seqs=8, output_prediction="none")
    passing.add(make_request("running", tokens(300), 80))
    passing.step()
    passing.add(make_request("head", tokens(500, seed=1), 4, arrival=1.0))
    for i in range(4):
        passing.add(make_request(f"twin{i}", tokens(100, seed=2), 3, arrival=2.0 + i))
    passing.run()
    peak = Harness(20, headroom=0.0, output_prediction="max_tokens")
    for i in range(2):
        peak.add(make_request(f"p{i}", tokens(48, seed=i), 150, arrival=float(i)))
    peak.run()
    drafting = Harness(20, speculative="ngram")
    drafting.executor.model = repeating_token
    drafting.add(make_request("loop", tokens(7) * 3, 20))
    drafting.run()
    noted: dict[str, set[str]] = {}
    for harness in (thrash, classes, passing, peak, drafting):
        ledger = harness.scheduler.ledger
        for name in ledger._ended:
            for entry in timeline_body(Timeline(0, 0.0, ledger.entries(name)))["entries"]:
                words = _WORDS[entry["what"]](entry["details"])
                noted.setdefault(entry["what"], set()).add(words)
    others = {"longest stall", "failed", "complete", "adapter", "routed"}  # noted by client, engine and ingress
    assert set(noted) == set(_WORDS) - others
    assert "twin0 (priority 0) goes first; overtaken once so far" in noted["passed"]
    assert any("blocks short at the running requests' predicted peak" in words for words in noted["does not fit"])
    assert any("blocks swapped to host memory" in words for words in noted["preempted"])
    assert any("a request of higher priority needed its room" in words for words in noted["preempted"])


def test_summary_of_a_request_that_still_waits() -> None:
    entry = {"what": "queued", "at_ms": 0.0, "until_ms": 0.0, "count": 1, "details": {}}
    assert summary([entry, {**entry, "what": "does not fit", "until_ms": 1500.0}]) == (
        "not admitted after 1.50 s, has not ended"
    )


@pytest.mark.parametrize("flag", [("--url", "http://elsewhere"), ("--api-key", "k")])
def test_a_file_needs_no_server(command: CommandLine, flag: tuple[str, str]) -> None:
    outcome = command("explain", "0", "--file", "run.jsonl", *flag)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{flag[0]} and --file do not go together" in outcome.err
