"""A search that can be interrupted: every run is written down as it ends, and not repeated when the search goes on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.race import TrialRunner
from llmsched.cli.tune.trial_runs import TrialRun, failed_run, from_json, to_json
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.toml_files import read_file


def state_path(profile: Path) -> Path:
    """Where the state of a search lies until its profile is written: beside it."""
    return profile.with_name(f"{profile.stem}.state.jsonl")


class SearchJournal:
    """One JSON object per line: first what the search is about, then its runs and what was predicted.

    `runs` and `predicted` are what a resumed search knows from before.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a journal, or with `resume` go on with one. Raises LlmschedError if that one is about something else,
        or the file cannot be read or written.
        """
        self.path = path
        self.runs: list[TrialRun] = []
        self.predicted: list[dict[Setting, TrialRun]] = []
        self._writable = True
        self._about = json.loads(json.dumps(about))
        if resume:
            self._read()
        else:
            self._write({"about": self._about}, mode="w")

    def add(self, run: TrialRun) -> None:
        self.runs.append(run)
        self._keep({"run": to_json(run)})

    def add_predicted(self, predicted: Mapping[Setting, TrialRun]) -> None:
        self._keep({"predicted": [to_json(run) for run in predicted.values()]})

    def delete(self) -> None:
        """The search is over."""
        self.path.unlink(missing_ok=True)

    def _keep(self, line: Mapping[str, Any]) -> None:
        """Write a line down if that is possible: a full disk must not end a search that could go on without."""
        if self._writable:
            try:
                self._write(line)
            except LlmschedError as problem:
                self._writable = False
                render.warn(f"{problem}; should the search be interrupted, it begins anew")

    def _write(self, line: Mapping[str, Any], mode: str = "a") -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as problem:
            raise LlmschedError(f"the state {self.path} cannot be written: {problem.strerror}") from problem

    def _read(self) -> None:
        try:
            lines = read_file(self.path).split("\n")
        except FileNotFoundError:
            raise LlmschedError(f"--resume: there is no unfinished search at {self.path}") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise LlmschedError(f"--resume: {self.path} cannot be read: {problem}") from problem
        # What ends without a line break was being written when the search was killed.
        complete = lines[:-1]
        if lines[-1]:
            self._cut(complete)
        try:
            entries = [json.loads(line, parse_constant=_no_number) for line in complete]
            self._check(entries[0]["about"])
            self.runs = [from_json(entry["run"]) for entry in entries if "run" in entry]
            said = [[from_json(run) for run in entry["predicted"]] for entry in entries if "predicted" in entry]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as problem:
            raise LlmschedError(f"--resume: {self.path} is not the state of a search; leave out --resume") from problem
        self.predicted = [{run.setting: run for run in each} for each in said]

    def _cut(self, complete: Sequence[str]) -> None:
        try:
            self.path.write_text("".join(f"{line}\n" for line in complete), encoding="utf-8")
        except OSError as problem:
            raise LlmschedError(f"the state {self.path} cannot be written: {problem.strerror}") from problem

    def _check(self, about: Mapping[str, Any]) -> None:
        for name in [*self._about, *(about.keys() - self._about.keys())]:
            was, is_now = about.get(name), self._about.get(name)
            if was != is_now:
                raise LlmschedError(
                    f"--resume: {self.path} is of a search with another {name} ({was}, now {is_now}); "
                    "leave out --resume to start anew"
                )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


class ResumableRunner:
    """A TrialRunner that asks another only for what the journal does not have, and writes down what that one says."""

    def __init__(self, runner: TrialRunner, journal: SearchJournal) -> None:
        self._runner = runner
        self._journal = journal
        self._predictions = iter(list(journal.predicted))
        self._known: dict[tuple[Setting, int, int], deque[TrialRun]] = {}
        for run in journal.runs:
            self._known.setdefault((run.setting, run.requests, run.round_index), deque()).append(run)

    async def run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        if known := self._known.get((setting, requests, round_index)):
            return known.popleft()
        try:
            run = await self._runner.run(setting, requests, round_index)
        except Exception as problem:
            run = failed_run(setting, round_index, requests, problem)
        self._journal.add(run)
        return run

    def predict(self, settings: Sequence[Setting], requests: int) -> Mapping[Setting, TrialRun]:
        known = next(self._predictions, None)
        if known is not None and known.keys() <= set(settings):
            return known
        predicted = self._runner.predict(settings, requests)
        self._journal.add_predicted(predicted)
        return predicted
