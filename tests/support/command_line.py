"""Runner of llmsched command lines in this process."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from llmsched.cli.main import main
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError

#: Function that makes stdout and stderr a terminal of a width (None: a pipe) and returns a reader of the output.
Terminal = Callable[[int | None], Callable[[], str]]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Output, parsed as strict JSON."""

        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        parsed: dict[str, Any] = json.loads(self.out, parse_constant=refuse)
        return parsed


@dataclass
class CommandLine:
    """Callable that runs a command, as in command("bench", "--json"), and returns its output and exit code."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str) -> Outcome:
        self.monkeypatch.setattr(sys, "argv", ["llmsched", *arguments])
        self.capsys.readouterr()  # what fixtures have printed
        with pytest.raises(SystemExit) as ended:
            main()
        printed = self.capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Outcome(code or 0, printed.out, printed.err)

    def refused(self, *arguments: str) -> str:
        """Run a command that must end with one line of error and no output, and return this line.

        Notes and the progress of slow work may stand before this line. The command `serve` may print output.
        """
        outcome = self(*arguments)
        assert outcome.code == 2, outcome
        assert not outcome.out or arguments[0] == "serve", outcome
        *others, error = outcome.err.splitlines()
        assert error.startswith("error: "), outcome
        assert all(line.startswith("note: ") or " ..." in line for line in others), outcome
        return error

    def served(self, line: str) -> EngineConfig:
        """Return the settings with which a printed `llmsched serve` command line starts the engine."""
        found: list[EngineConfig] = []

        def build_engine(config: EngineConfig, *_: object) -> None:
            found.append(config)
            raise LlmschedError("the settings are all that is wanted")

        program, *arguments = shlex.split(line)
        assert program == "llmsched"
        with self.monkeypatch.context() as patch:
            patch.setattr("llmsched.engine.build.build_engine", build_engine)
            outcome = self(*arguments, "--port", "0")
        assert found, outcome.err
        return found[0]
