"""Questions to kv-budget: users, lengths, all GPUs, KV dtypes and other engines."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from configs import CONFIGS

from llmsched.engine.device import DeviceMemory, Holder
from llmsched.profiles.gpus import gpus

LLAMA = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")
GIB = 1 << 30

pytestmark = pytest.mark.usefixtures("new_config_cache")


# Users and context.


def test_users_that_fit(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu", "h100", "--users", "32", "--context", "8k", "--json")
    assert outcome.code == 0
    answer = outcome.json
    assert (answer["fits"], answer["users"], answer["context"]) == (True, 32, 8192)
    assert (answer["plan"]["max_num_seqs"], answer["max_model_len"]) == (32, 8192)
    assert answer["max_num_seqs"] >= 32
    assert answer["would_fit"] == []
    text = command("kv-budget", LLAMA, "--gpu", "h100", "--users", "32", "--context", "8k").out
    assert "fits: 32 requests of 8,192 tokens at the same time" in text


def test_quantised_weights_leave_more_room(command: CommandLine) -> None:
    plain, small = (
        command("kv-budget", LLAMA, "--gpu", "l4", "--max-model-len", "8k", "--json", *more).json
        for more in ((), ("--quantization", "awq"))
    )
    assert small["weights_bytes"] < 0.45 * plain["weights_bytes"]
    assert small["num_blocks"] > 2 * plain["num_blocks"]


def test_users_that_do_not_fit_get_changes_that_work(command: CommandLine) -> None:
    arguments = ("kv-budget", LLAMA, "--gpu", "l40s", "--users", "26", "--context", "8192")
    outcome = command(*arguments, "--json")
    assert outcome.code == 1
    answer = outcome.json
    assert answer["fits"] is False
    assert answer["problem"].startswith("26 requests of 8,192 tokens need 26 x 512 = 13,312 blocks (26.0 GiB)")
    cheapest = answer["would_fit"][0]
    assert cheapest["settings"].keys() == {"gpu_memory_utilization"}
    assert cheapest["change"].startswith("raise --gpu-memory-utilization to 0.9")
    changed = command(*arguments, "--gpu-memory-utilization", str(cheapest["settings"]["gpu_memory_utilization"]))
    assert changed.code == 0
    text = command(*arguments).out
    assert "does not fit: 26 requests" in text
    assert "cheapest change: raise --gpu-memory-utilization to 0.9" in text
    assert "or: use a GPU like rtxa6000" in text or "or: use a GPU like rtx6000ada" in text


def test_users_without_a_context_get_the_longest(command: CommandLine) -> None:
    for extra in ((), ("--max-model-len", "auto")):
        answer = command("kv-budget", LLAMA, "--gpu", "h100", "--users", "32", *extra, "--json").json
        assert answer["fits"] is True
        assert answer["context"] == answer["max_model_len"]
        longer = str(answer["max_model_len"] + 16)
        asked = ("--users", "32", "--context", longer)
        assert command("kv-budget", LLAMA, "--gpu", "h100", *asked).code == 1


def test_automatic_length_is_what_the_model_and_the_memory_allow(command: CommandLine) -> None:
    automatic = command("kv-budget", LLAMA, "--gpu", "l4", "--max-model-len", "auto", "--json").json
    assert automatic["max_model_len"] == automatic["kv_tokens"]
    assert automatic == command("kv-budget", LLAMA, "--gpu", "l4", "--json").json


# All GPUs.


def test_all_gpus_are_compared_and_counted(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu", "all", "--users", "64", "--context", "8k", "--json")
    assert outcome.code == 0
    answer = outcome.json
    found = {entry["gpu"]: entry for entry in answer["gpus"]}
    assert found.keys() == gpus().keys()
    assert [entry["total_bytes"] for entry in answer["gpus"]] == sorted(e["total_bytes"] for e in found.values())
    for entry in found.values():
        assert entry["fits"] == (entry["max_num_seqs"] >= 64)
        if entry["max_num_seqs"]:
            assert entry["replicas"] == -(-64 // entry["max_num_seqs"])
    assert (found["t4"]["fits"], found["t4"]["replicas"], found["t4"]["dtype"]) == (False, None, "float32")
    one = command("kv-budget", LLAMA, "--gpu", "a100-40gb", "--users", "64", "--context", "8k", "--json").json
    assert one["num_blocks"] == found["a100-40gb"]["num_blocks"]
    text = command("kv-budget", LLAMA, "--gpu", "all", "--users", "64", "--context", "8k").out
    assert "the smallest GPU that fits: NVIDIA H20\n" in text
    assert "name one with --gpu to simulate how many meet latency targets" in text


def test_no_gpu_at_all(command: CommandLine) -> None:
    deepseek = str(CONFIGS / "deepseek-ai--DeepSeek-V3_config.json")
    outcome = command("kv-budget", deepseek, "--gpu", "all", "--json")
    assert outcome.code == 1
    assert outcome.json["fits"] is False
    assert "it fits on none of these GPUs" in command("kv-budget", deepseek, "--gpu", "all").out


# Lengths.


def test_a_trace(command: CommandLine, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"t,{100 + 40 * (i % 50)},{20 + i % 200}" for i in range(1000))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    arguments = ("kv-budget", LLAMA, "--gpu", "l4", "--max-model-len", "2048", "--lengths", str(trace))
    answer = command(*arguments, "--json").json
    lengths = answer["lengths"]
    assert lengths["source"] == "trace.csv"
    assert lengths["requests"] + lengths["refused"] == 1000
    assert [row["percentile"] for row in lengths["percentiles"]] == [50, 90, 95, 99]
    for row in lengths["percentiles"]:
        assert row["max_num_seqs"] == answer["num_blocks"] // -(-(row["length"] - 1) // 16)
        assert 0 <= row["preemption_probability"] <= 1
    risks = [row["preemption_probability"] for row in lengths["percentiles"]]
    assert risks == sorted(risks, reverse=True)
    safe = {
        row["preemption_probability"]: row["max_num_seqs"] for row in lengths["max_num_seqs_at_preemption_probability"]
    }
    assert 0 < safe[0.01] <= safe[0.05]
    assert lengths["at_max_num_seqs"]["max_num_seqs"] == 128
    text = command(*arguments).out
    assert "preemption probability" in text
    assert "at --max-num-seqs" in text


def test_mean_and_variation(command: CommandLine) -> None:
    arguments = ("kv-budget", LLAMA, "--gpu", "l4", "--mean-len", "1500", "--cv-len", "0.8", "--json")
    answer = command(*arguments).json
    assert answer["mean_len"] == 1500
    assert answer["lengths"]["mean"] == pytest.approx(1500, rel=0.02)
    assert answer["max_num_seqs_at_mean_len"] == answer["num_blocks"] // 94
    assert answer["lengths"]["percentiles"][0]["length"] < 1500 < answer["lengths"]["percentiles"][1]["length"]


# Types of KV.


def test_fp8_kv_doubles_tokens_with_a_note(command: CommandLine) -> None:
    arguments = ("kv-budget", LLAMA, "--kv-cache-memory-bytes", "4GiB", "--json")
    wide, narrow = (command(*arguments, "--gpu", "l4", "--kv-cache-dtype", kind).json for kind in ("auto", "fp8"))
    assert (wide["kv_cache_dtype"], narrow["kv_cache_dtype"]) == ("bfloat16", "fp8")
    assert narrow["kv_tokens"] == 2 * wide["kv_tokens"]
    assert 2 * narrow["kv_bytes_per_token"] == wide["kv_bytes_per_token"]
    assert narrow["weights_bytes"] == wide["weights_bytes"]
    assert "--kv-cache-dtype fp8 " in narrow["serve"]


def test_e4m3_is_planned_but_not_served_before_ada(command: CommandLine) -> None:
    arguments = ("kv-budget", LLAMA, "--gpu", "a100-40gb", "--json", "--kv-cache-dtype")
    older = command(*arguments, "fp8_e4m3").json
    assert older["serve"] is None
    assert any("A100" in note and "use fp8_e5m2, or bfloat16" in note for note in older["notes"])
    assert "--kv-cache-dtype fp8_e5m2" in command(*arguments, "fp8_e5m2").json["serve"]


@pytest.mark.parametrize(("scheme", "wanted"), [({"num_bits": 8, "type": "float"}, "fp8"), (None, "bfloat16")])
def test_the_checkpoint_decides_the_default_kv_dtype(
    command: CommandLine, tmp_path: Path, scheme: Any, wanted: str
) -> None:
    content = json.loads(Path(LLAMA).read_text())
    content["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": scheme}
    (tmp_path / "config.json").write_text(json.dumps(content))
    answer = command("kv-budget", str(tmp_path), "--gpu", "l4", "--json").json
    assert answer["kv_cache_dtype"] == wanted
    forced = command("kv-budget", str(tmp_path), "--gpu", "l4", "--kv-cache-dtype", "bfloat16", "--json").json
    assert forced["kv_cache_dtype"] == "bfloat16"


# Other engines.


def test_the_command_line_of_vllm(command: CommandLine) -> None:
    arguments = ("kv-budget", LLAMA, "--gpu", "h100", "--users", "32", "--context", "8k", "--emit", "vllm")
    outcome = command(*arguments, "--kv-cache-dtype", "fp8")
    assert outcome.code == 0
    words = shlex.split(outcome.out)
    assert words[:3] == ["vllm", "serve", "meta-llama/Meta-Llama-3.1-8B"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "fp8",
        "--max-model-len": "8192",
        "--max-num-seqs": "32",
        "--max-num-batched-tokens": "8192",
        "--block-size": "16",
        "--gpu-memory-utilization": "0.9",
    }
    assert command(*arguments, "--json").json["emit"].startswith("vllm serve ")


def test_the_command_line_of_sglang(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu", "h100", "--max-model-len", "8192", "--emit", "sglang")
    words = shlex.split(outcome.out)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert (flags["--context-length"], flags["--max-running-requests"]) == ("8192", "128")
    answer = command("kv-budget", LLAMA, "--gpu", "h100", "--max-model-len", "8192", "--json").json
    static = (answer["weights_bytes"] + answer["plan"]["kv_bytes"]) / answer["plan"]["total_bytes"]
    assert float(flags["--mem-fraction-static"]) == pytest.approx(static, abs=0.001)
    fixed = command("kv-budget", LLAMA, "--gpu", "h100", "--kv-cache-memory-bytes", "4GiB", "--emit", "sglang").out
    assert "--max-total-tokens 32768" in fixed


def test_what_does_not_fit_is_not_emitted(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu-memory", "12GiB", "--emit", "vllm")
    assert outcome.code == 1
    assert "vllm serve" not in outcome.out
    assert "does not fit" in outcome.out


# The rest of the report.


def test_steps_processes_and_headroom(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    here = DeviceMemory("cuda", "shared GPU", 80 * GIB, 20 * GIB, (Holder(4711, "python3", 20 * GIB),))
    monkeypatch.setattr("llmsched.cli.kv_budget.budget_options.device_memory", lambda device: here)
    answer = command("kv-budget", LLAMA, "--max-model-len", "8192", "--headroom", "0.2", "--json").json
    assert answer["plan"]["processes"] == [{"pid": 4711, "name": "python3", "bytes": 20 * GIB}]
    assert any("process 4711 (python3) holds 20.0 GiB" in note for note in answer["notes"])
    assert answer["plan"]["headroom_blocks"] == int(0.2 * answer["num_blocks"])
    costs = {step["max_num_batched_tokens"]: step for step in answer["max_num_batched_tokens_cost"]}
    assert costs[2048]["blocks_lost"] == 0 < costs[16384]["blocks_lost"]
    assert costs[16384]["num_blocks"] == answer["num_blocks"] - costs[16384]["blocks_lost"]
    text = command("kv-budget", LLAMA, "--max-model-len", "8192").out
    assert "What larger steps cost" in text
    assert "other programs 20.0 GiB" in text


def test_mla_is_planned_as_latent_vectors(command: CommandLine) -> None:
    deepseek = str(CONFIGS / "deepseek-ai--DeepSeek-V3_config.json")
    answer = command("kv-budget", deepseek, "--gpu", "b200", "--json").json
    assert answer["kv_bytes_per_token"] == 70272
    assert answer["cached_bytes_per_token"] == answer["groups"][0]["bytes_per_token"] == 61 * 576 * 2
    assert "70,272" in command("kv-budget", deepseek, "--gpu", "b200").out


#: Files of models whose parameters only transformers could count.
RARE = ("moonshotai--Kimi-K3",)


def test_no_published_model_needs_torch_or_transformers(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from llmsched.cli.main import main\n"
        "for number, path in enumerate(sys.argv[1:]):\n"
        "    sys.argv = ['llmsched', 'kv-budget', path, '--gpu', 'b200', *['--json'] * (number % 2)]\n"
        "    try: main()\n"
        "    except SystemExit as done: assert done.code in (None, 0, 1), (path, done.code)\n"
        "    heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "    assert not heavy, (path, heavy)\n"
    )
    files = [str(file) for file in sorted(CONFIGS.glob("*.json")) if not file.name.startswith(RARE)]
    command = [sys.executable, "-c", code, *files]
    new_cache = {**os.environ, "LLMSCHED_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=new_cache, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
