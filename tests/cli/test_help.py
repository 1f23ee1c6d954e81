"""Help: every command and option is explained, and every example can be parsed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_line import CommandLine
from lora_files import save_adapter
from torch import nn

from llmsched.cli import calibrate, chat, explain, top, verify
from llmsched.cli.bench import command as bench
from llmsched.cli.bench.report import output_flags
from llmsched.cli.cluster import start as cluster_start
from llmsched.cli.doctor import command as doctor
from llmsched.cli.main import COMMANDS, EPILOG, load
from llmsched.cli.tune import command as tune
from llmsched.cli.workload import command as workload
from llmsched.engine import build
from llmsched.engine.parity import verification as parity
from llmsched.profiles.tuned import TunedProfile, save_profile

CONFIG = Path(__file__).parent.parent / "data/model_configs/Qwen--Qwen3-0.6B_config.json"


def helps() -> Iterator[tuple[str, str]]:
    """Yield every command and subcommand with the text above its options."""
    yield "", EPILOG
    for name in COMMANDS:
        command = load(name)
        yield name, command.help or ""
        for inner, sub in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", sub.help or ""


def examples() -> list[str]:
    lines = [line.strip() for _, text in helps() for line in text.splitlines()]
    found = [part.strip() for line in lines if line.startswith("llmsched ") for part in line.split(";")]
    return [line for line in found if not line.startswith("llmsched COMMAND")]


def reached(*arguments: Any, **settings: Any) -> NoReturn:
    """Replace the function where the work would begin."""
    raise SystemExit(0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    """Return the command line in a directory with the files that the examples name, without models and servers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path))
    for name in ("demo", "night-shift"):
        save_profile(TunedProfile(engine={"max_num_seqs": 8}), name)
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a b", "max_tokens": 3, "timestamp": 0}\n' * 2)
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01,100,10\n")
    (tmp_path / "config.json").write_text(CONFIG.read_text())
    (tmp_path / "system_prompt.json").write_text(json.dumps({"messages": [{"role": "system", "content": "Be kind."}]}))
    for name in ("sql-adapter", "chat-adapter"):
        save_adapter(tmp_path / name, nn.ModuleDict({"q_proj": nn.Linear(4, 4)}), ("q_proj",))
    for module, name in (
        *((bench, each) for each in ("bench_target", "bench_compare", "bench_self")),
        *((tune, each) for each in ("tune_engine", "tune_simulated")),
        *((explain, each) for each in ("_fetch", "read_request")),
        *((chat, each) for each in ("_answer", "_converse")),
        *((top, each) for each in ("_look", "_print_lines")),
        *((doctor, each) for each in ("_evidence", "system_facts")),
        (output_flags, "read_report"),
        *(
            (workload, "load_encoder"),
            (build, "build_engine"),
            (cluster_start, "start_replicas"),
            (calibrate, "open_planner"),
            (parity, "load_for_parity"),
            (verify, "run_saved"),
        ),
    ):
        monkeypatch.setattr(module, name, reached)
    monkeypatch.setattr("llmsched.cli.kv_budget.command.resolve_model", lambda model: "config.json")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("llmsched.cli.serve.lifecycle.listen", lambda host, port: [])
    return CommandLine(monkeypatch, capsys)


def test_there_are_examples_of_every_command() -> None:
    shown = {shlex.split(line)[1] for line in examples()}
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("line", examples())
def test_an_example_is_understood(command: CommandLine, line: str) -> None:
    outcome = command(*shlex.split(line)[1:])
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", [name for name, _ in helps() if name])
def test_help_explains_every_option(command: CommandLine, name: str) -> None:
    for flag in ("--help", "-h"):
        outcome = command(*name.split(), flag)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.startswith("Usage: ")
    parts = load(name.split()[0])
    for inner in name.split()[1:]:
        parts = parts.commands[inner]
    for parameter in parts.params:
        assert parameter.help, f"{name}: {parameter.opts} has no help"


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_out_of_range_is_refused_with_both_bounds(command: CommandLine, port: str) -> None:
    told = command.refused("serve", "--port", port)
    assert told == f"error: Invalid value for '--port': '{port}'; allowed is 0 to 65535"


def test_help_states_the_default_model(command: CommandLine) -> None:
    for name in ("serve", "bench", "kv-budget", "tune", "calibrate", "verify"):
        assert re.search(r"default:\s+\(?\$?LLMSCHED_MODEL,\s+else\s+demo", command(name, "--help").out), name
