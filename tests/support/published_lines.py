"""Reader of published measurements: measurements*.jsonl and files of the same form.

A line is a JSON object. It has `id`, `gpu`, `model`, `engine`, `weights_dtype` and `kv_dtype`. `input_len` and
`output_len` are mean numbers of tokens. A closed loop has `concurrency` or `batch`; another load has `request_rate`
(per second; "inf" sends all requests at once) and `num_requests`. `metrics` has `output_tok_s` or `total_tok_s`, and a
time per token such as `tpot_ms`, `itl_ms_mean` or `token_latency_ms_p50` (see `PublishedRow.tpot`).

Optional are `config` (path of the model's config.json, relative to the file), `max_num_seqs`, `max_num_batched_tokens`
and `num_gpus`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from published import DATA, PublishedRow

from llmsched.engine.architecture.quantization import QUANTIZATIONS
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.toml_files import UnknownNameError

#: Part of a model's name -> its file in model_configs. The most specific parts are first.
MODELS = {
    "Distill-Llama-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Distill-Qwen-14B": "Qwen--Qwen2.5-14B-Instruct",
    "Distill-Qwen-7B": "Qwen--Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Llama-3-8B": "meta-llama--Meta-Llama-3-8B",
    "Llama-3-70B": "meta-llama--Llama-3.1-70B",
    "Llama-3.1-70B": "meta-llama--Llama-3.1-70B",
    "Llama-3.3-70B": "meta-llama--Llama-3.1-70B",
    "Llama-2-7B": "meta-llama--Llama-2-7b",
    "Llama-2-13B": "meta-llama--Llama-2-13b",
    "Mistral-7B": "mistralai--Mistral-7B-Instruct-v0.2",
    "Mixtral-8x7B": "mistralai--Mixtral-8x7B-v0.1",
    "gpt-oss-20b": "openai--gpt-oss-20b",
    "Qwen3-30B-A3B": "Qwen--Qwen3-30B-A3B",
    "Qwen3-0.6B": "Qwen--Qwen3-0.6B",
    "Qwen3-8B": "Qwen--Qwen3-8B",
    "Qwen3-14B": "Qwen--Qwen3-14B",
    "Qwen3-32B": "Qwen--Qwen3-32B",
    "Qwen2.5-7B": "Qwen--Qwen2.5-7B-Instruct",
    "Qwen2.5-14B": "Qwen--Qwen2.5-14B-Instruct",
    "Qwen2.5-32B": "Qwen--Qwen2.5-32B-Instruct",
}
#: Beginning of a row's GPU -> key in gpus.toml. The most specific beginnings are first.
GPUS = {
    "A100 PCIe": "a100-80gb-pcie",
    "A100": "a100-80gb",
    "H100 PCIe": "h100-pcie",
    "H100": "h100",
    "H200": "h200",
    "H20": "h20",
    "L40S": "l40s",
    "RTX 3090": "rtx3090",
    "RTX 4090": "rtx4090",
    "RTX 4070 Laptop": "laptop-rtx4070",
}
#: Beginning of a row's id -> key in gpus.toml, for rows that were not measured on the GPU that they name. These pages
#: name an H100. Their GPU reads the 65.5 GB of Qwen3-32B in 43 ms (1.5 TB/s, less than half of an H100 SXM's rate) and
#: computes at most 380 TFLOP/s. The page on latency is different: its GPU reads 16.4 GB in 7.2 ms.
OTHER_GPUS = {
    f"gpustack-{page}": "h100-pcie"
    for page in ("qwen3-14b-h100", "qwen3-32b-h100", "gpt-oss-20b-h100", "quant-qwen3-8b-H100")
}
#: Beginning of a row's engine -> engine class in engines.toml.
ENGINES = {
    "TensorRT-LLM 0.9": "tensorrt-llm-static",
    "TensorRT-LLM": "tensorrt-llm",
    "NVIDIA NIM": "nim",
    "vLLM": "vllm",
    "SGLang": "sglang",
    "LMDeploy": "lmdeploy",
}
#: Types of weights for which the model's config needs no change.
PLAIN = ("bf16", "fp16", "mxfp4")


class Refused(NamedTuple):
    """Line that cannot be predicted, with the reason."""

    id: str
    reason: str


class RefusedError(ValueError):
    """Error for a line that cannot be predicted. The message says why."""


def read_rows() -> list[PublishedRow]:
    """Return all rows in tests/data, in the order of the files. Raises RefusedError if a line cannot be predicted."""
    rows: list[PublishedRow] = []
    for name in ("measurements.jsonl", "measurements_more.jsonl"):
        found, refused = read_file(DATA / name)
        if refused:
            raise RefusedError(f"{name}: {refused[0].id}: {refused[0].reason}")
        rows += found
    return rows


def read_file(path: Path) -> tuple[list[PublishedRow], list[Refused]]:
    """Return the rows of a file, and the lines that cannot be predicted. Raises OSError for an unreadable file."""
    rows: list[PublishedRow] = []
    refused: list[Refused] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        name = f"line {number}"
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise RefusedError("is not a JSON object")
            name = str(line.get("id", name))
            rows.append(read_line(line, path.parent))
        except json.JSONDecodeError as problem:
            refused.append(Refused(name, f"is not JSON ({problem})"))
        except (RefusedError, UnknownNameError, LlmschedError) as problem:
            refused.append(Refused(name, str(problem)))
    return rows, refused


def read_line(line: Mapping[str, Any], directory: Path = DATA) -> PublishedRow:
    """Return the row of one line. A `config` is relative to `directory`.

    Raises RefusedError or UnknownNameError if the line cannot be predicted.
    """
    if _number(line, "num_gpus", 1) != 1:
        raise RefusedError(f"was measured on {line['num_gpus']} GPUs; only one GPU can be predicted")
    gpu = _text(line, "gpu")
    engine = _by_beginning(ENGINES, _text(line, "engine"))
    if engine is None:
        raise RefusedError(f"no class of engines.toml is like {line['engine']!r}; known are {', '.join(ENGINES)}")
    metrics = _metrics(line)
    model = _text(line, "model")
    weights = _weights(_text(line, "weights_dtype"), model)
    lengths = _lengths(line, metrics)
    running = "concurrency" if line.get("concurrency") else "batch"
    row = PublishedRow(
        id=_text(line, "id"),
        source=_text(line, "id").split("-")[0],
        gpu=find_gpu(_by_beginning(OTHER_GPUS, _text(line, "id")) or _by_beginning(GPUS, gpu) or gpu),
        engine=engine,
        model=model,
        config=_config(line, model, directory),
        weights=weights,
        kv=_kv(str(line.get("kv_dtype", "auto")), weights),
        input_len=lengths[0],
        output_len=lengths[1],
        concurrency=None if line.get(running) is None else int(_number(line, running, 1)),
        rate=_number(line, "request_rate", math.inf),
        num_requests=None if line.get("num_requests") is None else int(_number(line, "num_requests", 1)),
        limits={
            name: int(_number(line, name, 1)) for name in ("max_num_seqs", "max_num_batched_tokens") if name in line
        },
        metrics=metrics,
    )
    if row.tpot is None and row.throughput is None:
        raise RefusedError(f"publishes neither throughput nor a time per token that is known: {', '.join(metrics)}")
    if row.tpot is not None and row.output_len < 2:
        raise RefusedError(f"has outputs of {row.output_len:g} tokens, which have no time per token")
    return row


def _text(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str) or not value:
        raise RefusedError(f"has no {name}")
    return value


def _number(line: Mapping[str, Any], name: str, default: float) -> float:
    try:
        value = float(line.get(name) or default)
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise RefusedError(f"{name} is {line[name]!r}; allowed is a positive number")
    return value


def _metrics(line: Mapping[str, Any]) -> dict[str, float]:
    stated = line.get("metrics")
    metrics = {} if not isinstance(stated, dict) else {k: v for k, v in stated.items() if isinstance(v, int | float)}
    if "token_latency_s_p50" in metrics:
        metrics["token_latency_ms_p50"] = metrics.pop("token_latency_s_p50") * 1e3
    if not metrics or not all(0 < value < math.inf for value in metrics.values()):
        raise RefusedError(f"metrics are {stated!r}; allowed is an object of positive numbers")
    return metrics


def _lengths(line: Mapping[str, Any], metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return the mean tokens of prompts and of outputs. If they are not stated, compute them from the rates."""
    if line.get("input_len") is None and line.get("output_len") is None:
        if not {"output_tok_s", "total_tok_s", "req_s"} <= set(metrics):
            raise RefusedError("has no input_len and output_len")
        mean = metrics["output_tok_s"] / metrics["req_s"]
        return mean * (metrics["total_tok_s"] / metrics["output_tok_s"] - 1), mean
    if line.get("output_len") is None:
        raise RefusedError("has no output_len")
    return _number(line, "input_len", 32), _number(line, "output_len", 1)


