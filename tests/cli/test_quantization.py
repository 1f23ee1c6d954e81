"""`--quantization` of the commands: what is planned, served, measured and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine

from llmsched.engine.blueprint import gpu_blueprint, local_blueprint
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.memory.planner import open_planner

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ("--num-prompts", "2", "--num-tokens", "4", "--dtype", "float32")
LOAD = ("--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--max-concurrency", "2", "--json")


@pytest.fixture(scope="module")
def model(tiny_model: Any) -> str:
    return str(tiny_model("qwen3", bos=True))


def test_verify_measures_the_loss(command: CommandLine, model: str) -> None:
    outcome = command("verify", model, *SMALL, "--quantization", "int4", "--json")
    assert outcome.code == 0
    loss = outcome.json["quantization_loss"]
    assert 0 < loss["mean_kl"] < 0.5
    assert 0.5 < loss["same_token"] <= 1
    assert loss["num_positions"] > 300
    assert all(check["tokens_equal"] for check in outcome.json["checks"])
    printed = command("verify", model, *SMALL, "--quantization", "int8").out
    assert "rounding    mean KL divergence" in printed
    assert "same most probable token at" in printed
    assert command("verify", model, *SMALL, "--json").json["quantization_loss"] is None


def test_kv_budget_plans_what_serve_loads(command: CommandLine, model: str) -> None:
    plain, rounded = (
        command("kv-budget", model, "--gpu", "l4", *more, "--json").json for more in ((), ("--quantization", "int8"))
    )
    assert rounded["weights_bytes"] < 0.6 * plain["weights_bytes"]
    assert "--quantization int8" in rounded["serve"]
    assert "--quantization" not in plain["serve"]


def test_bench_runs_a_rounded_model(command: CommandLine, model: str) -> None:
    outcome = command("bench", model, *LOAD, "--quantization", "int4")
    assert outcome.code == 0
    assert outcome.json["completed"] == 2


def test_simulated_decodes_read_rounded_weights(tmp_path: Path) -> None:
    """A decode of one sequence takes time in proportion to the bytes of the weights, a prefill does not."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 32000}
    config |= {"num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    planner = open_planner(str(tmp_path))
    decode, prefill = StepShape(0, 1, 1, sampled_rows=1), StepShape(4096, 0, 0, sampled_rows=1)
    plain = gpu_blueprint(planner, EngineConfig(), "h100").cost
    for name, low, high in (("fp8", 0.5, 0.75), ("int8", 0.5, 0.75), ("int4", 0.3, 0.6)):
        rounded = gpu_blueprint(planner, EngineConfig(quantization=name), "h100").cost  # type: ignore[arg-type]
        assert low < rounded.seconds(decode) / plain.seconds(decode) < high
        assert 0.95 < rounded.seconds(prefill) / plain.seconds(prefill) <= 1
    with pytest.raises(ConfigError, match="local was calibrated with the model as it is"):
        local_blueprint(planner, EngineConfig(quantization="int8"))


def test_models_that_cannot_be_rounded_are_refused_in_one_line(
    command: CommandLine, tiny_model: Any, tmp_path: Path
) -> None:
    gpt2 = str(tiny_model("gpt2"))
    expected = "--quantization: int8 cannot be applied: its layers are Conv1D modules"
    for name in ("verify", "kv-budget", "bench", "serve"):
        assert expected in command.refused(name, gpt2, "--quantization", "int8")
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    expected = "--quantization: int8 cannot be applied: the checkpoint is already quantised (fp8)"
    assert expected in command.refused("kv-budget", str(tmp_path), "--quantization", "int8")


def test_formats_of_checkpoints_are_not_served(command: CommandLine, model: str) -> None:
    expected = "'--quantization': 'awq' is not one of 'fp8', 'int8', 'int4'"
    assert expected in command.refused("serve", model, "--quantization", "awq")
