"""Runs of a setting on a virtual clock: as trials of a GPU that is not there, and to predict those of one that is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, Encode, WordEncode
from llmsched.cli.targets.simulated_clients import simulate_load
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.portion import Portion
from llmsched.cli.tune.trial_runs import TrialRun, run_of
from llmsched.cli.tune.watch import DemandWatch
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.latency import Slo
from llmsched.engine.simulated_engine import SimulatedEngine


class TrialLoad(NamedTuple):
    """What is sent and held against what; `timeout` in seconds. Prompts are of token `ids`, texts become ids."""

    load: Load
    slo: Slo
    timeout: float
    ids: Sequence[int] = COMMON_IDS
    encode: Encode = WordEncode(COMMON_IDS)

    def portion(self, requests: int, round_index: int) -> Portion:
        """What a run of a round sends: the same for all settings, and other prompts in every round."""
        return Portion(self.load.with_seed(self.load.seed + round_index), requests)


def simulated_run(
    engine: SimulatedEngine, setting: Setting, requests: int, round_index: int, asked: TrialLoad
) -> TrialRun:
    """Serve a portion of the load with a setting, on an engine that has served nothing. Raises ConfigError."""
    start, load = time.perf_counter(), asked.portion(requests, round_index)
    engine.reconfigure(**setting.limits())
    watch = DemandWatch(engine)
    records = simulate_load(
        load.plan(asked.ids, asked.encode),
        engine,
        closed=load.closed,
        max_concurrency=load.max_concurrency,
        timeout=asked.timeout,
        stop_after=load.stop_after,
    )
    figures = measure(RunRecord(records, engine.scheduler.counters.num_preemptions), load, asked.slo)
    seconds = time.perf_counter() - start
    return run_of(setting, round_index, requests, figures, demand=watch.demand(), seconds=seconds)


class SimulatedRunner:
    """A TrialRunner without a machine. It needs no predictions: its runs are no more than that.

    There is nothing in which rounds differ, so all send the load itself: a run in full is what `bench` simulates.
    """

    def __init__(self, blueprint: Blueprint, asked: TrialLoad) -> None:
        self._blueprint = blueprint
        self._asked = asked

    async def run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        run = simulated_run(self._blueprint.engine(), setting, requests, 0, self._asked)
        return replace(run, round_index=round_index)

    def predict(self, settings: Sequence[Setting], requests: int) -> Mapping[Setting, TrialRun]:
        return {}
