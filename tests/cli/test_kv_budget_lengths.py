"""kv-budget --lengths: every format, and one-line errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsched.cli.kv_budget.budget_options import read_lengths
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.concurrency import LengthDistribution

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}
{"timestamp": 3, "input_length": 396, "output_length": 109, "hash_ids": []}
{"timestamp": 9, "input_length": 879, "output_length": 1, "hash_ids": [7]}
"""
VIDUR = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
374,44,418,8.5
396.0,109,505,3.6
879,1,880,879
"""


def read(tmp_path: Path, text: str) -> LengthDistribution:
    path = tmp_path / "lengths"
    path.write_text(text)
    return read_lengths(path)


@pytest.mark.parametrize(
    "text",
    [
        AZURE,
        MOONCAKE,
        VIDUR,
        "374,44\n396,109\n\n879,1\n",
        "374 44\n396 109\n879 1",
        "[374, 44]\n[396, 109]\n[879, 0]",
        '"Timestamp","Session ID","Request tokens","Response tokens"\n1,a,374,44\n2,a,396,109\n3,b,879,0',
        '{"prompt_tokens": 374, "completion_tokens": 44}\n{"prompt_tokens": 396, "completion_tokens": 109}\n'
        '{"prompt_tokens": 879, "completion_tokens": 1}',
    ],
    ids=["azure", "mooncake", "vidur", "commas", "blanks", "lists", "burstgpt", "usage"],
)
def test_formats(tmp_path: Path, text: str) -> None:
    lengths = read(tmp_path, text)
    assert lengths.prompts.tolist() == [374, 396, 879]
    assert lengths.outputs.tolist() == [44, 109, 1]
    assert lengths.totals.tolist() == [418, 505, 880]
    assert lengths.mean == pytest.approx(601)


@pytest.mark.parametrize(
    "text", ["418\n505\n880\n", "length\n418\n505\n880", '[{"total_tokens": 418}, {"length": 505}, {"tokens": 880}]']
)
def test_totals_alone(tmp_path: Path, text: str) -> None:
    lengths = read(tmp_path, text)
    assert lengths.outputs is None
    assert lengths.totals.tolist() == [418, 505, 880]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no request"),
        ("\n \n", "contains no request"),
        ("ContextTokens,GeneratedTokens\n", "contains no request"),
        ("5\n-3\n", "line 2: input tokens is -3; allowed is a whole number"),
        ("5\n2.5\n", "line 2: input tokens is 2.5"),
        ("5\nmany\n", "line 2: input tokens is many"),
        ("1 2 3\n", "line 1: 3 numbers"),
        ("5\n6 7\n", "has outputs for 1 of 2 requests"),
        ("weight,height\n1,2\n", "none of weight, height is a length"),
        ('{"input_length": 5}\n{oops\n', "line 2: not valid JSON"),
        ('{"input_length": true}\n', "line 1: input tokens is true"),
        ("ContextTokens,GeneratedTokens\n5,x\n", "line 2: output tokens is x"),
    ],
)
def test_a_wrong_length_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as problem:
        read(tmp_path, text)
    assert str(problem.value).startswith("lengths: ")
    assert "\n" not in str(problem.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_lengths(tmp_path / "missing.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_lengths(tmp_path / "binary")
