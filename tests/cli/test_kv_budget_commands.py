"""Command lines that kv-budget prints: they can be pasted, and plan as the report says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from command_line import CommandLine
from configs import CONFIGS

from llmsched.engine.device import gpu_device
from llmsched.engine.memory.planner import open_planner
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.shipped_models import shipped_configs

QWEN = "Qwen/Qwen3-8B"
GIB = 1 << 30

pytestmark = pytest.mark.usefixtures("new_config_cache")


@pytest.fixture(autouse=True)
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    "arguments",
    [
        (QWEN, "--gpu", "l4"),
        (QWEN, "--gpu", "l4", "--gpu-memory-utilization", "0.93", "--max-num-batched-tokens", "512"),
        (QWEN, "--gpu", "h100", "--kv-cache-memory-bytes", "4GiB", "--block-size", "32", "--dtype", "float16"),
        (QWEN, "--gpu", "4090", "--users", "3", "--context", "8k", "--headroom", "0.2"),
        (QWEN, "--gpu", "h100", "--users", "40"),
        ("openai/gpt-oss-20b", "--gpu", "h100"),
        (str(CONFIGS / "Qwen--Qwen3-8B_config.json"), "--gpu", "l40s", "--max-num-seqs", "32"),
    ],
    ids=lambda arguments: " ".join(arguments[1:]),
)
def test_the_report_ends_with_a_serve_command_of_its_plan(arguments: tuple[str, ...], command: CommandLine) -> None:
    report = command("kv-budget", *arguments, "--json").json
    last = command("kv-budget", *arguments).out.splitlines()[-1]
    if any("llmsched serve does not support it" in note for note in report["notes"]):
        assert report["serve"] is None
        assert not last.startswith("llmsched serve")
        return
    assert last == report["serve"]
    config = command.served(last)
    plan = open_planner(config.model).plan(config, gpu_device(find_gpu(arguments[2])))
    assert (plan.num_blocks, plan.max_model_len) == (report["num_blocks"], report["max_model_len"])


def test_what_does_not_fit_ends_with_a_command_that_does(command: CommandLine) -> None:
    arguments = ("kv-budget", QWEN, "--gpu", "4090", "--users", "20", "--context", "8k")
    lines = command(*arguments).out.splitlines()
    assert lines[-2] == "with the cheapest change that works on this device:"
    config = command.served(lines[-1])
    plan = open_planner(QWEN).plan(config, gpu_device(find_gpu("4090")))
    assert plan.num_seqs_at(plan.max_model_len) >= 20


def test_lower_precision_is_named_first_and_fits(command: CommandLine) -> None:
    arguments = ("kv-budget", QWEN, "--gpu", "4090", "--users", "20", "--context", "8k")
    report = command(*arguments, "--json").json
    first = report["would_fit"][0]
    assert first["change"] == "set --quantization to int8 and --kv-cache-dtype to fp8"
    assert first["cost"] == "weights and KV are rounded to 8 bits"
    flags = ("--quantization", "int8", "--kv-cache-dtype", "fp8")
    narrow = command(*arguments, *flags, "--json").json
    assert narrow["fits"] is True
    assert narrow["weights_bytes"] + 20 * 8192 * narrow["kv_bytes_per_token"] == pytest.approx(19.4 * GIB, rel=0.01)
    assert {"--quantization int8", "--kv-cache-dtype fp8"} <= {*re.findall(r"--\S+ \S+", narrow["serve"])}
    flags = ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    emitted = shlex.split(command(*arguments, *flags, "--emit", "vllm-0.17").out)
    assert emitted[:3] == ["vllm", "serve", QWEN]
    assert {"--quantization", "--kv-cache-dtype", "fp8"} <= set(emitted)


def test_the_plan_for_vllm_is_vllms_own(command: CommandLine) -> None:
    arguments = ("kv-budget", "Qwen/Qwen3-32B", "--gpu", "h100")
    report = command(*arguments, "--emit", "vllm", "--json").json
    overhead = report["plan"]["activation_bytes"] + report["plan"]["context_bytes"]
    assert overhead == pytest.approx(5.78 * GIB, rel=0.03)
    assert "--max-num-seqs 1024 --max-num-batched-tokens 8192" in report["emit"]
    newer = command(*arguments, "--emit", "vllm-0.17", "--json").json
    assert newer["num_blocks"] > 1.5 * report["num_blocks"]
    own = command(*arguments, "--emit", "vllm", "--max-num-seqs", "64", "--max-num-batched-tokens", "2048").out
    assert "--max-num-seqs 64 --max-num-batched-tokens 2048" in own
    small = command("kv-budget", QWEN, "--gpu", "4090", "--emit", "vllm").out
    assert "--max-num-seqs 256 --max-num-batched-tokens 2048" in small


def test_a_config_file_is_emitted_as_the_model_that_it_belongs_to(command: CommandLine, tmp_path: Path) -> None:
    def model(path: Path, engine: str = "vllm") -> str:
        words = shlex.split(command("kv-budget", str(path), "--gpu", "h100", "--emit", engine).out)
        return words[2] if engine == "vllm" else words[words.index("--model-path") + 1]

    config, other = tmp_path / "config.json", tmp_path / "other.json"
    shutil.copy(CONFIGS / "Qwen--Qwen3-8B_config.json", config)
    assert model(config) == str(tmp_path)
    content = {**shipped_configs()[QWEN], "_name_or_path": "acme/model"}
    config.write_text(json.dumps(content))
    assert model(config) == model(config, "sglang") == "acme/model"
    (tmp_path / "model.safetensors").touch()
    assert model(config) == str(tmp_path)
    assert model(CONFIGS / "Qwen--Qwen3-8B_config.json") == QWEN
    other.write_text(json.dumps(content | {"_name_or_path": ""}))
    error = command.refused("kv-budget", str(other), "--gpu", "h100", "--emit", "vllm")
    assert "names no model; give its directory or its hub id as MODEL" in error
    assert command("kv-budget", str(other), "--gpu", "h100", "--json").json["serve"] is None
