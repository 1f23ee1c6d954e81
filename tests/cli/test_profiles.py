"""`llmsched profiles`, and profiles as settings of serve and bench."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from command_line import CommandLine

from llmsched.cli.options.config_flags import EngineOptions
from llmsched.cli.profiles import this_machine
from llmsched.cli.profiles.apply import profile_warnings, with_profile
from llmsched.cli.profiles.this_machine import device_table
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.planner import model_name, open_planner
from llmsched.profiles.calibrated import Calibration, save_calibration
from llmsched.profiles.tuned import TunedProfile, save_profile
from llmsched.profiles.tuned_match import latest_profile

ONE = TunedProfile(
    engine={"max_num_batched_tokens": 256, "max_num_seqs": 8, "headroom": 0.1},
    slo={"ttft_ms": 800.0},
    workload={"fingerprint": "abc", "input_len": 128},
    model={"name": "demo", "architecture": "LlamaForCausalLM"},
    device={"kind": "cpu", "name": "CPU with 2 cores", "cores": 2},
    versions={"llmsched": "0.1.0"},
    trials=(
        {"max_num_batched_tokens": 128, "max_num_seqs": 8, "feasible": False, "reason": "P99 TTFT 900 ms is too much"},
        {"max_num_batched_tokens": 256, "max_num_seqs": 8, "feasible": True, "output_tokens_per_s": 100.0},
    ),
    reason="256 is the most",
    created=datetime(2026, 1, 31, 12, 0, tzinfo=UTC),
)
OTHER = replace(
    ONE,
    engine={"max_num_batched_tokens": 512, "max_num_seqs": 8, "target_itl": 0.05},
    trials=({"max_num_batched_tokens": 512, "max_num_seqs": 8, "feasible": True, "output_tokens_per_s": 120.0},),
    measured=False,
)
COST = Calibration(
    cost={"step": 0.01, "token": 1e-5},
    error=0.031,
    swap_seconds_per_byte=1e-10,
    model={"name": "demo", "digest": "d"},
    device={"kind": "cpu", "name": "CPU with 2 cores"},
    engine={"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    steps=({"step": "4 decodes of 512", "measured_ms": 34.1},),
)


def test_none_yet(command: CommandLine, tmp_path: Path) -> None:
    outcome = command("profiles")
    assert outcome.code == 0
    assert "create them with `llmsched tune`" in outcome.out
    assert command("profiles", "--json").json == {"directory": str(tmp_path / "profiles"), "profiles": []}


def test_all_are_listed_and_a_broken_one_is_told(command: CommandLine, tmp_path: Path) -> None:
    save_profile(ONE, "day")
    save_profile(OTHER, "night")
    save_calibration(COST)
    (tmp_path / "profiles" / "broken.toml").write_text("[engine")
    listed = command("profiles", "--json").json["profiles"]
    assert [(row["name"], row["kind"]) for row in listed] == [
        ("broken", "tuned"),
        ("day", "tuned"),
        ("night", "tuned"),
        (COST.name, "calibrated"),
    ]
    assert "end of a table" in listed[0]["problem"]
    assert listed[1]["summary"] == "max_num_batched_tokens 256, max_num_seqs 8, headroom 0.1"
    assert [row["measured"] for row in listed] == [None, True, False, True]
    assert listed[3]["summary"] == "median error of step times 3.1%"
    outcome = command("profiles")
    assert outcome.code == 0
    for part in ("day", "MEASURED", "SIMULATED", "CPU with 2 cores", "2026-01-31 12:00", COST.name):
        assert part in outcome.out
    assert "warning: profile" in outcome.err


def test_one_is_shown(command: CommandLine, tmp_path: Path) -> None:
    path = save_profile(ONE, str(tmp_path / "elsewhere.toml"))
    shown = command("profiles", "show", str(path), "--json").json
    assert shown["kind"] == "tuned"
    assert shown["engine"] == dict(ONE.engine)
    assert len(shown["trials"]) == 2
    assert shown["created"] == "2026-01-31T12:00:00+00:00"
    text = command("profiles", "show", str(path))
    assert text.code == 0
    for part in ("256 is the most", "trials", "max_num_batched_tokens 128: P99 TTFT 900 ms is too much", "800"):
        assert part in text.out


def test_a_calibration_is_shown(command: CommandLine) -> None:
    save_calibration(COST)
    assert command("profiles", "show", COST.name, "--json").json["cost"] == {"step": 0.01, "token": 1e-05}
    assert "4 decodes of 512" in command("profiles", "show", COST.name).out


def test_two_are_compared(command: CommandLine) -> None:
    save_profile(ONE, "day")
    save_profile(OTHER, "night")
    outcome = command("profiles", "diff", "day", "night", "--json")
    assert outcome.code == 0
    assert outcome.json["engine"] == {
        "max_num_batched_tokens": [256, 512],
        "headroom": [0.1, None],
        "target_itl": [None, 0.05],
    }
    assert outcome.json["result"] == {"output_tokens_per_s": [100.0, 120.0]}
    assert outcome.json["measured"] == {"measured": [True, False]}
    assert outcome.json["workload"] == outcome.json["device"] == {}
    text = command("profiles", "diff", "day", "night").out
    assert "max_num_batched_tokens" in text
    assert "not comparable" not in text
    save_profile(replace(ONE, workload={"fingerprint": "xyz"}), "third")
    assert "not comparable" in command("profiles", "diff", "day", "third").out
    assert "the settings are the same" in command("profiles", "diff", "day", "day").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "show", "day"), "put --json after show"),
        (("show", "away"), "no file"),
        (("diff", "away", "away"), "no file"),
        (("show", "no good"), "a name has letters"),
        (("show",), "NAME|PATH"),
        (("speak",), "speak"),
    ],
)
def test_bad_usage_is_exit_code_2(command: CommandLine, arguments: tuple[str, ...], message: str) -> None:
    assert message in command.refused("profiles", *arguments)


def test_flags_go_before_the_profile(command: CommandLine) -> None:
    save_profile(replace(ONE, engine={**ONE.engine, "max_model_len": 512}), "day")
    given = EngineOptions({"max_num_seqs": 3}, frozenset({"max_model_len"}))
    config = with_profile(given, "day").config("demo", {"max_num_batched_tokens": 9, "max_queue_size": 7})
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_queue_size) == (256, 3, 7)
    assert config.max_model_len is None
    assert with_profile(given, None) is given
    with pytest.raises(ConfigError, match="no file"):
        with_profile(given, "away")


def test_another_model_or_device_is_warned_of(command: CommandLine) -> None:
    here = replace(ONE, device=device_table("cpu"))
    save_profile(here, "day")
    assert profile_warnings("day", EngineConfig("demo", device="cpu")) == []
    (warning,) = profile_warnings("day", EngineConfig("/models/other.gguf", device="cpu"))
    assert "another model: demo, not other" in warning
    save_profile(replace(here, device={**here.device, "name": "CPU with 1 core"}, measured=False), "night")
    device, simulated = profile_warnings("night", EngineConfig("demo", device="cpu"))
    assert "another device: CPU with 1 core, not" in device
    assert simulated == "profile night was simulated, not measured"
    save_profile(TunedProfile(engine={}), "bare")
    assert profile_warnings("bare", EngineConfig("demo", device="cpu")) == []


def test_a_model_is_known_by_its_config(command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    here, copied = tiny_model("llama"), tmp_path / "renamed"
    copied.mkdir()
    shutil.copy(here / "config.json", copied)
    profile = replace(ONE, model={"name": here.name, "digest": open_planner(str(here)).digest}, device={})
    save_profile(profile, "day")
    assert profile_warnings("day", EngineConfig(str(copied), device="cpu")) == []
    other = tmp_path / "other" / here.name
    other.mkdir(parents=True)
    shutil.copy(tiny_model("qwen3") / "config.json", other)
    (warning,) = profile_warnings("day", EngineConfig(str(other), device="cpu"))
    assert "another model of this name" in warning


def test_a_gpu_is_known_by_either_of_its_names(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(replace(ONE, device={"kind": "cuda", "name": "NVIDIA H100 SXM5 80GB"}), "far")
    config = EngineConfig("demo")
    driven = DeviceMemory("cuda", "NVIDIA H100 80GB HBM3", 1 << 36)
    monkeypatch.setattr(this_machine, "device_memory", lambda device: driven)
    assert profile_warnings("far", config) == []
    monkeypatch.setattr(this_machine, "device_memory", lambda device: replace(driven, name="NVIDIA H200"))
    assert "another device: NVIDIA H100 SXM5 80GB, not NVIDIA H200" in profile_warnings("far", config)[0]
    assert profile_warnings("far", config, "h100:vllm") == []
    assert "not NVIDIA L4" in profile_warnings("far", config, "l4")[0]


def test_the_newest_of_a_model_and_a_device_is_found(command: CommandLine, tmp_path: Path) -> None:
    save_profile(ONE, "old")
    save_profile(replace(ONE, created=datetime(2026, 2, 1, tzinfo=UTC)), "new")
    save_profile(replace(ONE, created=datetime(2026, 3, 1, tzinfo=UTC), model={"name": "other"}), "newest")
    (tmp_path / "profiles" / "broken.toml").write_text("[engine")
    assert latest_profile({"name": "demo", "digest": "d"}, ONE.device) == "new"
    assert latest_profile({"name": "demo"}, {**ONE.device, "name": "CPU with 4 cores"}) is None
    assert latest_profile({"name": "demo"}, {**ONE.device, "cores": 4}) is None
    gpu = {"kind": "cuda", "name": "NVIDIA H100 SXM5 80GB"}
    save_profile(replace(ONE, model={"name": "demo", "digest": "d"}, device=gpu), "gpu")
    driven = {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "cores": 64}
    assert latest_profile({"name": "renamed", "digest": "d"}, driven) == "gpu"
    assert latest_profile({"name": "demo", "digest": "e"}, driven) is None


def test_bench_takes_a_profile(command: CommandLine, tiny_model: Callable[..., Path]) -> None:
    save_profile(TunedProfile(engine={"max_num_batched_tokens": 48}, model={"name": "other"}), "day")
    load = ("--num-prompts", "2", "--input-len", "20", "--output-len", "3", "--device", "cpu")
    blocks = ("--num-gpu-blocks-override", "64")
    outcome = command("bench", str(tiny_model("llama")), "--profile", "day", *load, *blocks, "--json")
    assert outcome.code == 0
    assert outcome.json["engine"]["max_num_batched_tokens"] == 48
    assert "profile day was tuned for another model: other" in outcome.err
    refused = command.refused("bench", "http://localhost:1", "--profile", "day")
    assert "the settings of a running server cannot be changed from here" in refused


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("there/Qwen3-8B/config.json", "Qwen3-8B"),
        ("there/Qwen--Qwen3-8B_config.json", "Qwen--Qwen3-8B_config"),
        ("there/model.gguf", "model"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("demo", "demo"),
    ],
)
def test_a_model_that_is_not_loaded_has_a_name(spec: str, name: str) -> None:
    assert model_name(spec) == name
