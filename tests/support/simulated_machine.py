"""Simulated machine for tests of tune. A test gives the speed of each setting, and the machine adds noise and drift."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from llmsched.cli.tune.knobs import PeakDemand, Setting
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Predictions, ThinnedSamples, TrialRun

Figure = Callable[[Setting], float]


def hill(best_tokens: float, best_seqs: float, *, steep: float = 0.06, tie: float = 0.5) -> Figure:
    """Return a function from settings to tokens/s, with one maximum.

    `steep` is how fast the rate falls on both sides of the maximum. `tie` makes the best token budget depend on the
    number of sequences; at 0 it is always `best_tokens`.
    """

    def rate(setting: Setting) -> float:
        seqs = math.log2(setting.max_num_seqs / best_seqs)
        tokens = math.log2(setting.max_num_batched_tokens / best_tokens) - tie * seqs
        return 200 * math.exp(-steep * tokens**2 - steep * seqs**2)

    return rate


class SimulatedMachine:
    """TrialRunner in virtual time. A run takes (output tokens of all its requests) / rate seconds.

    `noise` is the relative standard deviation of the rate in a run of `full` requests; shorter runs have more noise.
    `drift(t)` scales all rates at time t. `work` is the total time in seconds that the runs would have taken without
    noise and drift. `itl` returns the seconds between two tokens. `says` returns the rate that the cost model predicts;
    None stands for no cost model.
    """

    def __init__(
        self,
        rate: Figure,
        *,
        itl: Figure = lambda setting: 0.02,
        full: int = 32,
        noise: float = 0.02,
        drift: Callable[[float], float] = lambda time: 1.0,
        seed: int = 0,
        says: Figure | None = None,
        running: int = 16,
    ) -> None:
        self.rate, self.itl = rate, itl
        self.log: list[tuple[Setting, int, int]] = []
        self.work = 0.0
        self._full, self._noise, self._drift, self._says, self._running = full, noise, drift, says, running
        self._random = random.Random(seed)

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        self.log.append((setting, requests, round_index))
        drift = self._drift(asyncio.get_running_loop().time())
        noise = math.exp(self._random.gauss(0, self._noise * math.sqrt(self._full / requests)))
        speed = self.rate(setting) * drift * noise
        run = made_run(setting, requests, round_index, speed, self.itl(setting) / drift, self._running)
        self.work += requests * 10 / self.rate(setting)
        await asyncio.sleep(run.seconds)
        return run

    def predict(self, settings: Sequence[Setting], requests: int, rate: float | None = None) -> Predictions:
        if self._says is None:
            return {}
        return {s: made_run(s, requests, 0, self._says(s), self.itl(s), self._running) for s in settings}


def made_run(
    setting: Setting, requests: int, round_index: int, rate: float, itl: float = 0.02, running: int = 16, **more: object
) -> TrialRun:
    """Make a run whose requests have 10 output tokens each and meet their SLOs, at `rate` tokens per second."""
    seconds = requests * 10 / rate
    samples = {"itl": ThinnedSamples((itl,), requests * 9, itl * requests * 9, itl)}
    samples["ttft"] = samples["tpot"] = ThinnedSamples((0.1,), requests, 0.1 * requests, 0.1)
    run = TrialRun(
        setting,
        round_index,
        requests,
        seconds=seconds,
        completed=requests,
        output_tokens=requests * 10,
        tokens_per_s=rate,
        met={"itl": requests, "all": requests},
        samples=samples,
        demand=PeakDemand(running, 0.1),
    )
    return replace(run, **more)  # type: ignore[arg-type]


def winner(history: TrialHistory) -> Setting:
    """Return the best setting of a history that has one."""
    best = best_trial(history)
    assert best is not None
    return best.setting
