"""Files of published results: what is read from a line, and which lines are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from published_lines import RefusedError, read_file, read_line, read_rows

from llmsched.profiles.toml_files import UnknownNameError

LINE: dict[str, Any] = {
    "id": "there-1",
    "gpu": "H100 SXM 80GB",
    "model": "Qwen3-8B",
    "engine": "vLLM 0.30.0",
    "weights_dtype": "bf16",
    "kv_dtype": "auto",
    "input_len": 128,
    "output_len": 64,
    "concurrency": 4,
    "metrics": {"output_tok_s": 500.0, "itl_ms_mean": 7.5},
}


def test_all_shipped_lines_are_rows() -> None:
    rows = read_rows()
    assert len(rows) >= 424
    assert len({row.id for row in rows}) == len(rows)


def test_a_line_is_read() -> None:
    row = read_line(LINE | {"max_num_seqs": 2})
    assert (row.source, row.gpu.key, row.engine, row.rate) == ("there", "h100", "vllm", math.inf)
    assert row.tpot is not None
    assert (row.tpot.seconds, row.throughput) == (0.0075, 500.0)
    assert row.settings().max_num_seqs == 2
    assert row.planner().content["num_hidden_layers"] == 36


@pytest.mark.parametrize("weights", ["fp8", "awq"])
def test_quantised_weights_are_smaller(weights: str) -> None:
    plain, quantised = (read_line(LINE | {"weights_dtype": dtype}).work().dense.size for dtype in ("bf16", weights))
    assert quantised < 0.55 * plain


def test_a_config_may_lie_beside_the_file(tmp_path: Path) -> None:
    small = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    small |= {"intermediate_size": 128, "vocab_size": 100}
    (tmp_path / "small.json").write_text(json.dumps(small))
    (tmp_path / "lines.jsonl").write_text(json.dumps(LINE | {"model": "mine", "config": "small.json"}) + "\n")
    rows, refused = read_file(tmp_path / "lines.jsonl")
    assert not refused
    assert rows[0].work().layers == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": "llama.cpp"}, "no class of engines.toml is like 'llama.cpp'; known are TensorRT-LLM 0.9"),
        ({"model": "Mamba-3B"}, r"the config.json of Mamba-3B is missing .*; set `config`"),
        ({"config": "nowhere.json"}, "nowhere.json"),
        ({"weights_dtype": "int3"}, "weights_dtype is 'int3'; allowed are bf16, fp16, mxfp4, fp8, "),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'"),
        ({"num_gpus": 8}, "was measured on 8 GPUs; only one GPU can be predicted"),
        ({"output_len": None}, "has no output_len"),
        ({"input_len": "long"}, "input_len is 'long'; allowed is a positive number"),
        ({"output_len": 1}, "has outputs of 1 tokens, which have no time per token"),
        ({"concurrency": "four"}, "concurrency is 'four'"),
        ({"request_rate": -1}, "request_rate is -1"),
        ({"metrics": {"smiles": 3}}, "publishes neither throughput nor a time per token that is known: smiles"),
        ({"metrics": {"output_tok_s": 0}}, "allowed is an object of positive numbers"),
        ({"metrics": None}, "metrics are None"),
        ({"id": ""}, "has no id"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_the_reason(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        read_line(LINE | change)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="abacus"):
        read_line(LINE | {"gpu": "abacus"})
    assert read_line(LINE | {"gpu": "b200"}).gpu.key == "b200"


def test_a_gpu_that_cannot_be_what_it_is_called() -> None:
    assert read_line(LINE | {"id": "gpustack-qwen3-32b-h100-1"}).gpu.key == "h100-pcie"
    assert read_line(LINE | {"id": "gpustack-qwen3-8b-h100-latency-1"}).gpu.key == "h100"


def test_a_file_gives_what_it_has_and_drops_nothing(tmp_path: Path) -> None:
    lines = [json.dumps(LINE), "", "{", "[]", json.dumps(LINE | {"id": "there-2", "gpu": "abacus"})]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    rows, refused = read_file(tmp_path / "lines.jsonl")
    assert [row.id for row in rows] == ["there-1"]
    assert [name for name, _ in refused] == ["line 3", "line 4", "there-2"]
