"""`llmsched kv-budget` on the command line: JSON document, report, exit codes, and light imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine, Terminal
from configs import CONFIGS, published_config
from gguf_files import write_gguf
from tiny_models import build_model, build_tokenizer

from llmsched.cli.kv_budget.text_report import stacked_bar
from llmsched.engine.architecture.config_fields import read_config_file
from llmsched.engine.architecture.shape import model_shape
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.memory.planner import plan_memory

LLAMA = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")
GIB = 1 << 30
#: Configs with an unknown setting, or with a name that contradicts them.
ESTIMATED = ("moonshotai--Kimi-K3", "nvidia--Llama-3.1-70B-Instruct-FP8")

pytestmark = pytest.mark.usefixtures("new_config_cache")


def test_the_json_contract(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu-memory", "24GiB", "--max-model-len", "8192", "--json")
    assert outcome.code == 0
    answer = outcome.json
    plan = answer["plan"]
    assert answer["kv_bytes_per_token"] == 131072
    assert answer["block_size"] == 16
    assert answer["weights_bytes"] == 2 * 8030261248
    parts = ("weights_bytes", "activation_bytes", "context_bytes", "graph_bytes", "state_bytes")
    fixed = sum(plan[part] for part in parts)
    assert plan["graph_bytes"] > 0
    assert answer["available_kv_bytes"] == int(0.9 * 24 * GIB) - fixed
    assert answer["num_blocks"] == answer["available_kv_bytes"] // (16 * 131072)
    assert answer["max_model_len"] == 8192
    assert answer["max_num_seqs"] == answer["num_blocks"] // 512
    assert answer["confidence"] == "exact"
    assert answer["fits"] is True
    assert answer["problem"] is None
    assert [group["kind"] for group in answer["groups"]] == ["full"]
    assert {"kv_bytes_per_token_window", "window", "state_bytes_per_seq", "notes"} <= answer.keys()


def test_it_is_the_plan_that_serve_allocates_by(command: CommandLine) -> None:
    answer = command(
        "kv-budget", LLAMA, "--gpu", "L40S", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--json"
    ).json
    device = DeviceMemory("cuda", "L40S", round(44.39 * GIB))
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=4096)
    plan = plan_memory(model_shape(read_config_file(Path(LLAMA)), dtype_bytes=2), config, device, dtype_bytes=2)
    assert answer["num_blocks"] == plan.num_blocks
    assert answer["max_model_len"] == plan.max_model_len
    assert answer["max_num_seqs"] == plan.max_num_seqs
    assert answer["plan"]["activation_bytes"] == plan.activation_bytes


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.name.split("_")[0])
def test_every_config_gives_a_whole_report(command: CommandLine, file: Path) -> None:
    outcome = command("kv-budget", str(file), "--gpu", "b200", "--json")
    answer = outcome.json
    assert outcome.code == (0 if answer["fits"] else 1)
    assert answer["kv_bytes_per_token"] > 0
    assert answer["kv_confidence"] == ("estimate" if file.name.startswith(ESTIMATED) else "exact")
    text = command("kv-budget", str(file), "--gpu", "b200").out
    assert f"{answer['groups'][0]['bytes_per_token']:,} B per token" in text or answer["state_bytes_per_seq"]


def test_the_report_fills_in_the_formula(command: CommandLine) -> None:
    out = command("kv-budget", LLAMA, "--gpu-memory", "24GiB", "--max-model-len", "8192", "--mean-len", "1500").out
    assert "32 layers x 8 KV heads x 2 x 128 x 2 B = 131,072 B per token" in out
    assert "16 tokens x 131,072 B = 2.00 MiB" in out
    assert "24.0 GiB x 0.9 - 15.0 GiB weights" in out
    assert "1,500 (mean)" in out
    assert "8,192 (max_model_len)" in out
    assert "W weights 15.0 GiB" in out
    assert "\x1b" not in out


def test_capacities_by_length_are_the_same_in_json_and_in_the_report(command: CommandLine) -> None:
    question = ("kv-budget", LLAMA, "--gpu-memory", "24GiB", "--max-model-len", "8192", "--mean-len", "1500")
    answer = command(*question, "--json").json
    rows = answer["max_num_seqs_by_length"]
    assert [row["length"] for row in rows] == [512, 1500, 2048, 8192]
    assert rows[2] == {"length": 2048, "blocks_each": 128, "max_num_seqs": answer["num_blocks"] // 128}
    assert rows[3]["max_num_seqs"] == answer["max_num_seqs"]
    table = command(*question).out.partition("blocks each  fit at once\n")[2].splitlines()[: len(rows)]
    for row, line in zip(rows, table, strict=True):
        cells = line.split()
        assert [cells[0], *cells[-2:]] == [f"{row[name]:,}" for name in ("length", "blocks_each", "max_num_seqs")]


def test_a_model_that_does_not_fit_is_an_answer(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu-memory", "12GiB", "--json")
    assert outcome.code == 1
    answer = outcome.json
    assert answer["fits"] is False
    assert (answer["num_blocks"], answer["max_num_seqs"], answer["available_kv_bytes"]) == (0, 0, 0)
    assert answer["kv_bytes_per_token"] == 131072
    assert "weights 15.0 GiB" in answer["problem"]
    text = command("kv-budget", LLAMA, "--gpu-memory", "12GiB")
    assert text.code == 1
    assert "does not fit: --gpu-memory-utilization: weights 15.0 GiB" in text.out
    assert "leaves nothing" in text.out


def test_a_context_that_does_not_fit_proposes_one(command: CommandLine) -> None:
    outcome = command("kv-budget", LLAMA, "--gpu", "l4", "--max-model-len", "100000", "--json")
    assert outcome.code == 1
    assert f"use at most {outcome.json['kv_tokens']}" in outcome.json["problem"]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--gpu", "a100"), "a100-40gb or a100-80gb"),
        (("--gpu", "abacus"), "known are t4"),
        (("--gpu", "l4", "--gpu-memory", "24GiB"), "leave out --gpu or --gpu-memory"),
        (("--gpu", "l4", "--device", "cpu"), "leave out one of them"),
        (("--gpu-memory", "24"), "GiB"),
        (("--gpu-memory", "-24GiB"), "not above zero"),
        (("--gpu-memory-utilization", "1.3"), "1.3 is out of range; allowed is from 0.01 to 1"),
        (("--block-size", "0"), "allowed is from 1 to 256"),
        (("--mean-len", "0"), "1 to 16777216"),
        (("--max-model-len", "200000"), "--max-model-len: 200000 is beyond the 131072 positions"),
        (("--mean-len", "9000", "--max-model-len", "8192"), "9000 is beyond --max-model-len 8192"),
        (("--enable-prefix-caching",), "--enable-prefix-caching"),
        (("--users", "0"), "--users"),
        (("--context", "-8k"), "tokens from 1 to"),
        (("--context", "8q"), "8 x 1024"),
        (("--max-model-len", "long"), "8192 or 8k"),
        (("--context", "200k"), "--context: 204800 is beyond the 131072 positions"),
        (("--context", "9k", "--max-model-len", "8k"), "9216 tokens exceed --max-model-len 8192"),
        (("--users", "9", "--max-num-seqs", "8"), "9 exceed --max-num-seqs 8"),
        (("--cv-len", "1"), "give --mean-len as well"),
        (("--mean-len", "100", "--cv-len", "-1"), "must be 0 to 10"),
        (("--lengths", "missing.csv"), "--lengths: missing.csv: No such file"),
        (("--lengths", "missing.csv", "--cv-len", "1"), "leave out one of them"),
        (("--emit", "ollama"), "vllm"),
        (("--gpu", "all", "--emit", "vllm"), "name it with --gpu"),
        (
            ("--quantization", "awq", "--emit", "vllm"),
            "--emit: needs a checkpoint that exists; name one in awq as MODEL",
        ),
        (("--kv-cache-dtype", "int8"), "fp8"),
        (("--headroom", "0.9"), "allowed is from 0 to 0.5"),
        (("--simulate", "h1000"), "did you mean h100"),
        (("--simulate", "all"), "is for one device"),
        (("--simulate", "h100", "--gpu", "l4"), "leave out --gpu"),
        (("--simulate", "h100", "--gpu-memory", "24GiB"), "leave out --gpu"),
        (("--simulate", "h100", "--emit", "vllm"), "leave out --emit or --simulate"),
    ],
)
def test_bad_input_is_one_line(command: CommandLine, arguments: tuple[str, ...], wanted: str) -> None:
    device = () if {"--gpu", "--gpu-memory", "--simulate"} & set(arguments) else ("--gpu", "l4")
    assert wanted in command.refused("kv-budget", LLAMA, *device, *arguments)


GEMMA_4 = published_config("google--gemma-4-26B-A4B")
del GEMMA_4["text_config"]["num_experts"]
LLAMA_FIELDS = read_config_file(Path(LLAMA))


def write_config(directory: Path, content: Any) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_an_assumption_is_told_once(command: CommandLine, tmp_path: Path) -> None:
    content = {name: value for name, value in LLAMA_FIELDS.items() if name != "num_key_value_heads"}
    outcome = command("kv-budget", write_config(tmp_path, content), "--gpu", "l4")
    assert outcome.out.count("does not state num_key_value_heads") == 1


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"hidden_size": 64}, "no layers"),
        ([], "holds a list"),
        ({"model_type": "t5", "num_layers": 2}, "encoder-decoder"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "does not divide"),
        (GEMMA_4, "config has num_experts None; it must be a whole number"),
        (
            LLAMA_FIELDS | {"rope_scaling": "yarn"},
            "config has rope_scaling 'yarn'; it must be an object",
        ),
        (
            LLAMA_FIELDS | {"rope_scaling": {"type": "foo", "factor": 2}},
            "rope_scaling of the unknown type 'foo'; known are",
        ),
    ],
)
def test_bad_configs_are_one_line(command: CommandLine, tmp_path: Path, content: Any, wanted: str) -> None:
    assert wanted in command.refused("kv-budget", write_config(tmp_path, content), "--gpu", "l4")


def test_a_wrong_model_is_one_line(command: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    for path in (tmp_path / "config.json", tmp_path, tmp_path / "model.gguf", tmp_path / "notes.txt"):
        assert str(path) in command.refused("kv-budget", str(path))


def test_a_bare_attention_config_is_an_estimate(command: CommandLine, tmp_path: Path) -> None:
    text = {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    path = write_config(tmp_path, {"num_hidden_layers": 33, "llm_config": text})
    answer = command("kv-budget", path, "--gpu-memory", "24GiB", "--json").json
    assert answer["kv_bytes_per_token"] == 163840
    assert answer["confidence"] == "estimate"
    assert any("weights are not counted" in note for note in answer["notes"])
    sized = command("kv-budget", path, "--gpu-memory", "24GiB", "--weights", "10GiB", "--json").json
    assert sized["weights_bytes"] == 10 * GIB
    assert sized["available_kv_bytes"] == answer["available_kv_bytes"] - 10 * GIB


def test_windows_beside_recurrent_layers_or_without_a_length_keep_all_tokens(
    command: CommandLine, tmp_path: Path
) -> None:
    config = {
        **{"model_type": "recurrent_gemma", "architectures": ["RecurrentGemmaForCausalLM"], "hidden_size": 64},
        **{"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "num_attention_heads": 4},
        **{"attention_window_size": 32, "intermediate_size": 96, "vocab_size": 320},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("kv-budget", str(tmp_path), "--gpu-memory", "24GiB", "--json")
    assert any(
        "keep all tokens, because the context length is not known" in note for note in command(*asked).json["notes"]
    )
    notes = command(*asked, "--max-model-len", "4096").json["notes"]
    assert any("keep all tokens, because the model has recurrent layers" in note for note in notes)


def test_window_layers_are_stated_apart_and_cost_what_is_kept_of_them(command: CommandLine) -> None:
    path = CONFIGS / "openai--gpt-oss-20b_config.json"
    answer = command("kv-budget", str(path), "--gpu", "h100", "--max-model-len", "8192", "--json").json
    assert (answer["kv_bytes_per_token"], answer["kv_bytes_per_token_window"], answer["window"]) == (24576, 24576, 128)
    assert answer["block_bytes"] == 16 * 24576
    assert answer["cached_bytes_per_token"] == 49152
    assert answer["max_num_seqs"] == answer["num_blocks"] // (512 + 9)
    assert any("holds 195 MiB; with all tokens in all layers it would hold 384 MiB" in note for note in answer["notes"])
    assert any("4.5 bits in experts" in note for note in answer["notes"])


def test_a_gpu_without_bfloat16_computes_in_float32(command: CommandLine) -> None:
    automatic = command("kv-budget", LLAMA, "--gpu", "t4", "--json").json
    assert (automatic["dtype"], automatic["kv_bytes_per_token"]) == ("float32", 2 * 131072)
    assert any("does not compute in bfloat16" in note for note in automatic["notes"])
    half = command("kv-budget", LLAMA, "--gpu", "t4", "--dtype", "float16", "--json").json
    assert (half["dtype"], half["kv_bytes_per_token"]) == ("float16", 131072)


def test_this_machine_is_planned_for_when_no_gpu_is_named(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    here = DeviceMemory("cpu", "CPU of the test", 64 * GIB, 56 * GIB)
    monkeypatch.setattr("llmsched.cli.kv_budget.budget_options.device_memory", lambda device: here)
    answer = command("kv-budget", str(tiny_model("llama")), "--json").json
    assert answer["plan"]["device"] == "CPU of the test"
    assert answer["available_kv_bytes"] == 2 * GIB
    assert answer["weights_from"] == "safetensors"
    assert "min(4 GiB, 8.00 GiB available / 4)" in command("kv-budget", str(tiny_model("llama"))).out


def test_a_directory_and_its_gguf_agree(command: CommandLine, tmp_path: Path) -> None:
    model, path = build_model("llama"), tmp_path / "tiny.gguf"
    model.save_pretrained(tmp_path / "directory")
    write_gguf(path, model, build_tokenizer(), arch="llama")
    answers = [command("kv-budget", str(each), "--gpu", "l4", "--json").json for each in (tmp_path / "directory", path)]
    for key in ("kv_bytes_per_token", "weights_bytes", "num_blocks", "max_model_len"):
        assert answers[0][key] == answers[1][key], key
    assert answers[0]["weights_from"] == "safetensors"


def test_the_quantisation_file_beside_the_config_counts(command: CommandLine, tmp_path: Path) -> None:
    path = write_config(tmp_path, published_config("nvidia--Llama-3.1-70B-Instruct-FP8"))
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    for model in (path, str(tmp_path)):
        answer = command("kv-budget", model, "--gpu", "h200", "--json").json
        assert answer["weights_bytes"] == pytest.approx(67.67 * GIB, rel=0.001)
        assert (answer["kv_cache_dtype"], answer["kv_bytes_per_token"]) == ("fp8", 163840)
        assert (answer["fits"], answer["confidence"]) == (True, "estimate")
    assert not any("llmsched serve does not support it" in note for note in answer["notes"])


def test_a_name_that_says_fp8_is_believed_rather_than_a_silent_config(command: CommandLine) -> None:
    file = CONFIGS / "nvidia--Llama-3.1-70B-Instruct-FP8_config.json"
    answer = command("kv-budget", str(file), "--gpu", "b200", "--json").json
    assert answer["confidence"] == answer["kv_confidence"] == "estimate"
    assert any("the name says FP8, but no file describes quantised weights" in note for note in answer["notes"])


def test_unknown_weights_never_fit(command: CommandLine) -> None:
    kimi = str(CONFIGS / "moonshotai--Kimi-K3_config.json")
    outcome = command("kv-budget", kimi, "--gpu", "h200", "--json")
    answer = outcome.json
    assert (outcome.code, answer["fits"], answer["would_fit"]) == (1, None, [])
    assert all(step["fits"] is None for step in answer["max_num_batched_tokens_cost"])
    for said in ("kimi_linear is not known", "routed_expert_hidden_size", "--weights-bytes", "files"):
        assert said in answer["problem"]
    text = command("kv-budget", kimi, "--gpu", "h200")
    assert text.code == 1
    assert "not known to fit: weights are not counted" in text.out
    assert "does not fit" not in text.out
    compared = command("kv-budget", kimi, "--gpu", "all")
    assert compared.code == 1
    assert "unknown" in compared.out
    assert "not known to fit on any of these GPUs" in compared.out
    assert command("kv-budget", kimi, "--gpu", "all", "--json").json["fits"] is None
    sized = command("kv-budget", kimi, "--gpu", "h200", "--weights-bytes", str(20 * GIB), "--json")
    assert (sized.code, sized.json["fits"], sized.json["weights_bytes"]) == (0, True, 20 * GIB)
    large = command("kv-budget", kimi, "--gpu", "h200", "--weights-bytes", "500GiB", "--json")
    assert (large.code, large.json["fits"]) == (1, False)


def test_a_setting_that_may_change_the_weights_leaves_it_open(command: CommandLine, tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_FIELDS | {"engram_embed_dim": 4096})
    outcome = command("kv-budget", path, "--gpu", "h200", "--json")
    assert (outcome.code, outcome.json["fits"], outcome.json["confidence"]) == (1, None, "estimate")
    assert "not understood and not taken into account: engram_embed_dim" in outcome.json["problem"]


@pytest.mark.parametrize("missing", ["text_config", "vision_config"])
def test_a_part_that_the_config_does_not_describe(command: CommandLine, tmp_path: Path, missing: str) -> None:
    content = published_config("Qwen--Qwen3-VL-4B-Instruct")
    del content[missing]
    outcome = command("kv-budget", write_config(tmp_path, content), "--gpu", "h200", "--json")
    assert (outcome.code, outcome.json["fits"], outcome.json["confidence"]) == (1, None, "estimate")
    assert "--weights-bytes" in outcome.json["problem"]


def test_recurrent_layers_alone_have_state_and_no_blocks(command: CommandLine, tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 256, "num_heads": 8, "head_dim": 64}
    config |= {"state_size": 16, "n_groups": 1, "expand": 2, "conv_kernel": 4, "vocab_size": 128}
    config |= {"architectures": ["Mamba2ForCausalLM"], "tie_word_embeddings": True, "time_step_rank": 16}
    path = write_config(tmp_path, config)
    state = 4 * (8 * 64 * 16 * 4 + 3 * (512 + 2 * 16) * 2)
    outcome = command("kv-budget", path, "--gpu", "l4", "--users", "8", "--context", "8k", "--json")
    answer = outcome.json
    assert (outcome.code, answer["fits"]) == (0, True)
    assert (answer["kv_bytes_per_token"], answer["state_bytes_per_seq"]) == (0, state)
    assert answer["plan"]["state_bytes"] == (8 + 2 + 1) * state, "two for prefixes, one for padding rows"
    assert answer["max_num_seqs"] == 8
    text = command("kv-budget", path, "--gpu", "l4").out
    assert f"= {state:,} B per sequence" in text
    assert "0 B per token" not in text
    assert any("for 8 sequences (--max-num-seqs), and 3 times for" in note for note in answer["notes"])


@pytest.mark.parametrize("width", [None, 120, 60])
def test_a_bar_and_its_legend_are_made_of_letters(terminal: Terminal, width: int | None) -> None:
    """Colours are an addition: ASCII terminals and NO_COLOR show the parts too."""
    written = terminal(width)
    stacked_bar([("weights", 50 << 20), ("KV", 25 << 20), ("tiny", 1)], 100 << 20, width=20)
    bar, *legend = written().splitlines()
    assert bar == "[WWWWWWWWWWKKKKK.....] 100 MiB"
    assert "  ".join(legend) == "W weights 50.0 MiB  K KV 25.0 MiB  T tiny 1 B  . free 25.0 MiB"
    assert len(legend) == (4 if width == 60 else 1)


def test_a_bar_does_not_run_over(capsys: pytest.CaptureFixture[str]) -> None:
    stacked_bar([("weights", 500), ("KV", 10)], 100, width=10)
    assert capsys.readouterr().out.splitlines()[0] == "[WWWWWWWWWW] 100 B"


def test_parts_with_the_same_first_letter_have_letters_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    stacked_bar([("adapters", 50), ("activations", 50)], 100, width=10)
    assert capsys.readouterr().out.splitlines()[0] == "[AAAAACCCCC] 100 B"


def test_experts_in_host_memory_and_what_steps_copy(command: CommandLine) -> None:
    model = str(CONFIGS / "Qwen--Qwen3-30B-A3B_config.json")
    asked = ("kv-budget", model, "--gpu", "4090", "--expert-offload", "45GiB")
    answer, layer = command(*asked, "--json").json, 128 * 3 * 2048 * 768 * 2
    offload = answer["expert_offload"]
    assert offload["layers"] == [*range(8, 48)]
    assert (offload["host_bytes"], offload["device_bytes"]) == (40 * layer, layer)
    assert answer["weights_bytes"] == command(*asked[:4], "--json").json["weights_bytes"] - 39 * layer
    out = command(*asked).out
    assert "of 40 layers (45.0 GiB) in host memory, 1.12 GiB on the GPU for copies" in out
    assert "a decode of 1 sequence 2.81 GiB (94 ms)" in out
    refused = command("kv-budget", model, "--device", "cpu", "--expert-offload", "45GiB")
    assert (refused.code, "--expert-offload: is for GPUs" in refused.err) == (2, True)
