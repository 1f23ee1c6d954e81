"""/v1/completions over a real socket, with outputs that the test dictates."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import httpx
import pytest
from scripted import EOS, ScriptedServer, logprob_of

from llmsched.engine import core
from llmsched.engine.scheduler import ledger

PATH = "/v1/completions"


def whole(http: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def chunks_of(http: httpx.Client, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ends without an error."""
    answer = http.post(PATH, json={"prompt": prompt, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, list[str | None]]:
    """Return the text and finish reasons of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices), [choice["finish_reason"] for choice in choices]


def both(http: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    """Return the only choice of a whole answer, after checking that a stream gives the same."""
    answer = whole(http, prompt, **fields)
    choice = answer["choices"][0]
    chunks = chunks_of(http, prompt, stream_options={"include_usage": True}, **fields)
    text, reasons = joined(chunks)
    assert text == choice["text"]
    assert reasons == [None] * (len(reasons) - 1) + [choice["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    return dict(choice) | {"usage": answer["usage"]}


def test_fields(http: httpx.Client) -> None:
    answer = whole(http, "hello", max_tokens=4)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == 8
    assert whole(http, "hello")["id"] != answer["id"]


def test_sixteen_tokens_unless_asked_otherwise(http: httpx.Client) -> None:
    assert whole(http, "hello")["choices"][0]["text"] == "abcdefghijklmnop"


def test_a_stream_has_one_id_and_one_end(http: httpx.Client) -> None:
    chunks = chunks_of(http, "hello", max_tokens=3)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    text, reasons = joined(chunks)
    assert text == "abc"
    assert reasons == [*[None] * (len(reasons) - 1), "length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_chunk_when_asked(http: httpx.Client) -> None:
    *chunks, last = chunks_of(http, "hello", max_tokens=3, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("last_too", [False, True])
def test_usage_in_every_chunk_when_asked(http: httpx.Client, last_too: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": last_too}
    chunks = chunks_of(http, ["hello", "x"], max_tokens=3, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks]
    letters = [len("".join(choice["text"] for choice in chunk["choices"])) for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages] == list(accumulate(letters))
    assert (usages[-1]["completion_tokens"], letters[-1] == 0) == (6, last_too)
    assert {usage["prompt_tokens"] for usage in usages} == {usages[0]["prompt_tokens"]}


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_exactly_as_many_tokens_as_asked(http: httpx.Client, count: int) -> None:
    choice = both(http, "hello", max_tokens=count)
    assert choice["text"] == "abc"[:count]
    assert choice["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == count


def test_usage_tells_what_the_prefix_cache_had(http: httpx.Client, server: ScriptedServer) -> None:
    prompt = server.ids("The quick brown fox jumps over the lazy dog. " * 8)
    whole(http, prompt)
    usage = whole(http, prompt)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 16 * 16
    assert http.post("/reset_prefix_cache").status_code == 200
    assert whole(http, prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# -- several prompts, several choices ---------------------------------------------------------------------------


def test_n_choices_count_their_tokens_and_the_prompt_once(http: httpx.Client) -> None:
    answer = whole(http, "hello", n=3, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == whole(http, "hello", max_tokens=1)["usage"]["prompt_tokens"]


def test_several_prompts_in_order(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("one", "first")
    server.force("two", "second")
    answer = whole(http, ["one", "two"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["first", "first", "second", "second"]
    chunks = chunks_of(http, ["one", "two"], n=2)
    assert [joined(chunks, index)[0] for index in range(4)] == ["first", "first", "second", "second"]


def test_token_ids_as_prompts_and_in_the_answer(http: httpx.Client, server: ScriptedServer) -> None:
    choice = whole(http, [[10, 11]], max_tokens=2, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [10, 11]
    assert choice["token_ids"] == server.script.alphabet[:2]


def test_one_refused_prompt_refuses_all_and_leaves_nothing(http: httpx.Client, server: ScriptedServer) -> None:
    answer = http.post(PATH, json={"prompt": [[10], [10**7]], "max_tokens": 400})
    assert answer.status_code == 400
    assert whole(http, "hello", max_tokens=1)
    assert server.engine.stats().num_running == server.engine.stats().num_waiting == 0


# -- text -------------------------------------------------------------------------------------------------------


def test_prompt_cut_inside_a_character_is_not_repeated(http: httpx.Client, server: ScriptedServer) -> None:
    lemon = server.ids("\U0001f34b")
    for cut in range(1, len(lemon)):
        prompt = [*server.ids("Good day "), *lemon[:cut]]
        server.force(prompt, [*lemon[cut:], *server.ids("!")])
        assert both(http, prompt)["text"] == "\ufffd" * (len(lemon) - cut) + "!"


def test_any_bytes_stream_to_the_decoded_text(http: httpx.Client, server: ScriptedServer) -> None:
    output = [
        *server.ids("X 天"),
        *server.ids("天")[:2],
        *server.ids("km"),
        *server.ids("한")[1:],
        *server.ids("é")[:1],
    ]
    server.force("bytes", output)
    assert both(http, "bytes", max_tokens=64)["text"] == server.tokenizer.decode(output)


def test_an_event_is_one_line_for_every_client(http: httpx.Client, server: ScriptedServer) -> None:
    text = "a\x85b\u2028c\u2029d\x0be\x1cf"
    server.force("lines", text)
    answer = http.post(PATH, json={"prompt": "lines", "stream": True, "max_tokens": 64})
    *lines, done = [line for line in answer.iter_lines() if line]  # which splits as str.splitlines does
    assert done == "data: [DONE]"
    assert joined([json.loads(line.removeprefix("data: ")) for line in lines])[0] == text


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_limit_inside_a_character(http: httpx.Client, server: ScriptedServer, count: int) -> None:
    output = server.ids("\U0001f34b\U0001f34b")
    server.force("lemons", output)
    choice = both(http, "lemons", max_tokens=count)
    assert choice["text"] == server.tokenizer.decode(output[:count])
    assert choice["usage"]["completion_tokens"] == count


def test_stop_id_inside_a_character(http: httpx.Client, server: ScriptedServer) -> None:
    lemon, stop = server.ids("\U0001f34b"), server.ids("Z")[0]
    server.force("half", [*lemon[:2], stop, *lemon])
    choice = both(http, "half", stop_token_ids=[stop])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("\ufffd", "stop", stop)
    assert choice["usage"]["completion_tokens"] == 3


def test_end_of_sequence_inside_a_character(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("half2", [*server.ids("\U0001f34b")[:2], EOS])
    assert both(http, "half2")["text"] == "\ufffd"


def test_replacement_character_of_the_model(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("real", [*server.ids("q\ufffd"), EOS])
    assert both(http, "real")["text"] == "q\ufffd"


@pytest.mark.parametrize(("output", "text", "reason"), [("QRSTUVW", "", "stop"), ("QRSTX", "QRSTX", "length")])
def test_start_of_a_stop_string_is_held(
    http: httpx.Client, server: ScriptedServer, output: str, text: str, reason: str
) -> None:
    server.force(output, output)
    choice = both(http, output, stop=["QRSTUV"], max_tokens=len(output))
    assert (choice["text"], choice["finish_reason"]) == (text, reason)


def test_stop_string_never_met(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("zzz", "abZZZ")
    choice = both(http, "zzz", stop=["ZZZZ"], max_tokens=5)
    assert (choice["text"], choice["finish_reason"]) == ("abZZZ", "length")


def test_text_held_for_a_stop_string_survives_a_stop_id(http: httpx.Client, server: ScriptedServer) -> None:
    stop = server.ids("!")[0]
    server.force("held", [*server.ids("abZZ"), stop])
    assert both(http, "held", stop=["ZZZZ"], stop_token_ids=[stop])["text"] == "abZZ"


def test_stop_strings_cut_exactly(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("greet", "Hello world")
    assert both(http, "greet", stop="lo w")["text"] == "Hel"
    choice = both(http, "greet", stop=["lo w"], include_stop_str_in_output=True)
    assert (choice["text"], choice["stop_reason"]) == ("Hello w", "lo w")


def test_special_stop_id_cuts_no_text(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("special", [*server.ids("complete"), 1, *server.ids("more")])
    choice = both(http, "special", stop_token_ids=[1])
    assert (choice["text"], choice["stop_reason"]) == ("complete", 1)


def test_a_stop_on_the_last_token_is_a_stop(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("five", [*server.ids("abcd"), EOS])
    assert both(http, "five", max_tokens=5)["finish_reason"] == "stop"
    assert both(http, "five", max_tokens=4)["finish_reason"] == "length"
    assert both(http, "hello", max_tokens=5, stop="e")["finish_reason"] == "stop"


def test_ignore_eos(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("eos", [EOS, EOS, EOS, EOS])
    assert both(http, "eos", max_tokens=4)["usage"]["completion_tokens"] == 1
    assert both(http, "eos", max_tokens=4, ignore_eos=True)["usage"]["completion_tokens"] == 4


def test_special_tokens_are_shown_on_demand(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("show", [*server.ids("a"), 1, *server.ids("b"), EOS])
    assert both(http, "show")["text"] == "ab"
    assert both(http, "show", skip_special_tokens=False, ignore_eos=True, max_tokens=3)["text"] == "a<|im_start|>b"


def test_an_id_without_text_goes_on(http: httpx.Client, server: ScriptedServer) -> None:
    server.force("padded", [*server.ids("a"), 318, *server.ids("b"), EOS])
    choice = both(http, "padded", logprobs=3)
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "", "b", ""]


# -- log-probabilities and echo ---------------------------------------------------------------------------------


def test_logprobs(http: httpx.Client, server: ScriptedServer) -> None:
    lists = both(http, "hello", max_tokens=3, logprobs=2)["logprobs"]
    ids = server.script.alphabet[:3]
    assert lists["tokens"] == ["a", "b", "c"]
    assert lists["token_logprobs"] == [logprob_of(i) for i in ids]
    assert lists["text_offset"] == [0, 1, 2]
    assert [len(top) for top in lists["top_logprobs"]] == [2, 2, 2]
    assert lists["top_logprobs"][0]["a"] == logprob_of(ids[0])


def test_logprobs_zero_tells_the_chosen_token_alone(http: httpx.Client) -> None:
    lists = whole(http, "hello", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert len(lists["token_logprobs"]) == 2
    assert [list(top) for top in lists["top_logprobs"]] == [["a"], ["b"]]


def test_tokens_join_to_the_text_whatever_the_bytes(http: httpx.Client, server: ScriptedServer) -> None:
    output = [*server.ids("天"), *server.ids("\U0001f34b")[:2], *server.ids("x"), *server.ids("é")[:1]]
    server.force("cut", output)
    choice = both(http, "cut", max_tokens=len(output), logprobs=1)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == server.tokenizer.decode(output)
    assert r"bytes:\xe5" in choice["logprobs"]["top_logprobs"][0]


def test_stream_and_whole_have_the_same_logprobs(http: httpx.Client) -> None:
    lists = whole(http, "abc def", max_tokens=4, logprobs=2, echo=True)["choices"][0]["logprobs"]
    chunks = chunks_of(http, "abc def", max_tokens=4, logprobs=2, echo=True)
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    assert {key: [value for part in parts for value in part[key]] for key in lists} == lists


@pytest.mark.parametrize("text", ["hello", " two  spaces\ttab\nline ", "天気 \U0001f34b", "a <|im_end|> inside"])
def test_echo(http: httpx.Client, text: str) -> None:
    assert both(http, text, max_tokens=2, echo=True)["text"] == text + "ab"


def test_echo_of_ids(http: httpx.Client, server: ScriptedServer) -> None:
    ids = [*server.ids("Good night "), *server.ids("\U0001f34b")[:2]]
    assert both(http, ids, max_tokens=2, echo=True)["text"] == "Good night \ufffdab"


def test_echo_with_logprobs(http: httpx.Client, server: ScriptedServer) -> None:
    prompt = server.ids("The quick brown fox jumps over the lazy dog. " * 5)
    for _ in range(2):  # the second time most of the prompt is in the prefix cache
        lists = both(http, prompt, max_tokens=1, echo=True, logprobs=1)["logprobs"]
        assert len(lists["tokens"]) == len(lists["token_logprobs"]) == len(prompt) + 1
        assert lists["token_logprobs"] == [None, *(logprob_of(i) for i in prompt[1:]), logprob_of(server.ids("a")[0])]
        assert lists["text_offset"] == [len("".join(lists["tokens"][:i])) for i in range(len(prompt) + 1)]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_of_the_prompt_alone(http: httpx.Client, server: ScriptedServer, n: int) -> None:
    answer = whole(http, "hello", max_tokens=0, echo=True, logprobs=1, n=n)
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(logprob_of(i) for i in server.ids("hello")[1:])]


def test_bos_is_not_echoed(make_server: Any) -> None:
    server = make_server(bos=True)
    with httpx.Client(base_url=server.url) as http:
        answer = whole(http, "hello", max_tokens=1, echo=True, logprobs=0)
        assert answer["usage"]["prompt_tokens"] == len(server.ids("hello")) + 1
        assert answer["choices"][0]["text"] == "helloa"
        assert answer["choices"][0]["logprobs"]["tokens"][0] == ""
        assert whole(http, "", max_tokens=1)["usage"]["prompt_tokens"] == 1  # a lone BOS is legal


def test_nothing_is_kept_of_requests_that_ended(
    make_server: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is kept for `explain` and for the slowest requests is kept of so many.
    monkeypatch.setattr(ledger, "MAX_REQUESTS", 8)
    monkeypatch.setattr(core, "MAX_SUMMARIES", 8)
    http = httpx.Client(base_url=make_server().url)

    def objects_after(count: int) -> int:
        for _ in range(count):
            whole(http, "a b c", max_tokens=1)
            assert http.post(PATH, json={"prompt": "a", "n": 0}).status_code == 400
        gc.collect()
        return len(gc.get_objects())

    counts = [objects_after(60) for _ in range(4)]
    growths = [after - before for before, after in pairwise(counts)]
    assert min(growths) < 60  # less than one object for each pair of requests; other threads add to some rounds
    http.close()


@pytest.mark.parametrize(("most", "kept"), [(3, "fgh"), (100, "abcdefgh"), (-1, "abcdefgh")])
def test_prompts_can_be_truncated(http: httpx.Client, server: ScriptedServer, most: int, kept: str) -> None:
    fields = {"truncate_prompt_tokens": most, "max_tokens": 2, "echo": True, "return_token_ids": True}
    choice = both(http, "abcdefgh", **fields)
    assert choice["prompt_token_ids"] == server.ids(kept)
    assert choice["text"] == f"{kept}ab"


def test_a_prompt_longer_than_the_context_can_be_truncated(http: httpx.Client, server: ScriptedServer) -> None:
    long = "abcdefgh" * 1000
    assert http.post(PATH, json={"prompt": long}).status_code == 400
    answer = whole(http, long, truncate_prompt_tokens=-1, max_tokens=12)
    assert answer["usage"]["prompt_tokens"] == 500
    chat = {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 7, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == 7
    refused = http.post(PATH, json={"prompt": long, "truncate_prompt_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_twenty_logprobs(http: httpx.Client) -> None:
    rows = whole(http, "x", logprobs=20, max_tokens=2)["choices"][0]["logprobs"]["top_logprobs"]
    assert [len(row) for row in rows] == [20, 20]
