"""A trace as a load: when its requests are sent, what their prompts share, how long they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llmsched.cli.load.prompts import COMMON_IDS, WordEncoder
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.trace import Content, Trace, TraceRequest
from llmsched.engine.errors import LlmschedError

AT = (0.0, 1.0, 1.0, 4.0)
LENGTHS = ((600, 5), (2000, 7), (0, 0), (10, 3))


def trace(timed: bool = True, **fields: Any) -> Trace:
    requests = tuple(
        TraceRequest(line, offset if timed else 0.0, *lengths, **fields)
        for line, (offset, lengths) in enumerate(zip(AT, LENGTHS, strict=True), start=2)
    )
    return Trace("t.csv", "azure", requests, timed)


def texts(*contents: Content, **fields: Any) -> Trace:
    requests = tuple(TraceRequest(line, 0.0, content=content, **fields) for line, content in enumerate(contents))
    return Trace("t.jsonl", "log", requests, timed=False)


def load(timed: bool = True, **settings: Any) -> TraceLoad:
    return TraceLoad(trace=trace(timed), **settings)


def offsets(of: TraceLoad) -> list[float]:
    return [request.offset for request in of.plan(COMMON_IDS)]


def blocks(*hash_ids: int, length: int | None = None, seed: int = 0) -> list[int]:
    """Return the prompt that consists of blocks."""
    request = TraceRequest(1, 0.0, length or 512 * len(hash_ids), 1, hash_ids)
    made = TraceLoad(trace=Trace("m", "mooncake", (request,), timed=True), seed=seed)
    return made.plan(COMMON_IDS)[0].prompt.token_ids or []


def test_replay_at_its_own_times() -> None:
    assert offsets(load()) == [0, 1, 1, 4]
    assert offsets(load(speedup=2.0)) == [0, 0.5, 0.5, 2]
    assert offsets(load(duration=1.5)) == [0, 1, 1]
    assert offsets(load(duration=1.0)) == [0]
    assert offsets(load(duration=1.0, speedup=2.0)) == [0, 0.5, 0.5]
    assert not load(max_concurrency=2).closed


def test_a_rate_scales_the_times_and_keeps_their_pattern() -> None:
    """Three gaps in four seconds are 0.75 requests/s."""
    assert load().asked_rate == 0.75
    assert offsets(load(request_rate=3.0)) == [0, 0.25, 0.25, 1]
    assert load(request_rate=3.0).asked_rate == 3
    assert offsets(load(speedup=7.0).at_rate(1.5)) == [0, 0.5, 0.5, 2]


def test_times_may_be_replaced() -> None:
    assert offsets(load(request_rate=float("inf"))) == [0] * 4
    assert offsets(load(ignore_timestamps=True, request_rate=2.0, arrivals="constant")) == [0, 0.5, 1, 1.5]
    assert offsets(load(timed=False, request_rate=2.0, arrivals="constant", duration=0.9)) == [0, 0.5]
    closed = load(ignore_timestamps=True, max_concurrency=2, duration=9.0)
    assert (closed.closed, closed.stop_after, closed.num_requests) == (True, 9.0, 4)


def test_the_load_in_words() -> None:
    assert load().describe() == "over 4 s at the trace's own times"
    assert load(speedup=2, duration=3, max_concurrency=4).describe() == (
        "over 2 s at the trace's own times, 2 times as fast for 3 s, at most 4 at a time"
    )
    assert load(request_rate=3).describe() == "over 1 s at the trace's own times, scaled to 3 requests/s"
    assert load(ignore_timestamps=True, request_rate=3).describe() == "poisson arrivals at 3 requests/s"
    assert load().describe_requests() == "4 requests of t.csv (mean 652 tokens in, 4 out, 2 of length 0 sent as 1)"
    assert load(max_input_len=700).describe_requests().endswith("2 of length 0 sent as 1, 1 cut)")


def test_lengths_are_those_of_the_trace() -> None:
    planned = load().plan(COMMON_IDS)
    assert [(len(r.prompt.token_ids or ()), r.output_len) for r in planned] == [(600, 5), (2000, 7), (1, 1), (10, 3)]
    assert load().longest_input == 2000
    assert len({tuple((request.prompt.token_ids or [])[:10]) for request in planned}) == 4


def test_nothing_is_cut_unless_asked_for() -> None:
    planned = load(max_input_len=700, max_output_len=4).plan(COMMON_IDS)
    assert [(len(r.prompt.token_ids or ()), r.output_len) for r in planned] == [(600, 4), (700, 4), (1, 1), (10, 3)]
    assert planned[1].prompt.token_ids == (load().plan(COMMON_IDS)[1].prompt.token_ids or [])[:700]


def test_equal_blocks_are_equal_tokens() -> None:
    """Mooncake: two prompts share exactly the blocks that both name."""
    one, two = blocks(0, 1, 2), blocks(0, 1, 7, 8, length=1800)
    assert one[:1024] == two[:1024]
    assert sum(a == b for a, b in itertools.islice(zip(one, two, strict=False), 1024, None)) < 10
    assert (len(one), len(two)) == (1536, 1800)
    assert blocks(5) != blocks(6)
    assert blocks(5) != blocks(5, seed=1)
    assert len(blocks(5, length=100)) == 100
    assert blocks(5, length=100) == blocks(5)[:100]


def test_blocks_of_another_size() -> None:
    requests = tuple(TraceRequest(line, 0.0, 40, 1, (7, line, 9)) for line in range(2))
    one, two = (r.prompt.token_ids or [] for r in TraceLoad(trace=Trace("q", "m", requests, True, 16)).plan(COMMON_IDS))
    assert len(one) == 40
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one[32:] == two[32:]


def test_words_for_servers_share_prefixes_as_well() -> None:
    planned = TraceLoad(trace=trace(hash_ids=(3, 4, 5, 6))).plan(None)
    first, second = (planned[at].prompt.text or "" for at in (0, 1))
    assert first.split()[:512] == second.split()[:512]
    assert len(second.split()) == 2000


def test_the_same_seed_gives_the_same_load_and_another_other_prompts() -> None:
    assert load(seed=4).plan(COMMON_IDS) == load(seed=4).plan(COMMON_IDS)
    assert load().with_seed(1).plan(COMMON_IDS)[0].prompt.token_ids != load().plan(COMMON_IDS)[0].prompt.token_ids
    assert offsets(load().with_seed(1)) == offsets(load())


def test_texts_stay_texts_for_a_server() -> None:
    messages = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "one two"})
    made = TraceLoad(trace=texts(Content.of_messages(messages), Content("a b"), output_len=3), max_concurrency=1)
    chat, plain = (request.prompt for request in made.plan(COMMON_IDS))
    assert (chat.token_ids, chat.text, chat.messages) == (None, "be kind\n\none two", list(messages))
    assert (plain.text, plain.messages) == ("a b", [{"role": "user", "content": "a b"}])
    assert "mean 3 words in, 3 out" in made.describe_requests()


def test_texts_stay_texts_without_ids_but_answers_are_counted() -> None:
    class Doubling(WordEncoder):
        def count(self, text: str) -> int:
            return 2 * super().count(text)

    made = TraceLoad(trace=texts(Content("a b"), answer="x y z"), max_concurrency=1)
    (request,) = made.plan(None, Doubling(range(9)))
    assert (request.prompt.text, request.output_len) == ("a b", 6)


def test_texts_become_tokens_for_targets_that_take_tokens() -> None:
    made = TraceLoad(
        trace=texts(Content("a b a"), answer="x y z"), max_concurrency=1, max_input_len=2, max_output_len=2
    )
    (request,) = made.plan(COMMON_IDS, WordEncoder(range(100)))
    ids = WordEncoder(range(100)).prompt(Content("a b a"))
    assert ids[0] == ids[2] != ids[1]
    assert (request.prompt.token_ids, request.output_len) == (ids[:2], 2)


def test_answers_without_a_stated_length() -> None:
    made = texts(Content("a b"), Content("c"))
    with pytest.raises(LlmschedError, match=r"t.jsonl, line 0: neither an answer nor .*; give output_len for"):
        TraceLoad(trace=made, max_concurrency=1).plan(COMMON_IDS)
    drawn = parse_lengths("5..9", "output_len")
    planned = TraceLoad(trace=made, max_concurrency=1, output_len=drawn).plan(COMMON_IDS)
    assert all(5 <= request.output_len <= 9 for request in planned)
    assert [r.output_len for r in TraceLoad(trace=made, max_concurrency=1, output_len=4).plan(None)] == [4, 4]


def test_warm_up_has_the_median_lengths() -> None:
    warm = load().head(3, seed=9, output_len=2)
    assert [(len(r.prompt.token_ids or ()), r.output_len) for r in warm.plan(COMMON_IDS)] == [(305, 2)] * 3
    assert load().one_by_one(2, seed=1).describe() == "closed loop, 1 at a time"


def test_the_prompt_seed_changes_tokens_only() -> None:
    """Blocks, own prompts and warm-up have new tokens; lengths, times and the fingerprint stay."""
    requests = tuple(TraceRequest(line, float(line), 600, 4, hash_ids) for line, hash_ids in ((0, (3, 4)), (1, ())))
    one, other = (
        TraceLoad(trace=Trace("m", "mooncake", requests, timed=True), prompt_seed=seed, output_len=4) for seed in (1, 2)
    )
    for of_one, of_other in ((one, other), (one.head(2, seed=7), other.head(2, seed=7))):
        for a, b in zip(of_one.plan(COMMON_IDS), of_other.plan(COMMON_IDS), strict=True):
            assert (a.offset, a.output_len, a.prompt.length) == (b.offset, b.output_len, b.prompt.length)
            assert (a.prompt.token_ids or [])[:16] != (b.prompt.token_ids or [])[:16]
    facts, others = one.parameters(), other.parameters()
    assert (facts["prompt_seed"], facts["fingerprint"]) == (1, others["fingerprint"])


def test_parameters_name_the_trace_and_a_fingerprint() -> None:
    facts = load(speedup=2.0).parameters()
    assert (facts["trace"], facts["num_prompts"], facts["speedup"], facts["zero_lengths"]) == ("t.csv", 4, 2.0, 2)
    assert (facts["mean_input_len"], facts["mean_output_len"]) == (652.5, 3.75)
    assert facts["fingerprint"] != load().parameters()["fingerprint"]
    assert facts["trace_sha256"] == load().parameters()["trace_sha256"]
    assert facts["trace_sha256"] != load(duration=1.5).parameters()["trace_sha256"]


def test_settings_without_effect_are_not_reported() -> None:
    replayed, drawn = load().parameters(), load(ignore_timestamps=True, request_rate=1.0).parameters()
    assert (replayed["arrivals"], replayed["burstiness"], replayed["day_period"]) == ("trace", None, None)
    assert (drawn["arrivals"], drawn["burstiness"], drawn["day_period"]) == ("poisson", 1.0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speedup": 0.0}, "speedup: 0"),
        ({"speedup": float("nan")}, "speedup: nan"),
        ({"speedup": 2.0, "request_rate": 1.0}, "give one of them"),
        ({"arrivals": "constant"}, "arrivals: t.csv has recorded times"),
        ({"request_rate": 3.0, "burstiness": 0.5}, "burstiness: t.csv has recorded times"),
        ({"max_input_len": 0}, "max_input_len: 0"),
        ({"duration": 0.0}, "duration: 0"),
        ({"timed": False}, "no timestamps of t.csv are used"),
        ({"ignore_timestamps": True}, "no timestamps of t.csv are used"),
        ({"timed": False, "speedup": 2.0, "max_concurrency": 1}, "speedup: 2 has no effect: no timestamps"),
        ({"request_rate": float("inf"), "duration": 4.0}, "duration: has no effect when"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmschedError, match=message):
        load(**settings)


def test_a_trace_of_one_time_cannot_be_scaled() -> None:
    at_once = Trace("t", "azure", trace().requests[1:3], timed=True)
    with pytest.raises(LlmschedError, match="all its requests have the same time"):
        TraceLoad(trace=at_once, request_rate=2.0)


def test_texts_cannot_be_cut_without_a_tokenizer() -> None:
    with pytest.raises(LlmschedError, match="max_input_len: prompts that are sent as text"):
        TraceLoad(trace=texts(Content("a"), output_len=1), max_concurrency=1, max_input_len=5).plan(None)
