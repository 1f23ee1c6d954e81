"""Replicas take what the ingress says about a request: token ids, its age, and the choice of the replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import ScriptedServer
from starlette.types import ASGIApp

from llmsched.cli.cluster.forwarded_request import ForwardedRequest, call_app
from llmsched.cli.cluster.routed_call import RoutedCall
from llmsched.cli.serve.app import build_app
from llmsched.cli.serve.middleware import RequestIds
from llmsched.cli.serve.request_context import IngressFacts
from llmsched.cli.timeline_words import decision_text
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.kv.prefix_tree import encode
from llmsched.engine.routing.rules import Choice, RoutedPrompt

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}
Ask = Callable[..., Awaitable[tuple[int, Any]]]


def with_replica(work: Callable[[Ask], Awaitable[None]]) -> None:
    """Run `work(ask)`, where `ask` sends a request with facts of an ingress to the application of a replica."""

    async def run() -> None:
        service = AsyncEngine(ScriptedServer().engine)
        service.start()
        app: ASGIApp = RequestIds(build_app(service, "tiny"))

        async def ask(path: str, fields: Any, facts: IngressFacts, headers: Any = ()) -> tuple[int, Any]:
            method = "GET" if fields is None else "POST"
            request = ForwardedRequest(
                method, path, b"", headers, b"" if fields is None else json.dumps(fields).encode()
            )
            messages = [each async for part in call_app(app, request, facts) for each in part]
            return messages[0]["status"], json.loads(b"".join(each.get("body", b"") for each in messages))

        try:
            await work(ask)
        finally:
            await service.stop(5)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_prompts_that_the_ingress_has_tokenised_are_not_tokenised_again() -> None:
    async def work(ask: Ask) -> None:
        for path, fields in BODIES.items():
            _, known = await ask(path, fields, IngressFacts([[7] * 33]))
            _, own = await ask(path, fields, IngressFacts())
            name = "input_tokens" if "input" in fields else "prompt_tokens"
            assert known["usage"][name] == 33
            assert own["usage"][name] < 33

    with_replica(work)


def test_known_prompts_are_cut_as_the_request_asks() -> None:
    async def work(ask: Ask) -> None:
        fields = BODIES["/v1/completions"] | {"truncate_prompt_tokens": 5}
        assert (await ask("/v1/completions", fields, IngressFacts([[7] * 33])))[1]["usage"]["prompt_tokens"] == 5

    with_replica(work)


@pytest.mark.parametrize("name", ["ingress", "prompts", "token_ids", "routing", "age"])
def test_a_client_cannot_say_what_only_the_ingress_may_say(name: str) -> None:
    async def work(ask: Ask) -> None:
        status, body = await ask("/v1/completions", BODIES["/v1/completions"] | {name: [[7] * 33]}, IngressFacts())
        assert (status, body["error"]["param"]) == (400, name)

    with_replica(work)


def test_a_deadline_counts_from_the_arrival_at_the_ingress() -> None:
    async def work(ask: Ask) -> None:
        fields = BODIES["/v1/completions"] | {"timeout": 5}
        assert (await ask("/v1/completions", fields, IngressFacts(age=1.0)))[0] == 200
        status, body = await ask("/v1/completions", fields, IngressFacts(age=6.0))
        assert (status, body["error"]["code"]) == (429, "deadline_too_early")

    with_replica(work)


def test_explain_names_the_replica_and_why_it_was_chosen() -> None:
    why = (
        "to a: cached prefix; expected TTFT 300 ms at a (200 ms queue, 100 ms prefill with 512 tokens cached, reported "
        "500 ms ago); 900 ms at b (300 ms queue, 600 ms prefill with 0 tokens cached, reported 1.50 s ago); refused by "
        "c before"
    )

    async def work(ask: Ask) -> None:
        call = RoutedCall(RoutedPrompt(600, (), 256), tried=("c",))
        chosen, other = Choice("a", "cached prefix", 512, 0.3, 0.1), Choice("b", "shortest wait", 0, 0.9, 0.6)
        call.choose(chosen, [other, chosen], {"a": 0.5, "b": 1.5})
        assert call.routing is not None
        path, fields = "/v1/completions", BODIES["/v1/completions"]
        _, answer = await ask(path, fields, IngressFacts(routing=call.routing), [(b"x-request-id", b"mine")])
        for name in ("mine", answer["id"]):
            _, explained = await ask(f"/v1/requests/{name}/explain", None, IngressFacts())
            first, *rest = explained["choices"][0]["entries"]
            assert (explained["replica"], first["what"]) == ("a", "routed")
            assert first["until_ms"] == 0.0
            assert rest[-1]["what"] == "finished"
            assert first["why"] == decision_text(first) == why

    with_replica(work)


def test_token_ids_travel_as_bytes() -> None:
    request = ForwardedRequest("POST", "/", b"", (), b"", token_ids=(encode([1, 70_000]), encode([2])))
    assert request.prompts() == [[1, 70_000], [2]]
    assert ForwardedRequest("GET", "/", b"", (), b"").prompts() is None
