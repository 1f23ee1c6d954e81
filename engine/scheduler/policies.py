"""The scheduler for each scheduling_policy. All share one interface, so that every claim can be measured in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llmsched.engine.config import BASELINE, EngineConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.engine.scheduler.static import StaticScheduler


def make_scheduler(kv: KVManager, config: EngineConfig, clock: Callable[[], float]) -> Scheduler:
    """The scheduler that `config.scheduling_policy` names.

    The baselines are the same scheduler without its cleverness: no headroom, prediction, fast lane, classes, cache
    bonus or passing, which leaves first come, first served (fcfs), shortest first (sptf) or one at a time (serial).
    """
    if config.scheduling_policy == "fair":
        return Scheduler(kv, config, clock)
    seqs = 1 if config.scheduling_policy == "serial" else config.max_num_seqs
    plain = replace(config, **BASELINE, max_num_seqs=seqs)
    return StaticScheduler(kv, plain, clock) if config.scheduling_policy == "static" else Scheduler(kv, plain, clock)
