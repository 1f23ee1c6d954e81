"""Races of settings, as in tune, on scripted measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Goal, TrialRun, TrialRunner, run_of
from llmsched.engine.goodput import Slo

SLO = Slo(ttft=1.0, itl=0.2)
A, B, C, D, E = (Setting(tokens, 8) for tokens in (32, 64, 128, 256, 512))
WORK = SyntheticLoad(num_prompts=10, max_concurrency=1)


def figures(rate: float, ttft: float = 0.1, tokens: int = 11, gap: float = 0.05) -> Measurement:
    """Return the figures of ten invented requests: one every 1/rate seconds, each with `tokens` output tokens."""
    records = []
    for index in range(10):
        start = index / rate
        chunks = [Chunk(start + ttft + gap * number, "x", 1) for number in range(tokens)]
        end = start + 1 / rate
        failure = None if tokens else RequestFailed("empty stream", "the request ended without a token")
        usage = ReportedUsage(8, 0, tokens)
        records.append(RequestRecord(index, start, start, start, None, end, chunks, usage, failure))
    return measure(RunRecord(records), WORK, SLO)


class Scripted(TrialRunner):
    """TrialRunner that returns `outcomes[setting](round_index)` as the measurement of a run, and logs each call."""

    def __init__(self, outcomes: dict[Setting, Callable[[int], Measurement]]) -> None:
        self.outcomes = outcomes
        self.log: list[tuple[Setting, int]] = []

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        self.log.append((setting, round_index))
        return run_of(setting, round_index, requests, self.outcomes[setting](round_index))


def raced(
    runner: Scripted, *, rounds: int = 1, goal: Goal = "throughput", lengths: tuple[int, ...] = (10,), slo: Slo = SLO
) -> TrialHistory:
    history = TrialHistory(slo, goal, A)

    async def main() -> None:
        race = Race(runner, history, lengths, rounds)
        await race.qualify("all", list(runner.outcomes))
        await race.final()

    asyncio.run(main())
    return history


def out_of_memory(round_index: int) -> Measurement:
    raise MemoryError("CUDA out of memory.\nTried to allocate 20 GiB")


FAULT_18: dict[Setting, Callable[[int], Measurement]] = {
    A: lambda n: figures(1.2),
    B: lambda n: figures(12, tokens=0),
    C: out_of_memory,
    D: lambda n: figures(5, ttft=3.0),
    E: lambda n: figures(1.21),
}