def _config(line: Mapping[str, Any], model: str, directory: Path) -> Path:
    """Return the path of the model's config.json."""
    if isinstance(line.get("config"), str):
        path = directory / line["config"]
    else:
        name = next((file for part, file in MODELS.items() if part.lower() in model.lower()), model.replace("/", "--"))
        path = DATA / "model_configs" / f"{name}_config.json"
    if not path.is_file():
        raise RefusedError(f"the config.json of {model} is missing ({path}); set `config`")
    return path


def _weights(stated: str, model: str) -> str:
    weights = stated.split()[0]
    if weights == "fp8" and "Qwen3" in model:
        return "fp8_block"  # the checkpoints that Qwen published
    if weights not in (*PLAIN, *QUANTIZATIONS):
        raise RefusedError(f"weights_dtype is {stated!r}; allowed are {', '.join((*PLAIN, *QUANTIZATIONS))}")
    return weights


def _kv(stated: str, weights: str) -> str:
    """Return the KV dtype, "fp8" or "16 bits". If `stated` is "unknown", the weights decide."""
    if stated.startswith("unknown"):
        return "fp8" if weights.startswith("fp8") else "16 bits"
    if not stated.startswith(("auto", "fp8", "bf16", "fp16")):
        raise RefusedError(f"kv_dtype is {stated!r}; allowed are auto, bf16, fp16 and fp8")
    return "fp8" if stated.startswith("fp8") else "16 bits"


def _by_beginning(names: Mapping[str, str], name: str) -> str | None:
    return next((value for beginning, value in names.items() if name.lower().startswith(beginning.lower())), None)
