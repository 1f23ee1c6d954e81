from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.noise_ranking import Ranking
from llmsched.cli.tune.trial_runs import Goal, TrialRun
from llmsched.cli.tune.trials import Trial, judge
from llmsched.engine.goodput import Slo


class TrialHistory:
    """Runs of a search, grouped by setting. The settings are in the order in which they were first considered.

    `default` is the setting that `serve` has without a profile. `exact` means that a repeated run has the same figures,
    as on a virtual clock. `skipped` maps settings to the reasons why they were not run.
    """

    def __init__(self, slo: Slo, goal: Goal, default: Setting, *, exact: bool = False) -> None:
        self.slo = slo
        self.goal: Goal = goal if slo.given() else "throughput"
        self.exact = exact
        self.default = default
        self.chosen: Setting | None = None
        self.runs: dict[Setting, list[TrialRun]] = {}
        self.skipped: dict[Setting, str] = {}

    def consider(self, settings: Sequence[Setting]) -> None:
        """Add settings without runs behind those of the history. Settings that are already there keep their places."""
        for setting in settings:
            self.runs.setdefault(setting, [])

    def add(self, run: TrialRun) -> None:
        self.runs.setdefault(run.setting, []).append(run)

    def forget(self, round_index: int) -> None:
        """Remove the runs of a round, except those that failed."""
        for setting, runs in self.runs.items():
            self.runs[setting] = [run for run in runs if run.round_index != round_index or run.problem]

    @property
    def all_runs(self) -> list[TrialRun]:
        return [run for runs in self.runs.values() for run in runs]

    def worked(self) -> list[Setting]:
        """Return the settings with at least one run that did not fail."""
        return [setting for setting, runs in self.runs.items() if any(run.problem is None for run in runs)]

    def trial(self, setting: Setting) -> Trial:
        runs = self.runs.get(setting, ())
        trial = judge(setting, runs, self.slo)
        if runs:
            return trial
        return replace(trial, reason=self.skipped.get(setting, "not measured: out of time"), skipped=True)

    def trials(self) -> list[Trial]:
        return [self.trial(setting) for setting in self.runs]

    def ranking(self, goal: Goal | None = None) -> Ranking:
        return Ranking(self.all_runs, lambda run: run.rate(goal or self.goal), exact=self.exact)
