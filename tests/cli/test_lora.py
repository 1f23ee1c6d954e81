"""--lora on the command line, besides `serve`: the memory plan, a measured load, and commands that refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from configs import CONFIGS
from lora_files import ATTENTION, MLP, save_adapter
from tiny_models import build_model
from torch import nn

from llmsched.cli.main import load
from llmsched.engine.async_engine import AsyncEngine

LLAMA = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")


def test_kv_budget_counts_adapters_and_a_second_set_of_graphs(command: CommandLine, tmp_path: Path) -> None:
    projection = nn.ModuleDict({"q_proj": nn.Linear(4096, 4096, bias=False)})
    lora = f"sql={save_adapter(tmp_path, projection, ('q_proj',), rank=64)}"
    line = ("kv-budget", LLAMA, "--gpu", "l4", "--max-model-len", "4096")
    plain, adapted = (command(*line, *more, "--json").json for more in ((), ("--lora", lora)))
    assert plain["plan"]["adapter_bytes"] == 0
    assert adapted["plan"]["adapter_bytes"] == 64 * 2 * 4096 * 2
    graphs = [answer["plan"]["graph_bytes"] for answer in (plain, adapted)]
    lost = plain["available_kv_bytes"] - adapted["available_kv_bytes"]
    assert lost == adapted["plan"]["adapter_bytes"] + graphs[1] - graphs[0]
    assert 1.5 * graphs[0] < graphs[1] < 2 * graphs[0]
    assert f"--lora {lora}" in adapted["serve"]
    report = command(*line, "--lora", lora).out
    assert "1.00 MiB adapters" in report
    refused = command(*line, "--lora", lora, "--emit", "vllm")
    assert (refused.code, refused.out) == (2, "")
    assert "--lora: is for a plan of `llmsched serve`" in refused.err


def test_kv_budget_plans_for_adapters_that_do_not_exist(command: CommandLine, tmp_path: Path) -> None:
    model = build_model("llama")
    model.config.save_pretrained(tmp_path)
    adapter = save_adapter(tmp_path / "adapter", model, (*ATTENTION, *MLP), rank=8)
    line = ("kv-budget", str(tmp_path / "config.json"), "--weights-bytes", "1MiB", "--gpu-memory", "8GiB", "--json")
    plan, by_rank, by_adapter = (
        command(*line, *more).json["plan"]
        for more in (
            ("--lora", f"sql={adapter}"),
            ("--lora-count", "5", "--lora-rank", "8"),
            ("--lora-count", "5", "--lora", f"sql={adapter}"),
        )
    )
    assert by_rank["adapter_bytes"] == by_adapter["adapter_bytes"] == 5 * plan["adapter_bytes"] > 0
    assert by_rank["adapters"] == {**plan["adapters"], "count": 5}
    report = command(*line[:-1], "--lora-count", "3").out
    assert "adapters   3 x rank 16 x" in report
    assert "takes each of the 3 planned adapters as --lora NAME=DIR" in report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lora-rank", "8"), "--lora-rank: has no effect without --lora-count"),
        (("--lora-count", "2", "--emit", "vllm"), "--lora-count: is for a plan of `llmsched serve`"),
        (("--lora-count", "0"), "allowed is 1 to 65536"),
    ],
)
def test_kv_budget_refuses_adapters_that_it_would_not_count(
    command: CommandLine, options: tuple[str, ...], message: str
) -> None:
    assert message in command.refused("kv-budget", LLAMA, "--gpu", "l4", *options)


def test_kv_budget_needs_an_adapter_for_layers_that_it_does_not_know(command: CommandLine, tmp_path: Path) -> None:
    line = ("kv-budget", str(CONFIGS / "deepseek-ai--DeepSeek-V3_config.json"), "--gpu", "h100", "--lora-count", "2")
    assert "--lora-count: the layers of this model are not known" in command.refused(*line)


#: What each command does with an adapter.
USES = {
    "serve": "requests choose it by",
    "bench": "requests use the",
    "verify": "computed with it",
    "kv-budget": "counts",
}


@pytest.mark.parametrize("name", USES)
def test_the_help_says_what_a_command_does_with_an_adapter(name: str) -> None:
    (option,) = (parameter for parameter in load(name).params if "--lora" in parameter.opts)
    assert USES[name] in str(option.help)  # type: ignore[attr-defined]


def test_requests_of_bench_use_the_adapters_in_turn(
    command: CommandLine, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model("llama")
    lora = [f"{name}={save_adapter(tmp_path / name, model, ('q_proj',))}" for name in ("one", "two")]
    used: list[str | None] = []
    submit = AsyncEngine.submit

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        used.append(options["adapter"])
        return submit(self, *arguments, **options)

    monkeypatch.setattr(AsyncEngine, "submit", watched)
    line = ("bench", str(tiny_model("llama")), "--device", "cpu", "--num-prompts", "4", "--warmup", "0", "--json")
    sizes = ("--input-len", "8", "--output-len", "2", "--max-model-len", "64", "--num-gpu-blocks-override", "32")
    outcome = command(*line, *sizes, "--lora", lora[0], "--lora", lora[1])
    assert outcome.code == 0, outcome.err
    assert sorted(map(str, used)) == ["one", "one", "two", "two"]
    refused = command(*line[:2], "--simulate", "l4", "--lora", lora[0])
    assert refused.code == 2
    assert "--lora: has no effect on the simulated time of a step" in refused.err
