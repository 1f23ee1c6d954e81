"""`llmsched bench --simulate`: it needs only a config.json, and the same seed gives the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import CommandLine
from configs import CONFIGS

from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.load_run import MOST_SAMPLES
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.goodput import Slo
from llmsched.engine.provenance import Provenance
from llmsched.profiles.engines import find_engine


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """Make a directory that holds only the config of Llama 3.1 8B."""
    shutil.copy(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json", tmp_path / "config.json")
    return str(tmp_path)


ALL = ("--request-rate", "inf")
LOAD = ("--request-rate", "20", "--num-prompts", "60", "--input-len", "500", "--output-len", "20", "--seed", "3")


def test_a_config_is_all_it_needs(command: CommandLine, llama: str) -> None:
    outcome = command("bench", llama, "--simulate", "h100", *LOAD, "--slo-ttft", "200ms", "--json")
    report = outcome.json
    assert outcome.code == 0
    assert (report["measured"], report["calibration_error"]) == (False, None)
    assert (report["completed"], report["failed"], report["valid"]) == (60, 0, True)
    assert report["output_tokens"] == 60 * 20
    assert (report["where"], report["refused_by_serve"]) == ("NVIDIA H100 SXM5 80GB", None)
    assert report["engine"]["max_model_len"] == 131072
    # 8 billion weights of 2 bytes over 3.35 TB/s: no step can be faster, and none of these takes three times as long.
    assert 4.8 < report["itl_ms"]["p50"] < 14.4
    assert 0 < report["goodput_rps"] <= report["requests_per_s"]
    assert report["client_lag_ms"]["max"] == 0.0


@pytest.mark.parametrize(
    "mode", [(), ("--find-knee", "--request-rate", "1", "--max-request-rate", "1", "--slo-e2e", "1h")]
)
def test_a_model_that_serve_would_refuse_is_reported(
    command: CommandLine, mode: tuple[str, ...], tmp_path: Path
) -> None:
    content = json.loads((CONFIGS / "openai--gpt-oss-20b_config.json").read_text())
    config = str(tmp_path / "config.json")
    Path(config).write_text(json.dumps(content | {"quantization_config": {"quant_method": "quark"}}))
    small = ("--num-prompts", "2", "--input-len", "8", "--output-len", "2", "--json")
    outcome = command("bench", config, "--simulate", "h100", *small, *mode)
    assert outcome.code == 0
    assert outcome.json["refused_by_serve"].startswith("its weights are quantised (quark")
    told = [line for line in outcome.err.splitlines() if "although serve does not support this: its weights" in line]
    assert len(told) == 1


def test_quantised_weights_need_no_checkpoint(command: CommandLine, llama: str) -> None:
    """--quantization equals a config with that entry; fp8 halves the bytes that a single decode reads."""
    alone = ("--max-concurrency", "1", "--num-prompts", "2", "--input-len", "8", "--output-len", "8", "--json")
    plain, asked = (
        command("bench", llama, "--simulate", "h100", *alone, *more).json for more in ((), ("--quantization", "fp8"))
    )
    config = Path(llama) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    written = command("bench", llama, "--simulate", "h100", *alone).json
    assert asked["tpot_ms"] == written["tpot_ms"]
    assert 0.5 * plain["tpot_ms"]["mean"] < asked["tpot_ms"]["mean"] < 0.75 * plain["tpot_ms"]["mean"]
    assert asked["refused_by_serve"] is None


def test_variants_of_quantised_weights(command: CommandLine, llama: str) -> None:
    small = ("--num-prompts", "2", "--output-len", "2", "--rounds", "1", "--compare", "fair,static", "--json")
    outcome = command("bench", llama, "--simulate", "l4", "--quantization", "awq", "--max-model-len", "512", *small)
    assert outcome.code == 0
    assert all(run["memory"]["weights"] < 7e9 for run in outcome.json["runs"])


def test_the_steps_of_another_engine(command: CommandLine, llama: str) -> None:
    usual, other = (command("bench", llama, "--simulate", name, *LOAD, "--json").json for name in ("h100", "h100:nim"))
    assert (usual["where"], other["where"]) == ("NVIDIA H100 SXM5 80GB", "NVIDIA H100 SXM5 80GB, steps as of nim")
    assert other["itl_ms"]["p50"] != usual["itl_ms"]["p50"]
    assert other["published_error"] == find_engine("nim").shares["hopper"].error


def test_the_same_seed_gives_the_same_bytes(command: CommandLine, llama: str) -> None:
    first = command("bench", llama, "--simulate", "l4", *LOAD, "--json").out
    assert command("bench", llama, "--simulate", "l4", *LOAD, "--json").out == first
    assert command("bench", llama, "--simulate", "l4", *LOAD[:-1], "4", "--json").out != first


def test_a_report_for_people_says_simulated(command: CommandLine, llama: str) -> None:
    outcome = command("bench", llama, "--simulate", "h100", *LOAD)
    assert outcome.out.startswith("SIMULATED ")
    assert "MEASURED" not in outcome.out
    assert "step times: roofline model" in outcome.out


def test_engine_flags_are_honoured(command: CommandLine, llama: str) -> None:
    load = ("--num-prompts", "8", "--input-len", "400", "--output-len", "4", "--json")
    usual = command("bench", llama, "--simulate", "h100", *load).json
    serial = command("bench", llama, "--simulate", "h100", "--scheduling-policy", "serial", *load).json
    assert serial["ttft_ms"]["max"] > usual["ttft_ms"]["max"]
    small = command("bench", llama, "--simulate", "h100", "--num-gpu-blocks-override", "20", *load)
    assert small.code == 1
    assert small.json["failures"] == {"refused": 8}


def test_prompts_with_a_common_prefix_are_served_from_the_cache(command: CommandLine, llama: str) -> None:
    load = ("--request-rate", "2", "--num-prompts", "20", "--input-len", "1024", "--prefix-len", "512", "--json")
    hits = command("bench", llama, "--simulate", "h100", *load).json["prefix_hit_rate"]
    assert hits == pytest.approx(0.5 * 19 / 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "h1000"), "'h1000' is not a known GPU; did you mean h100"),
        (("--simulate", "h100", "--warmup", "3"), "--warmup 3: there is nothing to warm up on a virtual clock"),
        (("--simulate", "h100", "--device", "cpu"), "cpu is requested, but h100 is to be simulated"),
        (("--simulate", "h100", "--text-prompts"), "--text-prompts: only has an effect with the URL of a server"),
        (("--simulate", "t4"), "weights"),
        (("--simulate", "v100-32gb", "--dtype", "bfloat16"), "Tesla V100 SXM2 32GB cannot multiply bfloat16"),
        (("--simulate", "h100:"), "is not a known engine class; known are default"),
        (("--simulate", "h100:vlm"), "is not a known engine class; known are default"),
        (("--quantization", "awq"), "--quantization: awq needs --simulate; without it, allowed is fp8, int8, int4"),
        (("--quantization", "fp8", "--simulate", "local"), "local serves the model as it is"),
        (
            ("--quantization", "fp7", "--simulate", "h100"),
            "--quantization: must be one of fp8, int8, int4",
        ),
    ],
)
def test_bad_input_is_one_line(command: CommandLine, llama: str, arguments: tuple[str, ...], words: str) -> None:
    assert words in command.refused("bench", llama, *arguments)


def test_a_url_is_measured_not_simulated(command: CommandLine) -> None:
    error = command.refused("bench", "http://localhost:1", "--simulate", "h100")
    assert "a running server is measured, not simulated" in error


def test_keys_are_those_of_a_measured_run(llama: str) -> None:
    blueprint, load = make_blueprint(EngineConfig(model=llama), "h100"), SyntheticLoad(num_prompts=2)
    figures = measure(simulate_run(blueprint, load), load, Slo())
    measured = as_json(Experiment("m", Provenance("in process"), load, Slo()), figures)
    assert measured["measured"]
    assert measured.keys() == as_json(Experiment("m", Provenance("h100", measured=False), load, Slo()), figures).keys()


def test_a_blueprint_serves_other_limits_within_what_it_reserves(llama: str) -> None:
    blueprint, load = make_blueprint(EngineConfig(model=llama), "h100"), SyntheticLoad(num_prompts=40, input_len=2000)
    whole = measure(simulate_run(blueprint, load), load, Slo())
    small = measure(simulate_run(blueprint, load, max_num_batched_tokens=256), load, Slo())
    assert small.latency.itl.p99 < whole.latency.itl.p99 / 2
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 4096 tokens is out of range"):
        measure(simulate_run(blueprint, load, max_num_batched_tokens=4096), load, Slo())


def test_a_run_has_its_state_and_decisions_over_time(llama: str) -> None:
    blueprint = make_blueprint(EngineConfig(model=llama), "h100")
    load = SyntheticLoad(num_prompts=40, input_len=2000, request_rate=10.0)
    run = simulate_run(blueprint, load)
    times = [sample.time for sample in run.samples]
    assert len(times) > 20
    assert all(after - before >= 0.1 for before, after in pairwise(times))
    assert max(sample.kv_held or 0.0 for sample in run.samples) > 0
    assert run.memory.kv == blueprint.plan.num_blocks * blueprint.plan.block_bytes
    for record in run.records:
        assert record.timeline.start == record.sent
        assert [entry.what for entry in record.timeline.entries][-1] == "finished"


def test_a_long_run_has_its_samples_further_apart(llama: str) -> None:
    blueprint = make_blueprint(EngineConfig(model=llama), "h100")
    load = SyntheticLoad(num_prompts=500, input_len=16, output_len=300, request_rate=0.5)
    samples = simulate_run(blueprint, load).samples
    assert MOST_SAMPLES / 2 <= len(samples) <= MOST_SAMPLES
    assert samples[-1].time > 900


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write a log of one request with four words."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "internationalisation of everything everywhere", "max_tokens": 3}\n')
    return str(path)


def test_texts_go_through_a_tokenizer_on_this_disk(
    command: CommandLine, tiny_model: Callable[..., Path], texts: str
) -> None:
    model = str(tiny_model("llama"))
    outcome = command("bench", model, "--simulate", "l4", "--trace", texts, *ALL, "--json")
    assert outcome.json["input_tokens"] > 10
    assert "each word" not in outcome.err


def test_without_a_tokenizer_a_word_is_a_token_and_a_warning_says_so(
    command: CommandLine, llama: str, texts: str
) -> None:
    outcome = command("bench", llama, "--simulate", "h100", "--trace", texts, *ALL, "--json")
    assert outcome.json["input_tokens"] == 4
    assert outcome.err.count("each word of a text counts as one token") == 1
