"""`llmsched workload` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Ten requests, one per second, that begin with the same 40 words."""
    system = " ".join(f"rule{number}" for number in range(40))
    lines = [
        {
            "timestamp": f"2024-05-01T00:00:{second:02}Z",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"question {second}"}],
            "max_tokens": 10 + second,
        }
        for second in range(10)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_log_of_texts_in_words(command: CommandLine, log: Path) -> None:
    outcome = command("workload", str(log), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    report = outcome.json
    assert (report["requests"], report["format"]) == (10, "log")
    assert report["tokens"].startswith("one per word")
    assert report["input_len"]["mean"] == 42
    assert report["output_len"]["mean"] == 14.5
    assert report["arrivals"] == {"duration_s": 9, "rate": 1, "gap_cv": 0, "peak_over_mean": None}
    assert report["prefixes"]["hit_rate"] == pytest.approx(9 * 32 / 420)
    assert report["prefixes"]["coverage"][0] == {"tokens": 32, "share": 1, "exact": True}
    assert report["prefixes"]["pin"] == {"tokens": 32, "requests": 10, "example": 0}
    assert report["advice"]["max_model_len"] == 256
    assert report["advice"]["prefix_caching"] is True


def test_a_log_of_texts_in_a_models_tokens(command: CommandLine, log: Path, tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama"))
    report = command("workload", str(log), "--tokenizer", model, "--block-size", "1", "--json").json
    assert report["tokens"] == f"of {model}"
    assert report["input_len"]["mean"] > 42
    assert report["prefixes"]["hit_rate"] > 0.8


def test_as_text(command: CommandLine, log: Path) -> None:
    outcome = command("workload", str(log))
    assert outcome.code == 0
    parts = ("10 requests", "P99/mean", "1.00", "ideal prefix hit rate", "max_model_len 256", "headroom")
    for part in (*parts, "worthwhile, it saves up to"):
        assert part in outcome.out
    assert "pin the first 32 tokens, which 100.0% of requests share, such as 'rule0 rule1" in outcome.out


def test_shipped_ones(command: CommandLine) -> None:
    azure = command("workload", "azure-code", "--json").json
    assert (azure["requests"], azure["prefixes"], azure["advice"]["prefix_caching"]) == (1000, None, None)
    assert azure["arrivals"]["gap_cv"] > 5
    mooncake = command("workload", "mooncake-synthetic", "--json").json
    assert mooncake["prefixes"]["hit_rate"] == pytest.approx(0.43, abs=0.02)
    agent = command("workload", "agent", "--json").json
    assert (agent["requests"], agent["arrivals"]) == (1000, None)
    assert "does not state which prefixes its prompts share" in command("workload", "azure-code").out
    assert "not worthwhile" in command("workload", "batch").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere is neither a file nor a load that comes with llmsched: azure-code,"),
        (("chat", "--limit", "5"), "chat is drawn, not read"),
        (("chat", "--tokenizer", "demo"), "chat is drawn, not read"),
        (("azure-code", "--turns", "2"), "--turns 2 is given, but azure traces have no conversations"),
        (("azure-code", "--timestamp-unit", "s"), "the timestamps are dates"),
        (("azure-code", "--block-size", "0"), "--block-size"),
        (("azure-code", "--block-size", "257"), "'--block-size': '257'; allowed is 1 to 256"),
        (("azure-code", "--tokenizer", "demo"), "--tokenizer: demo has no effect: azure-code states lengths"),
        ((), "FILE|NAME"),
    ],
)
def test_bad_usage_is_one_line(command: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    assert message in command.refused("workload", *arguments)


@pytest.mark.parametrize(
    ("load", "flags", "settings"),
    [
        ("azure-code", (), {"max_model_len", "headroom"}),
        ("mooncake-conversation", ("--block-size", "32"), {"max_model_len", "headroom", "max_headroom", "block_size"}),
        ("chat", (), {"max_model_len", "headroom", "enable_prefix_caching"}),
    ],
)
def test_it_ends_with_a_command_that_serves_as_advised(
    load: str, flags: tuple[str, ...], settings: set[str], command: CommandLine
) -> None:
    line = command("workload", load, *flags).out.splitlines()[-1]
    report = command("workload", load, *flags, "--json").json
    assert report["serve"] == line
    config, advice = command.served(line), report["advice"]
    assert config.max_model_len == advice["max_model_len"]
    assert config.headroom == pytest.approx(min(0.5, advice["headroom"]), abs=0.0006)
    assert config.enable_prefix_caching == (advice["prefix_caching"] is not False)


def test_lengths_in_words_limit_nothing(command: CommandLine, log: Path, tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama"))
    in_words = command.served(command("workload", str(log), "--json").json["serve"])
    in_tokens = command.served(command("workload", str(log), "--tokenizer", model, "--json").json["serve"])
    assert (in_words.model, in_words.max_model_len) == ("demo", None)
    assert (in_tokens.model, in_tokens.max_model_len) == (model, 512)
