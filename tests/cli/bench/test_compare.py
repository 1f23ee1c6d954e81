"""`bench --compare`: its syntax, pooling of rounds, memory, ratios."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine

from llmsched.cli import progress_display as progress
from llmsched.cli.bench.compare.comparison import VariantRun, compare, concatenated, with_mean_rates
from llmsched.cli.bench.compare.comparison_report import comparison_json
from llmsched.cli.bench.compare.variant_engines import VariantEngines
from llmsched.cli.bench.compare.variants import Variant, check_given, configure, parse_variants
from llmsched.cli.figures.engine_counts import EngineCounts
from llmsched.cli.figures.kv_memory import KVMeter, memory_usage, merged
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import Chunk, LoopLag, RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.progress import Progress, silent

PLAN = RunPlan(SyntheticLoad(), Slo(), timeout=60, warmup=0)


def test_policies_and_settings() -> None:
    assert parse_variants("static, continuous;fcfs  headroom=0,max-num-seqs=4 target_itl=50ms") == [
        Variant("static", {"scheduling_policy": "static"}),
        Variant("continuous", {"scheduling_policy": "fair"}),
        Variant("fcfs headroom=0", {"scheduling_policy": "fcfs", "headroom": 0.0}),
        Variant("max-num-seqs=4 target_itl=50ms", {"max_num_seqs": 4, "target_itl": 0.05}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("static", "two or more variants"),
        ("", "two or more variants"),
        ("static,,fair", "two or more variants"),
        ("static,tidal", "'tidal' must be a scheduling policy .* or NAME=VALUE"),
        ("static,fair fcfs", "scheduling_policy is set twice"),
        ("fair,max_num_seq=2", "max_num_seq: is not an engine setting.* max_num_seqs"),
        ("fair,headroom=", "headroom: '' is not a share"),
        ("fair,seed=3", "the engine's seed has no effect"),
    ],
)
def test_invalid_variants_are_refused(text: str, message: str) -> None:
    with pytest.raises(LlmschedError, match=message):
        parse_variants(text)


@pytest.mark.parametrize("text", ["fair,fair", "fair,continuous", "fair,max_num_seqs=128"])
def test_the_same_settings_twice_are_refused(text: str) -> None:
    with pytest.raises(LlmschedError, match="are the same settings"):
        configure(EngineConfig(), parse_variants(text))


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_headroom"):
        configure(EngineConfig(), parse_variants("fair,headroom=40%"))


def test_a_flag_that_every_variant_overrides_is_refused() -> None:
    variants = parse_variants("fair max_num_seqs=2, static max_num_seqs=4")
    check_given(variants, {"headroom": 0.2})
    with pytest.raises(LlmschedError, match="--max-num-seqs has no effect"):
        check_given(variants, {"max_num_seqs": 8})


def run_of(*times: tuple[float, float], preemptions: int | None = 0) -> RunRecord:
    """Return a run. Each pair has the time when a request is due, and the time of its only token and its end."""
    records = [
        RequestRecord(index, scheduled=due, ready=due, sent=due, end=end, chunks=[Chunk(end, "x", 1)])
        for index, (due, end) in enumerate(times)
    ]
    return RunRecord(records, EngineCounts(preemptions), [LoopLag(0.0, 0.001)], own_process=False)


def test_rounds_are_concatenated_without_gaps() -> None:
    joined = concatenated([run_of((100, 101), (100, 103)), run_of((500, 502), (501, 504), preemptions=2)])
    assert [(r.index, r.scheduled, r.end) for r in joined.records] == [(0, 0, 1), (1, 0, 3), (2, 3, 5), (3, 4, 7)]
    assert [record.chunks[0].time for record in joined.records] == [1, 3, 5, 7]
    assert (joined.counts.preemptions, joined.loop_lags) == (2, [LoopLag(0.0, 0.001)] * 2)
    figures = measure(joined, SyntheticLoad(), Slo())
    assert (figures.duration, figures.rates.output_tokens) == (7.0, 4 / 7)
    assert figures.latency.ttft.max == 3.0


def test_rates_exclude_the_time_between_two_rounds() -> None:
    """Ten requests at 1/s that take 1 s each, and a last one that takes 91 s: twice."""
    times = [(float(n), n + 1.0) for n in range(10)]
    task = RunPlan(SyntheticLoad(request_rate=1.0), Slo(), timeout=60, warmup=0)
    runs = [run_of(*times, (10.0, 101.0)) for _ in range(2)]
    rounds = tuple(measure(run, task.workload, task.slo) for run in runs)
    found = with_mean_rates(rounds, measure(concatenated(runs), task.workload, task.slo))
    assert (found.requests.completed, found.duration) == (22, 202.0)
    assert found.rates.scheduled == found.rates.achieved == pytest.approx(1.0)
    assert found.rates.requests_steady == rounds[0].rates.requests_steady
    assert found.rates.output_tokens_steady == rounds[0].rates.output_tokens_steady
    assert with_mean_rates(rounds[:1], rounds[0]) is rounds[0]


def test_preemptions_unknown_in_one_round_are_unknown() -> None:
    assert concatenated([run_of((0, 1)), run_of((0, 1), preemptions=None)]).counts.preemptions is None


def test_rounds_are_interleaved_and_have_different_requests() -> None:
    asked: list[tuple[str, int]] = []

    async def perform(name: str, workload: Load, progress: Progress) -> VariantRun:
        asked.append((name, workload.seed))
        if len(asked) == 4:
            raise InterruptedError
        return VariantRun(run_of((0, 1)), None)  # type: ignore[arg-type]

    task = RunPlan(SyntheticLoad(seed=3), Slo(), timeout=60, warmup=0)
    with pytest.raises(InterruptedError):
        asyncio.run(compare(["a", "b"], perform, task, 3, silent))
    assert asked == [("a", 3), ("b", 3), ("a", 4), ("b", 4)]


def tiny_config(tiny_model: Callable[..., Path], **knobs: object) -> EngineConfig:
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 160, "max_num_seqs": 4, "dtype": "float32"}
    return EngineConfig(**{"model": str(tiny_model("llama")), "device": "cpu", **settings, **knobs})  # type: ignore[arg-type]


def test_waste_and_peak_of_a_run(tiny_model: Callable[..., Path]) -> None:
    async def plan_of() -> object:
        async with VariantEngines({"fair": tiny_config(tiny_model)}, PLAN, silent).running("fair") as engine:
            return engine.core.plan

    plan = asyncio.run(plan_of())
    meters = [KVMeter(), KVMeter()]
    for meter, use in zip((meters[0], *meters), [(0, 0, 640), (320, 160, 0), (160, 40, 0)], strict=True):
        meter(KVUsage(*use, 1024))
    found = memory_usage((), plan.parts, merged(meters))  # type: ignore[attr-defined]
    assert found.kv_waste == pytest.approx((0.5 + 0.25) / 2)
    assert found.peak_kv == 20 * plan.block_bytes  # type: ignore[attr-defined]
    assert found.peak == found.parts.weights + found.parts.activations + found.peak_kv
    assert found.steps == 3
    assert meters[0].take().steps == 2
    assert meters[0].waste is None


def test_static_against_continuous(tiny_model: Callable[..., Path]) -> None:
    """Both get the same requests in each round and new ones in the next; static reserves max_model_len for each."""
    configs = configure(tiny_config(tiny_model), parse_variants("static,continuous"))
    task = RunPlan(SyntheticLoad(num_prompts=6, input_len=20, output_len=4, seed=3), Slo(e2e=600), timeout=60, warmup=1)
    document = comparison_json(
        asyncio.run(compare(list(configs), VariantEngines(configs, task, silent), task, 2, silent))
    )
    static, continuous = document["runs"]
    assert (static["policy"], continuous["policy"]) == ("static", "continuous")
    assert static["engine"]["scheduling_policy"] == "static"
    assert continuous["engine"]["scheduling_policy"] == "fair"
    for run in (static, continuous):
        assert (run["completed"], run["failed"], run["output_tokens"]) == (12, 0, 48)
        assert [one["seed"] for one in run["rounds"]] == [3, 4]
        assert [one["completed"] for one in run["rounds"]] == [6, 6]
        assert run["prefix_hit_rate"] == 0, "no run finds what another has left"
        assert run["attainment"]["all"] == 1.0
        assert run["peak_memory_bytes"] > run["peak_kv_bytes"] > 0
    per_block = static["peak_kv_bytes"] / 40
    assert static["peak_kv_bytes"] == 4 * 10 * per_block, "four requests, 160 tokens each"
    assert continuous["peak_kv_bytes"] <= 4 * 2 * per_block
    assert static["kv_waste"] > 0.8 > continuous["kv_waste"] > 0
    ratios = document["ratios"]["continuous"]
    assert ratios["peak_kv_bytes"] == continuous["peak_kv_bytes"] / static["peak_kv_bytes"]
    assert ratios["output_tokens_per_s"] == continuous["output_tokens_per_s"] / static["output_tokens_per_s"]
    assert ratios["preemptions"] is None
    assert len(ratios["output_tokens_per_s_by_round"]) == 2


def test_limits_of_one_variant_do_not_become_those_of_another(tiny_model: Callable[..., Path]) -> None:
    """Variants that share memory are built once, for the largest limits; others are built separately."""
    base = tiny_config(tiny_model)
    variants = parse_variants("fair, max_num_batched_tokens=512, max_num_seqs=2, block_size=8")
    engines = VariantEngines(configure(base, variants), PLAN, silent)

    async def settings(name: str) -> tuple[int | None, int, int, object]:
        async with engines.running(name) as engine:
            config = engine.core.config
            return config.max_num_batched_tokens, config.max_num_seqs, config.block_size, engine.core.executor

    found = {variant.name: asyncio.run(settings(variant.name)) for variant in variants}
    assert [found[v.name][:3] for v in variants] == [(256, 4, 16), (512, 4, 16), (256, 2, 16), (256, 4, 8)]
    assert found["fair"][3] is found["max_num_seqs=2"][3]
    assert found["fair"][3] is not found["block_size=8"][3]


def test_compare_from_the_command_line(command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    saved = tmp_path / "comparison.json"
    arguments = (
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu", "--rounds", "1"),
        *("--max-model-len", "160", "--num-prompts", "4", "--input-len", "16", "--output-len", "3"),
    )
    outcome = command(*arguments, "--compare", "static,continuous", "--save", str(saved), "--json")
    assert outcome.code == 0
    assert [run["policy"] for run in outcome.json["runs"]] == ["static", "continuous"]
    assert list(outcome.json["ratios"]) == ["continuous"]
    assert json.loads(saved.read_text()) == outcome.json
    outcome = command(*arguments, "--compare", "static,continuous")
    assert outcome.code == 0
    assert "MEASURED" in outcome.out
    assert "continuous / static" in outcome.out
    for name in ("output tokens/s", "TTFT P99", "KV waste", "peak memory", "preemptions"):
        assert name in outcome.out


def test_a_variant_in_which_requests_fail_is_exit_code_1(command: CommandLine, tiny_model: Callable[..., Path]) -> None:
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu", "--rounds", "1"),
        *("--num-prompts", "2", "--input-len", "100", "--output-len", "3", "--compare", "fair,max_model_len=64"),
    )
    assert outcome.code == 1
    assert "error: max_model_len=64: 2 requests failed: refused" in outcome.err


@pytest.mark.parametrize(
    ("target", "text", "message"),
    [
        ("http://127.0.0.1:9", "static,fair", "--compare runs each variant in this process, and http://127.0.0.1:9 is"),
        ("demo", "fair,fcfs headroom=0.2", "--headroom: 0.2 has no effect with --scheduling-policy fcfs"),
        ("demo", "fair,serial max_num_seqs=8", "--max-num-seqs: 8 has no effect with --scheduling-policy serial"),
    ],
)
def test_what_cannot_be_compared_is_one_line(command: CommandLine, target: str, text: str, message: str) -> None:
    assert message in command.refused("bench", target, "--compare", text)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("max_model_len=512", "--max-model-len: "),
        ("kv_cache_dtype=fp4", "--kv-cache-dtype: 'fp4' is not one of"),
        ("max_model_len=100k", "beyond the 512 positions"),
    ],
)
def test_a_variant_that_cannot_be_built_is_told_before_the_first_run(
    command: CommandLine,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    message: str,
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    outcome = command(
        *("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "10", "--device", "cpu"),
        *("--compare", f"fair max_model_len=100,{variant}"),
    )
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert "round 1" not in outcome.err


def test_simulated_compare_from_the_command_line(
    command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Four requests at a time: static reserves 10 blocks for each, continuous the 3 that 42 tokens take."""
    arguments = (
        *("bench", str(tiny_model("llama")), "--simulate", "l4", "--compare", "static,continuous", "--json"),
        *("--num-prompts", "16", "--input-len", "20", "--output-len", "1..40", "--rounds", "2"),
        *("--max-model-len", "160", "--max-num-seqs", "4"),
    )
    outcome = command(*arguments)
    assert outcome.code == 0
    document = outcome.json
    static, continuous = document["runs"]
    assert (document["measured"], static["measured"], continuous["measured"]) == (False, False, False)
    assert "L4" in static["where"]
    assert static["completed"] == continuous["completed"] == 32
    assert static["output_tokens"] == continuous["output_tokens"]
    assert static["peak_kv_bytes"] / continuous["peak_kv_bytes"] >= 40 / 16
    assert document["ratios"]["continuous"]["output_tokens_per_s"] > 1.2
    assert static["kv_waste"] > 0.7
    assert command(*arguments).out == outcome.out
    page = tmp_path / "comparison.html"
    shown = command(*(argument for argument in arguments if argument != "--json"), "--report", str(page))
    assert shown.out.startswith("SIMULATED")
    text = page.read_text()
    for words in ("SIMULATED", "continuous / static", "KV waste", "distribution of TTFT"):
        assert words in text


def test_long_variants_have_numbers_in_the_table(command: CommandLine, tiny_model: Callable[..., Path]) -> None:
    """A narrow terminal has room for the table."""
    outcome = command(
        *("bench", str(tiny_model("llama")), "--simulate", "l4", "--num-prompts", "4", "--max-model-len", "160"),
        *("--compare", "static, fair max_num_batched_tokens=512 headroom=20%", "--rounds", "1"),
    )
    assert "variants: [1] static; [2] fair max_num_batched_tokens=512 headroom=20%" in outcome.out
    table = outcome.out.partition("latencies in ms\n")[2].partition("fair")[0].splitlines()
    assert table[0].split() == ["[1]", "[2]", "[2]", "/", "[1]"]
    assert max(map(len, table)) < 60


def test_a_simulated_variant_that_does_not_fit_is_exit_code_2(
    command: CommandLine, tiny_model: Callable[..., Path]
) -> None:
    simulation = ("bench", str(tiny_model("llama")), "--simulate", "l4", "--num-gpu-blocks-override", "4")
    assert "--max-model-len: " in command.refused(*simulation, "--compare", "fair,max_model_len=512")
