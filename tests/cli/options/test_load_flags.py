"""Loads made from flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmsched.cli.load.load import Load
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.options.flags import flag
from llmsched.cli.options.load_flags import LoadFlags, make_load
from llmsched.engine.errors import LlmschedError

DEFAULTS = {"num_prompts": 100, "input_len": 128, "output_len": 64}
TUNE = {**DEFAULTS, "max_concurrency": 4}


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    lines = [{"timestamp": at, "input_length": 5, "output_length": 2} for at in (0, 500, 1500)]
    path = tmp_path / "input_len.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n")
    return path


def make(defaults: dict[str, Any] = DEFAULTS, **flags: Any) -> Load:
    return make_load(LoadFlags(**flags), defaults)


def test_defaults() -> None:
    assert make() == SyntheticLoad()
    assert make(TUNE) == SyntheticLoad(max_concurrency=4)
    assert make(TUNE, request_rate=2.0) == SyntheticLoad(request_rate=2.0)


def test_flags_are_settings() -> None:
    assert make(input_len="64..128", prefix_len=0, seed=3, request_rate=2.0, burstiness=0.5).parameters() == {
        **make(input_len="64..128", seed=3, request_rate=2.0, burstiness=0.5, arrivals="gamma").parameters(),
        "prefix_len": 0,
    }
    assert make(duration=5.0, request_rate=2.0, arrivals="constant").num_requests == 10
    assert make(duration=5.0, request_rate=2.0, arrivals="constant", num_prompts=4).num_requests == 4


def test_a_trace_is_replayed(timed: Path) -> None:
    load = make(TUNE, trace=timed, speedup=2.0, limit=2)
    assert isinstance(load, TraceLoad)
    assert [request.offset for request in load.plan(None)] == [0, 0.25]
    assert load.max_concurrency is None
    assert make(TUNE, trace=timed, ignore_timestamps=True).describe() == "closed loop, 4 at a time"


def test_a_trace_without_times(lengths: Path) -> None:
    assert make(TUNE, trace=lengths).describe() == "closed loop, 4 at a time"
    assert make(trace=lengths, request_rate=float("inf")).describe() == "all at once"
    assert make(trace=lengths, request_rate=3.0).describe() == "poisson arrivals at 3 requests/s"


def test_a_shipped_trace_goes_by_its_name() -> None:
    load = make(workload="azure-code", limit=50)
    assert load.num_requests == 50
    assert load.parameters()["trace"] == "azure-code"
    assert "50 requests of azure-code (mean" in load.describe_requests()


def test_a_shipped_shape_can_be_changed() -> None:
    chat = make(workload="chat").parameters()
    assert (chat["input_len"], chat["prefix_len"], chat["num_prompts"]) == ("lognormal:500,0.7,4096", 100, 100)
    changed = make(workload="chat", input_len="256", max_concurrency=2).parameters()
    assert (changed["input_len"], changed["prefix_len"], changed["max_concurrency"]) == (256, 100, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workload": "nothing"}, "--workload: 'nothing' is not a known workload; known are azure-code, "),
        ({"workload": "chat", "trace": Path("x")}, "--trace and --workload both name a load"),
        ({"workload": "chat", "speedup": 2.0}, "--speedup: only has an effect with --trace"),
        (
            {"workload": "azure-code", "num_prompts": 5},
            "--num-prompts: has no effect on a trace; --limit keeps",
        ),
        ({"workload": "azure-code", "input_len": "5"}, "--input-len: has no effect on a trace"),
        ({"workload": "azure-code", "output_len": "x"}, "--output-len: 'x'"),
        (
            {"workload": "azure-code", "speedup": 2.0, "request_rate": 1.0},
            "--speedup: .*, as --request-rate does",
        ),
        ({"ignore_timestamps": True, "turns": 2}, "--turns, --ignore-timestamps: only has an effect with --trace"),
        ({"request_rate": 0.0}, r"--request-rate: 0 is out of range; allowed is 1e-09 or more requests per second"),
        (
            {"request_rate": 1.0, "day_period": 5.0},
            "--arrivals: --day-period and --day-amplitude have an effect only with daynight",
        ),
        (
            {"request_rate": 1.0, "day_amplitude": 0.5},
            "--arrivals: --day-period and --day-amplitude have an effect only with daynight",
        ),
        ({"trace": Path("/no/input_len/file")}, r"/no/input_len/file: No such file"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmschedError) as refused:
        make(**flags)
    assert re.search(message, refused.value.text(flag))


def test_a_trace_without_times_needs_a_rate_or_concurrency(lengths: Path, timed: Path) -> None:
    with pytest.raises(
        LlmschedError, match=r"no timestamps of lengths.csv are used.* request_rate .* or max_concurrency"
    ):
        make(trace=lengths)
    with pytest.raises(LlmschedError, match=r"no timestamps of input_len.jsonl are used"):
        make(trace=timed, ignore_timestamps=True)
