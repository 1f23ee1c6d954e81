"""Formats of trace files, and errors in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from llmsched.cli.load.traces import file_rows as rows
from llmsched.cli.load.traces.file_rows import TraceError
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.load.traces.trace import Trace, digest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MINUTE = "2023-11-16 18:17:"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def mooncake(*stamps: Any) -> str:
    """Return a line per timestamp, without the field for None."""
    lines = []
    for stamp in stamps:
        fields = {"timestamp": stamp, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
        lines.append(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return "\n".join(lines)


def log(*stamps: Any) -> str:
    return "\n".join(json.dumps({"prompt": "a b", "max_tokens": 5, "timestamp": stamp}) for stamp in stamps)


def offsets(trace: Trace) -> list[float]:
    return [request.offset for request in trace.requests]


def lengths(trace: Trace) -> list[tuple[int | None, int | None]]:
    return [(request.input_len, request.output_len) for request in trace.requests]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (mooncake(1.7e15, 1.7e15 + 2_500_000), [0, 2.5]),
        (mooncake(27482, 30482), [0, 3]),
        (mooncake(0, 0, 7), [0, 0, 0.007]),
        (mooncake(5000, 1000, 3000), [0, 2, 4]),
        (mooncake(1_700_000_000_000, 1_700_000_000_500), [0, 0.5]),
        (mooncake(1_700_000_000, 1_700_000_060), [0, 60]),
        (log(1_700_000_000, 1_700_000_060.5), [0, 60.5]),
        (log(1_700_000_000_000, 1_700_000_000_500), [0, 0.5]),
        (log(1.7e15, 1.7e15 + 500_000), [0, 0.5]),
        (log(1.7e18, 1.7e18 + 5e9), [0, 5]),
        (log("1700000000", "1700000001"), [0, 1]),
        (log(5.5, 7), [0, 1.5]),
        (log("2024-05-10T00:00:00Z", "2024-05-10T02:00:01+02:00"), [0, 1]),
    ],
)
def test_offsets_are_seconds_after_the_first(write: Any, text: str, expected: list[float]) -> None:
    """Microseconds since 1970, milliseconds from anywhere, unsorted, equal ones, seconds, dates."""
    trace = read_trace(write(text))
    assert trace.timed
    assert offsets(trace) == expected


def test_equal_timestamps_keep_the_order_of_the_file(write: Any) -> None:
    text = AZURE + "".join(f"{MINUTE}{second:02},{tokens},1\n" for second, tokens in ((5, 1), (3, 2), (5, 3), (3, 4)))
    assert lengths(read_trace(write(text))) == [(2, 1), (4, 1), (1, 1), (3, 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (mooncake(0, None, 5), "trace, line 2: no timestamp, though line 1 has one"),
        (mooncake(0, 1, -5), "trace, line 3: timestamp is -5"),
        (mooncake(0, float("nan")), "trace, line 2: timestamp is NaN"),
        (mooncake(0, float("inf")), "trace, line 2: timestamp is Infinity"),
        (mooncake(0, "soon"), "trace, line 2: timestamp is soon"),
        (mooncake(0, True), "trace, line 2: timestamp is true"),
        (AZURE + f"{MINUTE}01,1,1\n\n,2,2\n", "trace, line 4: TIMESTAMP is missing"),
        (AZURE + f"{MINUTE}61,1,1\n", "trace, line 2: TIMESTAMP is 2023-11-16 18:17:61"),
        (log(1_700_000_000, "2024-05-10T00:00:00Z"), "1 of 2 timestamps are dates, the others numbers"),
        ('{"prompt":"a","max_tokens":1,"timestamp":1700000000}\n{"prompt":"a","max_tokens":1}', "line 2: no timestamp"),
        ('{"prompt":"a","max_tokens":1}\n{"prompt":"a","max_tokens":1,"time":1700000000}', "line 1: no timestamp"),
        ("", "trace is empty"),
        ("\n \n", "trace is empty"),
        ("[]", "trace is an empty list"),
        (AZURE, "contains no request"),
        ("hello\nworld", "not a trace in a known format .* it begins with hello"),
        ("one, two,\nthree", "not a trace in a known format .* it begins with one, two,"),
        ('{"url": "/v1/embeddings", "body": {"input": "x"}}', "line 1: url is /v1/embeddings; only requests that gen"),
        ("id;cost\n1;2", "trace is a CSV file without a column of prompts .* its header is id;cost"),
        ('{"data": [{"prompt": "x"}]}', r"not a trace .* if data has the records, write .* \(jq '.data' FILE\)"),
        ('{\n "prompt": "x"\n}', r"line 1: not valid JSON .*; write one object per line \(jq -c . FILE\)"),
        ('{"session_id": "a", "turns": [{"text": "x"}]}', r"a multi-turn file of AIPerf \(turns\); write a line with"),
        (
            "prompt,output_tokens\n12,3",
            "line 2: prompt is 12 and messages are missing; give messages, or prompt",
        ),
        (b"PAR1\x15\x04", r"trace is a Parquet file; write it as JSON lines, with pandas: read_parquet\(FILE\)"),
        (b"PK\x03\x04abc", "trace is a zip file or spreadsheet; unpack it, or save it as CSV"),
        (b"\x28\xb5\x2f\xfdabc", "trace is compressed with zstd; unpack it, or pack it with gzip"),
        ('{"a": 1}', "not a trace in a known format"),
        ("{oops\n", "line 1: not valid JSON"),
        (mooncake(1) + "\n{oops", "line 2: not valid JSON"),
        (mooncake(1) + "\n[1]", "line 2: .* is not allowed; write one JSON object per line"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"\x1f\x8b\x08nonsense", "trace: "),
        (AZURE + f"{MINUTE}01,x,1", "line 2: input tokens is x; allowed is a whole number of tokens, 0 to 16777216"),
        (AZURE + f"{MINUTE}01,-4,1", "line 2: input tokens is -4"),
        (AZURE + f"{MINUTE}01,1.5,1", "line 2: input tokens is 1.5"),
        (AZURE + f"{MINUTE}01,nan,1", "line 2: input tokens is nan"),
        (AZURE + f"{MINUTE}01,1e300,1", "line 2: input tokens is 1e300"),
        (AZURE + f"{MINUTE}01,3", "line 2: output tokens is missing"),
        ('{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}', "1 hash_ids; 600 tokens are 2 blocks"),
        ('{"timestamp":0,"input_length":6,"output_length":1,"hash_ids":[-1]}', r"hash_ids is \[-1\]"),
        ('{"timestamp":0,"input_length":6,"output_length":1,"hash_ids":7}', "hash_ids is 7"),
        ('{"prompt":[1,2],"max_tokens":1}', r"line 1: prompt is \[1, 2\] and messages are missing"),
        ('{"prompt":"a","max_tokens":-1}', "line 1: max_tokens is -1"),
        ('{"prompt":"\\ud83d","max_tokens":1}', "line 1: the prompt is not valid Unicode"),
        ('{"messages":[],"max_tokens":1}', r"line 1: messages is \[\]"),
        ('{"messages":[{"content":"x"}]}', r"messages\[0\] is .* allowed is an object with a role"),
        ('{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', r"messages\[0\].content is .* text parts"),
        ('[{"conversations":"x"}]', "entry 1: conversations is x"),
        ('[{"conversations":[]}', "entry 2: not valid JSON"),
        ('[{"conversations":[]}]', "contains no request"),
    ],
)
def test_errors_name_the_line(write: Any, text: str, message: str) -> None:
    """Missing, negative and NaN values, traces without requests and unknown files are refused."""
    with pytest.raises(TraceError, match=message):
        read_trace(write(text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"directory"):
        read_trace(tmp_path)


def test_the_unit_can_be_given(write: Any) -> None:
    assert offsets(read_trace(write(log(27482, 27492)), timestamp_unit="ms")) == [0, 0.01]
    assert offsets(read_trace(write(mooncake(1_700_000_000, 1_700_000_060)), timestamp_unit="s")) == [0, 60]
    assert offsets(read_trace(write(mooncake(1_700_000_000, 1_700_000_060)), timestamp_unit="ms")) == [0, 0.06]
    with pytest.raises(TraceError, match="the timestamps are dates"):
        read_trace(write(AZURE + f"{MINUTE}01,1,1"), timestamp_unit="s")
    with pytest.raises(TraceError, match="there are no timestamps"):
        read_trace(write("num_prefill_tokens,num_decode_tokens\n5,6"), timestamp_unit="s")


def test_azure(write: Any) -> None:
    """Seven digits of a second; also time zones, a byte order mark, CRLF, blank lines, no newline at the end."""
    rows = f"{MINUTE}03.9799600,4808,10\r\n\r\n{MINUTE}04.0319605+00:00,3180,8"
    trace = read_trace(write(b"\xef\xbb\xbf" + (AZURE.replace("\n", "\r\n") + rows).encode()))
    assert trace.format == "azure"
    assert lengths(trace) == [(4808, 10), (3180, 8)]
    assert offsets(trace) == [0, pytest.approx(0.052)]
    assert [request.line for request in trace.requests] == [2, 4]


def test_burstgpt_is_in_seconds_and_keeps_empty_answers(write: Any) -> None:
    trace = read_trace(write(BURST + "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n"))
    assert (trace.format, lengths(trace), offsets(trace)) == ("burstgpt", [(472, 18), (1087, 0)], [0, 40.5])


def test_burstgpt_with_sessions_as_a_spreadsheet_saves_it(write: Any) -> None:
    """Columns of the second release; byte order mark, CRLF, quotes with a line break inside, a failed row."""
    header = (
        '"Timestamp","Session ID","Elapsed time","Model","Request tokens","Response tokens","Total tokens","Log Type"'
    )
    rows = [
        header,
        '5,"0a1f","12.7","ChatGPT","472","18","490","Conversation log"',
        '45,"0a1f","","ChatGPT","1087","0","1087","Conversation\r\nlog"',
        '118.5,"","3.25","GPT-4","417","276","693","API log"',
    ]
    trace = read_trace(write(b"\xef\xbb\xbf" + "\r\n".join([*rows, ""]).encode()))
    assert trace.format == "burstgpt"
    assert lengths(trace) == [(472, 18), (1087, 0), (417, 276)]
    assert offsets(trace) == [0, 40, 113.5]
    assert [request.line for request in trace.requests] == [2, 4, 5]


def test_lengths_have_no_times(write: Any) -> None:
    trace = read_trace(write("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n"))
    assert (trace.format, lengths(trace), trace.timed, trace.rate) == ("lengths", [(3772, 54)], False, 0)


@pytest.mark.parametrize(
    "text",
    [
        "8 7\n3\t4\n",
        "[8, 7]\r\n[3, 4]",
        '{"prompt_tokens": 8, "completion_tokens": 7}\n{"input_len": "3", "output_len": "4"}',
        "Input_Len,other,Output_Len\n8,x,7\n3,,4\n",
    ],
)
def test_lengths_have_many_names_or_none(write: Any, text: str) -> None:
    trace = read_trace(write(text))
    assert (trace.format, trace.timed, trace.of_text, lengths(trace)) == ("lengths", False, False, [(8, 7), (3, 4)])


def test_files_with_one_length_per_request(write: Any) -> None:
    assert lengths(read_trace(write("15\n7\n"))) == [(15, None), (7, None)]
    assert lengths(read_trace(write("total_tokens\n15\n"))) == [(15, None)]


def test_columns_may_stand_in_any_order(write: Any) -> None:
    trace = read_trace(write("generatedtokens, ContextTokens,extra,timestamp\n7,8,x,2024-01-01\n"))
    assert lengths(trace) == [(8, 7)]


def test_blocks_of_another_size(write: Any) -> None:
    path = write('{"timestamp": 1.5, "input_length": 40, "output_length": 2, "hash_ids": [7, 8, 9]}')
    trace = read_trace(path, timestamp_unit="s", trace_block_size=16)
    assert (trace.block_tokens, trace.requests[0].hash_ids) == (16, (7, 8, 9))
    with pytest.raises(TraceError, match=r"40 tokens are 1 blocks of 512 \(trace_block_size sets another size"):
        read_trace(path)


def test_options_of_other_formats_are_refused(write: Any) -> None:
    with pytest.raises(TraceError, match="turns 2 is given, but mooncake traces have no conversations"):
        read_trace(write(mooncake(1)), turns=2)
    with pytest.raises(TraceError, match="trace_block_size 16 is given, but log traces have no blocks"):
        read_trace(write(log(1)), trace_block_size=16)


def test_mooncake_without_blocks(write: Any) -> None:
    trace = read_trace(write('{"timestamp": 3, "input_length": 600, "output_length": 2}'))
    assert (trace.format, trace.requests[0].hash_ids) == ("mooncake", ())


TALK = [
    {"from": "system", "value": "be kind"},
    *({"from": who, "value": text} for who, text in (("human", "one two"), ("gpt", "three"), ("human", "four"))),
    {"from": "gpt", "value": "five six"},
]


@pytest.mark.parametrize("layout", [json.dumps, lambda v: json.dumps(v, indent=2), lambda v: json.dumps(v[0])])
def test_sharegpt(write: Any, layout: Any) -> None:
    trace = read_trace(write(layout([{"id": "a", "conversations": TALK}])))
    (request,) = trace.requests
    assert (trace.format, trace.timed, trace.of_text) == ("sharegpt", False, True)
    assert request.content.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one two"},
    )
    assert (request.content.text, request.answer) == ("be kind\n\none two", "three")
    assert (request.words_in, request.answer_len()) == (4, 1)


def test_quirks_of_sharegpt_dumps(write: Any) -> None:
    """Parts of long conversations begin with an answer, some are empty, assistants have product names."""
    entries: list[dict[str, Any]] = [
        {"id": "QWJhYvA_0", "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c\r\nd"}]},
        {"id": "QWJhYvA_1", "conversations": TALK[2:]},
        {"id": "empty_0", "conversations": []},
        {"id": "old", "items": [{"from": "user", "value": "e", "text": "e"}, {"from": "bing", "value": "f g h"}]},
        {"id": "bard", "items": [{"from": "human", "value": "i"}, {"from": "bard", "value": "j", "markdown": None}]},
        {"id": "chat", "items": [{"from": "user", "value": "k"}, {"from": "chatgpt", "value": "l"}]},
    ]
    trace = read_trace(write(b"\xef\xbb\xbf" + json.dumps(entries, indent=2).replace("\n", "\r\n").encode()))
    assert trace.format == "sharegpt"
    assert [request.answer for request in trace.requests] == ["c\r\nd", "five six", "f g h", "j", "l"]
    assert [request.line for request in trace.requests] == [1, 2, 4, 5, 6]
    second = trace.requests[1].content
    assert [message["role"] for message in second.messages] == ["assistant", "user"]
    assert read_trace(write("\r\n".join(map(json.dumps, entries[3:])))).format == "sharegpt"


def test_a_missing_speaker_is_refused(write: Any) -> None:
    with pytest.raises(TraceError, match="entry 1: from is missing"):
        read_trace(write(json.dumps([{"items": [{"value": "x"}]}])))


def test_turns_of_a_conversation_become_requests(write: Any) -> None:
    path = write(json.dumps([{"conversations": TALK}, {"conversations": TALK[3:4]}, {"conversations": TALK[3:]}]))
    assert [request.words_in for request in read_trace(path, turns=9).requests] == [4, 6, 1]
    assert [request.answer for request in read_trace(path, turns=9).requests] == ["three", "five six", "five six"]
    assert [request.line for request in read_trace(path).requests] == [1, 3]


def test_a_long_array_is_read_only_as_far_as_needed(write: Any) -> None:
    entry = json.dumps({"conversations": [{"from": "human", "value": "x" * 9000}, {"from": "gpt", "value": "y"}]})
    path = write("[\n" + ",\n".join([entry] * 500) + ", {broken ]")
    assert len(read_trace(path, limit=400).requests) == 400
    with pytest.raises(TraceError, match="entry 501: not valid JSON"):
        read_trace(path)


@pytest.mark.parametrize("chunk", [5, 64, 1000])
def test_chunks_may_end_anywhere_in_an_array(write: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    talk = [{"from": "human", "value": 'é "\\ \n \u00e9 -1.5e3 true'}, {"from": "gpt", "value": "]} , {["}]
    path = write("  \n" * 9 + json.dumps([{"n": -1.5e-7, "ok": None, "conversations": talk}] * 7, indent=1))
    whole = read_trace(path).requests
    monkeypatch.setattr(rows, "_CHUNK", chunk)
    assert read_trace(path, "sharegpt").requests == whole
    assert len(whole) == 7


def test_request_logs(write: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a b"}]}, {"role": "assistant", "content": None}]
    rows = [
        {"messages": messages, "max_completion_tokens": 9, "created": 1_700_000_000},
        {"custom_id": "1", "body": {"prompt": "c", "max_tokens": 3}, "timestamp": 1_700_000_001},
        {"prompt": "d e f", "created_at": 1_700_000_002},
    ]
    trace = read_trace(write("\n".join(json.dumps(row) for row in rows)))
    assert trace.format == "log"
    assert [(r.words_in, r.answer_len(), r.offset) for r in trace.requests] == [(2, 9, 0), (1, 3, 1), (3, None, 2)]
    assert trace.requests[0].content.messages == tuple(messages)


def test_the_first_of_an_unsorted_trace_are_the_earliest(write: Any) -> None:
    assert offsets(read_trace(write(mooncake(5000, 1000, 3000)), limit=2)) == [0, 2]


def test_a_format_may_be_forced(write: Any) -> None:
    path = write('{"input_length": 5, "output_length": 5, "prompt": "a", "max_tokens": 2}')
    assert read_trace(path, "log").of_text
    with pytest.raises(TraceError, match="no column timestamp"):
        read_trace(path, "azure")


def test_packed_files(write: Any) -> None:
    plain = read_trace(write(mooncake(0, 5)))
    assert read_trace(write(gzip.compress(mooncake(0, 5).encode()))).requests == plain.requests
    with pytest.raises(TraceError, match="trace: "):
        read_trace(write(gzip.compress(mooncake(*range(500)).encode())[:-30]))


def test_the_digest_depends_on_the_content_alone(write: Any) -> None:
    def of(text: str, **settings: Any) -> str:
        return digest(read_trace(write(text), **settings).requests)

    assert of(mooncake(0, 5)) == of(mooncake(27_482, 27_487).replace("\n", "\r\n\r\n"))
    assert len({of(mooncake(0, 5)), of(mooncake(0, 6)), of(mooncake(0)), of(log(0, 5), timestamp_unit="ms")}) == 4


def bailian(*stamps: float) -> str:
    fields = {
        "chat_id": 0,
        "parent_chat_id": -1,
        "input_length": 40,
        "output_length": 20,
        "turn": 1,
        "hash_ids": [3] * 3,
    }
    return "\n".join(json.dumps({**fields, "timestamp": stamp}) for stamp in stamps)


@pytest.mark.parametrize(
    ("text", "span", "note"),
    [
        (bailian(*(round(0.733 * n, 3) for n in range(60))), 43.247, "timestamps in s"),
        (mooncake(*(0.733 * n for n in range(60))), 43.247, "as their size shows (--timestamp-unit ms overrides)"),
        (mooncake(*(n // 2 for n in range(60))), 29, "timestamps in s, as"),
        (mooncake(*(5 * n for n in range(60))), 0.295, "timestamps in ms"),
        (mooncake(*(733 * n for n in range(60))), 43.247, "timestamps in ms"),
        (mooncake(*(733_000 * n for n in range(60))), 43.247, "timestamps in us, as"),
        (json.dumps({"timestamp": 5, "messages": [{"role": "user"}], "output_length": 3}), 0, "timestamps in ms"),
        (log(*(733 * n for n in range(60))), 43.247, "timestamps in ms, as"),
        (log(*(733e6 * n for n in range(60))), 43.247, "timestamps in ns, as"),
        (log(*(0.733 * n for n in range(60))), 43.247, "timestamps in s"),
        (log(*(60 * n for n in range(60))), 3540, "timestamps in s"),
        (log(0, 0.733).replace('"timestamp"', '"time_ms"'), 0.000733, "timestamps in ms"),
        ("arrived_at,num_prefill_tokens\n0.5,9\n4.5,9", 4, "timestamps in s"),
        ('{"created": "2024-05-10T00:00:00Z", "isl": 9}\n{"created": "2024-05-10T00:00:04Z", "isl": 9}', 4, ""),
        (BURST + "0,x,1,1,2,log\n4000,x,1,1,2,log", 4000, "timestamps in s"),
        (log("2024-05-10T00:00:00Z", "2024-05-10T00:00:43Z"), 43, ""),
    ],
)
def test_the_size_of_timestamps_shows_their_unit(write: Any, text: str, span: float, note: str) -> None:
    """Without a unit, a trace in seconds is not taken for one in milliseconds, and the report names the unit."""
    trace = read_trace(write(text))
    assert offsets(trace)[-1] == pytest.approx(span)
    assert note in "".join(trace.notes)
    assert ("as their size" in "".join(trace.notes)) == ("as" in note)


def test_times_can_be_left_out(write: Any) -> None:
    trace = read_trace(write("created,prompt_tokens\nlast Monday,9"), times=False)
    assert (trace.timed, lengths(trace)) == (False, [(9, None)])


def test_bailian(write: Any) -> None:
    trace = read_trace(write(bailian(*(round(0.733 * n, 3) for n in range(60)))))
    assert (trace.format, trace.block_tokens, trace.rate) == ("bailian", 16, pytest.approx(1.364, abs=0.001))
    assert trace.requests[0].hash_ids == (3, 3, 3)
    assert read_trace(write(bailian(0, 1)), trace_block_size=16).requests == read_trace(write(bailian(0, 1))).requests


SESSION = [
    {"session_id": "a", "timestamp": 0, "text_input": "one two", "output_length": 4},
    {"session_id": "a", "delay": 2000, "text_input": "three", "output_length": 5},
]


def test_turns_that_wait_for_answers(write: Any) -> None:
    trace = read_trace(write("\n".join(map(json.dumps, SESSION))))
    assert [(r.words_in, r.answer_len()) for r in trace.requests] == [(2, 4), (1, 5)]
    assert (trace.timed, len(trace.notes)) == (False, 1)
    assert trace.notes[0].startswith("sessions (session_id, delay): a turn waits for an answer")
    of_messages = [
        {"session_id": "a", "messages": [{"role": "user", "content": "x y"}], "output_length": 3, "delay": delay}
        for delay in (None, 4503.3)
    ]
    trace = read_trace(write("\n".join(map(json.dumps, of_messages))))
    assert [(r.words_in, r.answer_len()) for r in trace.requests] == [(2, 3), (2, 3)]
    assert trace.notes[0].startswith("sessions")


def test_plain_turns_of_conversations_with_tools(write: Any) -> None:
    """Turns of tools are skipped and counted; only answers that follow a user message directly are used."""
    tools = [{"from": "function_call", "value": "{}"}, {"from": "observation", "value": "3"}]
    entries = [
        [*TALK[:3], TALK[3], *tools, TALK[4]],
        [TALK[1], *tools, TALK[2], TALK[3], TALK[4]],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}, {"role": "tool", "content": None}],
    ]
    trace = read_trace(write(json.dumps([{"conversations": entry} for entry in entries])), turns=9)
    assert [(r.line, r.words_in, r.answer) for r in trace.requests] == [
        (1, 4, "three"),
        (2, 4, "five six"),
        (3, 1, "b c"),
    ]
    assert trace.notes == ("5 turns skipped: function_call, observation, tool",)
    lmsys = {"conversation_id": "x", "model": "m", "conversation": entries[2], "turn": 1}
    assert read_trace(write(json.dumps(lmsys))).requests[0].answer == "b c"
    with pytest.raises(TraceError, match=r"contains no request .read as sharegpt, 1 turn skipped: tool"):
        read_trace(write(json.dumps([{"conversations": entries[2][2:]}])))


CHAT = [
    {"role": "system", "content": "you are kind"},
    {"role": "user", "content": "what is the capital of France"},
    {"role": "assistant", "content": "it is Paris my friend"},
]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        (json.dumps({"messages": CHAT}), (9, 5)),
        (json.dumps({"messages": [*CHAT, CHAT[1], CHAT[2]]}), (20, 5)),
        (json.dumps({"messages": CHAT[:2]}), (9, None)),
        (json.dumps({"messages": CHAT, "max_tokens": 7}), (14, 7)),
        (json.dumps({"messages": CHAT, "output_tokens": 7}), (9, 7)),
        (json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/x", "body": {"messages": CHAT[:2]}}), (9, None)),
        ('{"prompt": "a b", "completion": "c d e"}', (2, 3)),
        ('{"prompt": "a b", "response": "c d e", "max_tokens": 9}', (2, 9)),
        ('{"instruction": "a b", "input": "c", "output": "d e"}', (3, 2)),
        ('{"input": "a b", "output": "d"}', (2, 1)),
        ('{"question": "a b", "answer": "d"}', (2, 1)),
        ('{"prompt": "x", "output_tokens": 10}', (1, 10)),
        ('{"text_input": "x y", "output_length": 10}', (2, 10)),
        ('{"text": "x y"}', (2, None)),
        (json.dumps({"input": CHAT[:2], "max_output_tokens": 8}), (9, 8)),
        (json.dumps({"request": {"messages": CHAT[:2], "max_tokens": 8}, "response": {"id": "x"}}), (9, 8)),
        ('{"prompt": "x", "max_tokens": 2, "timestamp": null}', (1, 2)),
        ("isl,osl\n9,4\n", (9, 4)),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,9,4\n", (9, 4)),
        ('prompt,prompt_tokens_count,output_tokens_count\n"a, b\nc",9,4\n', (3, 4)),
        ("Prompt;Output_Tokens\na b;4\n", (2, 4)),
        ("prompt\tresponse\na b\tc\n", (2, 1)),
        ("prompt_tokens_count,output_tokens_count\n9,4\n", (9, 4)),
        ("timestamp,input_length,output_length\n5,9,4\n", (9, 4)),
        ("prompt,output_tokens\n" + "x " * 200_000 + ",4", (200_000, 4)),
    ],
)
def test_forms_of_data_sets(write: Any, text: str, lengths: tuple[int, int | None]) -> None:
    """The last message of the assistant is the answer, CSV files have prompts, lengths have many names."""
    (request,) = read_trace(write(text)).requests
    assert (request.words_in, request.answer_len()) == lengths
