"""MODEL resolution, and the engine flags that EngineConfig generates."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import pytest
import typer
from command_line import CommandLine

from llmsched.cli import main as cli
from llmsched.cli.options import flags
from llmsched.cli.options.config_flags import EngineOptions, knob_value, with_engine_options
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError


def test_model_comes_from_argument_then_environment_then_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMSCHED_MODEL", "org/model")
    assert flags.resolve_model("mine") == "mine"
    assert capsys.readouterr().err == ""
    assert flags.resolve_model(None) == "org/model"
    assert "org/model (from LLMSCHED_MODEL)" in capsys.readouterr().err
    monkeypatch.delenv("LLMSCHED_MODEL")
    assert flags.resolve_model(None) == "demo"
    assert "demo" in capsys.readouterr().err


@with_engine_options(exclude=("seed",))
def sample(
    model: Annotated[str, typer.Argument()] = "demo",
    lazy: Annotated[bool, typer.Option(help="A flag of its own.")] = False,
    *,
    engine_options: EngineOptions,
) -> None:
    """A command with engine flags."""
    config = engine_options.config(model, {"max_num_seqs": 7, "block_size": 32})
    print(json.dumps({"lazy": lazy, "given": sorted(engine_options.given), "config": dataclasses.asdict(config)}))


@pytest.fixture(autouse=True)
def only_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `sample` the only command of the console entry."""
    monkeypatch.setitem(sys.modules, "sample_command", sys.modules[__name__])
    monkeypatch.setattr(cli, "COMMANDS", {"sample": cli.CommandEntry("sample_command", "sample", "Try flags.")})


def test_every_knob_becomes_a_flag_with_help(command: CommandLine) -> None:
    shown = " ".join(command("sample", "--help").out.split())
    for knob in dataclasses.fields(EngineConfig):
        flag = "--" + knob.name.replace("_", "-")
        assert (f"{flag} " in shown) == (knob.name not in {"model", "seed"}), flag
    assert "requests that run at the same time [1 to 65536; default: 128]" in shown
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in shown


def test_auto_overrides_a_profile() -> None:
    profile = {"max_model_len": 4096, "max_num_seqs": 7}
    assert EngineOptions().config("m", profile).max_model_len == 4096
    automatic = EngineOptions(automatic=frozenset({"max_model_len"})).config("m", profile)
    assert (automatic.max_model_len, automatic.max_num_seqs) == (None, 7)


def test_a_length_may_be_automatic_or_in_k(command: CommandLine) -> None:
    for given, wanted in (("auto", None), ("8k", 8192)):
        answer = command("sample", "m", "--max-model-len", given).json
        assert answer["config"]["max_model_len"] == wanted
        assert answer["given"] == ([] if wanted is None else ["max_model_len"])


def test_flag_beats_profile_beats_default(command: CommandLine) -> None:
    answer = command("sample", "m", "--max-num-seqs", "9", "--no-enable-prefix-caching", "--lazy").json
    assert answer["given"] == ["enable_prefix_caching", "max_num_seqs"]
    assert answer["lazy"] is True
    config = answer["config"]
    assert (config["model"], config["max_num_seqs"], config["block_size"]) == ("m", 9, 32)
    assert config["enable_prefix_caching"] is False
    assert config["max_queue_size"] == EngineConfig().max_queue_size


def test_quantities_are_parsed_in_engine_flags(command: CommandLine) -> None:
    config = command("sample", "--kv-cache-memory-bytes", "2GiB", "--swap-space", "0").json["config"]
    assert (config["kv_cache_memory_bytes"], config["swap_space"]) == (2 * 1024**3, 0)


@pytest.mark.parametrize(
    "knob", ["gpu_memory_utilization", "max_pinned_share", "fast_lane_share", "headroom", "max_headroom"]
)
@pytest.mark.parametrize("text", ["25%", "0.25"])
def test_every_share_may_be_given_in_percent(command: CommandLine, knob: str, text: str) -> None:
    outcome = command("sample", "--" + knob.replace("_", "-"), text)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.json["config"][knob] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ("--gpu-memory-utilization", "1.3"),
            "utilization: 1.3 is out of range; allowed is from 0.01 to 1",
        ),
        (("--max-num-seqs", "0"), "--max-num-seqs: 0 is out of range"),
        (("--max-num-seqs", "many"), "--max-num-seqs"),
        (("--dtype", "int3"), "--dtype"),
        (("--kv-cache-memory-bytes", "-1GiB"), "--kv-cache-memory-bytes"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_bad_input_is_one_line_naming_the_flag(command: CommandLine, arguments: tuple[str, ...], wanted: str) -> None:
    assert wanted in command.refused("sample", *arguments)


def test_config_error_keeps_the_field_for_the_program() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineOptions({"block_size": 0}).config("demo")
    assert caught.value.field == "block_size"


def test_unknown_command_and_version(command: CommandLine) -> None:
    assert "sample" in command.refused("sampel")
    outcome = command("--version")
    assert (outcome.code, outcome.out.startswith("llmsched ")) == (0, True)


def test_top_level_help_lists_commands_without_importing_them(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"ghost": cli.CommandEntry("no.such.module", "f", "Not there.")})
    outcome = command("--help")
    assert (outcome.code, "ghost" in outcome.out) == (0, True)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_num_seqs", "4", 4),
        ("headroom", "20%", 0.2),
        ("target_itl", "50ms", 0.05),
        ("swap_space", "2GiB", 2 << 30),
        ("enable_prefix_caching", "off", False),
        ("scheduling_policy", "fcfs", "fcfs"),
        ("max_model_len", "8k", 8192),
        ("max_model_len", "auto", None),
    ],
)
def test_the_value_of_a_setting_is_read_as_its_flag_reads_it(name: str, text: str, value: object) -> None:
    assert knob_value(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("max_num_seq", "4", "max_num_seq: is not an engine setting; did you mean max_num_seqs"),
        ("model", "x", "model: is not an engine setting"),
        ("max_num_seqs", "4.5", "max_num_seqs: '4.5' is not a whole number"),
        ("max_num_seqs", "0", "max_num_seqs: 0 is out of range; allowed is from 1 to 65536"),
        ("headroom", "nan", "headroom: 'nan' is not a share"),
        ("target_itl", "50", "target_itl: '50' needs a unit"),
        ("enable_prefix_caching", "maybe", "neither on nor off"),
        ("scheduling_policy", "tidal", "scheduling_policy: 'tidal' is not one of fair"),
    ],
)
def test_a_wrong_value_of_a_setting_names_it_and_what_is_allowed(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        knob_value(name, text)
