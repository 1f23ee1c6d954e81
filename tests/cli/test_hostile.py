"""Every option that takes a value, with hostile values: they are valid, or one line on stderr names the option."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_line import CommandLine

from llmsched.cli.main import COMMANDS, load
from llmsched.engine import build
from llmsched.engine.calibration import timing as calibration
from llmsched.engine.parity import verification as parity

CONFIG = str(Path(__file__).parent.parent / "data/model_configs/meta-llama--Meta-Llama-3.1-8B_config.json")
SIMULATED = (CONFIG, "--simulate", "h100")
TINY = ("--num-prompts", "2", "--input-len", "8", "--output-len", "2")

ONE_KNOB = ("--knobs", "max_num_batched_tokens", "--max-num-batched-tokens", "64")

#: A call of each command that asks for next to nothing; commands of flags that need others stand twice.
CALLS = {
    "serve": ("serve", CONFIG, "--port", "0"),
    "bench": ("bench", *SIMULATED, *TINY, "--request-rate", "9"),
    "bench a trace": ("bench", *SIMULATED, "--workload", "azure-code", "--limit", "3", "--duration", "1s"),
    "bench for the knee": ("bench", *SIMULATED, *TINY, "--find-knee", "--slo-e2e", "10s"),
    "kv-budget": ("kv-budget", CONFIG, "--gpu", "h100"),
    "tune": ("tune", *SIMULATED, *TINY, "--no-warm-start", "--slo-e2e", "100ms", "--rate", "given", *ONE_KNOB),
    "workload": ("workload", "azure-code"),
    "calibrate": ("calibrate", CONFIG),
    "verify": ("verify", CONFIG),
    "chat": ("chat", "http://127.0.0.1:9", "-m", "hello"),
    "doctor": ("doctor", "http://127.0.0.1:9"),
    "top": ("top", "http://127.0.0.1:9"),
}
#: Flags whose value is a name, a text or a file.
WORDS = {
    *("--api-key", "--compare", "--csv", "--file", "--gpu", "--host", "--lengths", "--metrics-prefix", "--output"),
    *("--pin-prefix", "--profile", "--report", "--save", "--save-detailed", "--served-model-name", "--simulate"),
    *(
        "--adapter",
        "--admin-api-key",
        "--allowed-host",
        "--message",
        "--system",
        "--tokenizer",
        "--trace",
        "--url",
        "--workload",
    ),
}
HUGE = "9" * 30
VALUES = ("nan", "inf", "-inf", "-1", HUGE)
#: What is legal: all at once, and numbers without a limit.
LEGAL = {
    *(("--request-rate", value) for value in ("inf", HUGE)),
    *((flag, HUGE) for flag in ("--seed", "--max-request-rate", "--reader-speed", "--rounds", "--repeats")),
    *((flag, HUGE) for flag in ("--limit", "--speedup", "--max-input-len", "--max-output-len")),
    *(
        (flag, HUGE)
        for flag in ("--max-queue-size", "--max-passes", "--min-schedule-batch", "--num-gpu-blocks-override")
    ),
    *((flag, HUGE) for flag in ("--fast-lane-prompt", "--fast-lane-output")),
    ("--seed", "-1"),
}


def options() -> Iterator[tuple[str, str]]:
    for name, call in CALLS.items():
        for parameter in load(call[0]).params:
            flag = max(parameter.opts, key=len)
            if parameter.param_type_name == "option" and not parameter.is_flag and flag not in WORDS:
                yield name, flag


def reached(*arguments: Any, **settings: Any) -> NoReturn:
    """Replace the function where the work would begin."""
    raise SystemExit(0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path))
    monkeypatch.setattr(build, "build_engine", reached)
    monkeypatch.setattr(calibration, "measure_device", reached)
    monkeypatch.setattr(parity, "load_for_parity", reached)
    return CommandLine(monkeypatch, capsys)


def test_all_commands_with_numbers_are_called() -> None:
    assert {call[0] for call in CALLS.values()} == COMMANDS.keys() - {"profiles", "explain"}


@pytest.mark.parametrize(("name", "flag"), list(options()))
def test_hostile_values(command: CommandLine, name: str, flag: str) -> None:
    for value in VALUES:
        call = CALLS[name]
        if flag in call:
            place = call.index(flag)
            call = call[:place] + call[place + 2 :]
        outcome = command(*call, f"{flag}={value}")
        told = f"{flag}={value}: {outcome}"
        if (flag, value) in LEGAL and outcome.code != 2:
            continue
        assert outcome.code == 2, told
        assert outcome.out == "", told
        notes, error = outcome.err.splitlines()[:-1], outcome.err.splitlines()[-1]
        assert all(line.startswith("note: ") for line in notes), told
        assert flag in error, told
