"""Journal of a search, from which `tune --resume` continues an interrupted search without repeating its runs."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_runs import Predictions, TrialRun, TrialRunner, attempt
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.toml_files import read_file


def state_path(profile: Path) -> Path:
    """Return the path of the journal beside the profile that the search will write."""
    return profile.with_name(f"{profile.stem}.state.jsonl")


class ResumableRunner(TrialRunner):
    """TrialRunner that records the runs of another TrialRunner in a journal and does not repeat recorded runs.

    The first line of the JSON Lines file identifies the search; each further line holds a run or predictions.
    """

    def __init__(
        self,
        runner: TrialRunner,
        path: Path,
        about: Mapping[str, Any],
        *,
        resume: bool,
        deadline: float | None = None,
    ) -> None:
        """Start the journal at `path` or, with `resume`, continue it. `about` identifies the search.

        `deadline` is a time of the event loop's clock. Raises LlmschedError if the journal belongs to another search or
        cannot be used.
        """
        self.path = path
        self._runner = runner
        self._runs: dict[tuple[Setting, int, int, float | None], deque[TrialRun]] = defaultdict(deque)
        self._predicted: deque[Predictions] = deque()
        self._writable = True
        self._deadline = deadline
        about = json.loads(json.dumps(about))
        if resume:
            self._read(about)
        else:
            self._write(_line({"about": about}), mode="w")

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        """Return the recorded run or, if there is none, a new one. Raises OutOfTimeError if the deadline passes."""
        if known := self._runs[setting, requests, round_index, rate]:
            return known.popleft()
        try:
            async with asyncio.timeout_at(self._deadline):
                run = await attempt(self._runner, setting, requests, round_index, rate)
        except TimeoutError:
            raise OutOfTimeError from None
        self._keep({"run": asdict(run), "rate": rate})
        return run

    def predict(self, settings: Sequence[Setting], requests: int, rate: float | None = None) -> Predictions:
        if self._predicted and (known := self._predicted.popleft()).keys() <= set(settings):
            return known
        predicted = self._runner.predict(settings, requests, rate)
        self._keep({"predicted": [asdict(run) for run in predicted.values()]})
        return predicted

    def delete_journal(self) -> None:
        self.path.unlink(missing_ok=True)

    def _keep(self, entry: Mapping[str, Any]) -> None:
        """Append an entry to the journal. If this fails, warn once and stop recording."""
        if self._writable:
            try:
                self._write(_line(entry), mode="a")
            except LlmschedError as problem:
                self._writable = False
                render.warn(f"{problem}; if interrupted, the search cannot be resumed")

    def _write(self, text: str, mode: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as problem:
            raise LlmschedError(f"the search journal {self.path} cannot be written: {problem.strerror}") from problem

    def _read(self, about: Mapping[str, Any]) -> None:
        from pydantic import TypeAdapter

        try:
            lines = read_file(self.path).split("\n")
        except FileNotFoundError:
            raise LlmschedError(f"--resume: there is no unfinished search at {self.path}") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise LlmschedError(f"--resume: {self.path} cannot be read: {problem}") from problem
        # If the last line has no line break, the search was killed while writing it.
        complete = lines[:-1]
        if lines[-1]:
            self._write("".join(f"{line}\n" for line in complete), mode="w")
        restore = TypeAdapter(TrialRun).validate_python
        try:
            entries = [json.loads(line, parse_constant=_no_number) for line in complete]
            self._check(entries[0]["about"], about)
            for run, rate in [(restore(entry["run"]), entry.get("rate")) for entry in entries if "run" in entry]:
                self._runs[run.setting, run.requests, run.round_index, rate].append(run)
            for predicted in [map(restore, entry["predicted"]) for entry in entries if "predicted" in entry]:
                self._predicted.append({run.setting: run for run in predicted})
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as problem:
            raise LlmschedError(f"--resume: {self.path} is not a search journal; leave out --resume") from problem

    def _check(self, about: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name in [*now, *(about.keys() - now.keys())]:
            if about.get(name) != now.get(name):
                raise LlmschedError(
                    f"--resume: {self.path} belongs to a search with another {name} ({about.get(name)}, now "
                    f"{now.get(name)}); leave out --resume to start over"
                )


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
