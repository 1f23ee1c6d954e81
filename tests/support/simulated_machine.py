"""Simulated machine for tests of tune: the speed of each setting is given; noise and drift are added."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmsched.cli.tune.knobs import PeakDemand, Setting
from llmsched.cli.tune.trial_runs import ThinnedSamples, TrialRun
from llmsched.cli.tune.trials import TrialHistory

Figure = Callable[[Setting], float]


def hill(best_tokens: float, best_seqs: float, *, steep: float = 0.06, tie: float = 0.5) -> Figure:
    """Return a rate (tokens/s) with one maximum; `tie` couples the best token budget to the number of sequences."""

    def rate(setting: Setting) -> float:
        seqs = math.log2(setting.max_num_seqs / best_seqs)
        tokens = math.log2(setting.max_num_batched_tokens / best_tokens) - tie * seqs
        return 200 * math.exp(-steep * tokens**2 - steep * seqs**2)

    return rate


class SimulatedMachine:
    """TrialRunner whose runs take virtual time: requests x output tokens / rate.

    `noise` is the standard deviation of a full run's rate; shorter runs have more. `drift(t)` scales all rates at time
    t. `work` adds up the seconds that the runs would take without noise and drift. `itl` gives seconds between tokens.
    `says` is the prediction of the cost model; None if there is no model.
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

    async def run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        self.log.append((setting, requests, round_index))
        drift = self._drift(asyncio.get_running_loop().time())
        noise = math.exp(self._random.gauss(0, self._noise * math.sqrt(self._full / requests)))
        rate = self.rate(setting) * drift * noise
        run = made_run(setting, requests, round_index, rate, self.itl(setting) / drift, self._running)
        self.work += requests * 10 / self.rate(setting)
        await asyncio.sleep(run.seconds)
        return run

    def predict(self, settings: Sequence[Setting], requests: int) -> Mapping[Setting, TrialRun]:
        if self._says is None:
            return {}
        return {s: made_run(s, requests, 0, self._says(s), self.itl(s), self._running) for s in settings}


def made_run(
    setting: Setting, requests: int, round_index: int, rate: float, itl: float = 0.02, running: int = 16, **more: object
) -> TrialRun:
    """Make a run of requests of 10 tokens at `rate` tokens per second, all of which met their SLOs."""
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
    """Return the best setting, which must exist."""
    best = history.best()
    assert best is not None
    return best.setting
