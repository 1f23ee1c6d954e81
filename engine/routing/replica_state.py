"""State that a replica publishes for a router: its queue, its speed and its cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from llmsched.engine.executor.cost import StepShape
from llmsched.engine.kv.cache_summary import CacheSummary, span_of
from llmsched.engine.request import Request
from llmsched.engine.scheduler.scheduler import Scheduler

#: Seconds between two states that a replica publishes.
PUBLISH_SECONDS = 1.0
#: Seconds per prefill token and per step that a replica reports until its step-time model is trusted.
_FIRST_TOKEN_SECONDS, _FIRST_STEP_SECONDS = 1e-4, 0.02
#: Waiting requests whose prefix hits are looked up for one state. The others are assumed to be like them.
_MAX_LOOKUPS = 16


class PrefillSpeed(NamedTuple):
    """Speed of prefills: seconds per token, and per pair of a token and a token before it."""

    token_seconds: float
    pair_seconds: float

    def seconds(self, start: int, end: int) -> float:
        """Return the expected seconds to compute the prompt tokens `start` to `end` - 1 of a request."""
        count = end - start
        return count * (self.token_seconds + self.pair_seconds * (start + count / 2))


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """State of a replica at `time`, in seconds of the router's clock."""

    time: float
    backlog_seconds: float  # to compute the prompts of waiting and running requests, less what is computed or cached
    num_waiting: int
    num_admissible: int  # more requests for which max_num_seqs and KV memory have room now
    admission_seconds: float  # expected seconds until the next running request ends and makes room
    token_seconds: float  # seconds per prefill token, beside the running decodes
    pair_seconds: float  # seconds per pair of a prefill token and a token before it
    step_seconds: float  # of a step with the running decodes alone
    prefixes: frozenset[bytes] = frozenset()  # see CacheSummary

    def seconds_to_admission(self, num_ahead: int) -> float:
        """Return the expected seconds until a new request is admitted, if `num_ahead` requests wait before it."""
        return max(0, num_ahead + 1 - self.num_admissible) * self.admission_seconds

    @property
    def prefill(self) -> PrefillSpeed:
        return PrefillSpeed(self.token_seconds, self.pair_seconds)


class StateReporter:
    """Reporter of a scheduler's state. From its creation on, it keeps a summary of the scheduler's prefix cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        kv = scheduler.kv
        self.summary = CacheSummary(kv.layout, span_of(kv.block_size), states=kv.states)
        kv.prefix_cache.tree.observer = self.summary

    def report(self, now: float) -> ReplicaState:
        """Return the present state. The engine's thread calls this between two steps."""
        scheduler = self._scheduler
        running = scheduler.running
        step_seconds, token_seconds, pair_seconds = self._speed()
        remaining = sum(scheduler.predictor.remaining(request) for request in running)
        state = ReplicaState(
            time=now,
            backlog_seconds=0.0,
            num_waiting=len(scheduler.waiting),
            num_admissible=self._num_admissible(remaining),
            admission_seconds=step_seconds * (1 + remaining / len(running)) / len(running) if running else 0.0,
            token_seconds=token_seconds,
            pair_seconds=pair_seconds,
            step_seconds=step_seconds,
            prefixes=self.summary.hashes(),
        )
        return replace(state, backlog_seconds=self._backlog(state))

    def _speed(self) -> tuple[float, float, float]:
        """Return the seconds of a step without prefills, per prefill token, and per pair of tokens."""
        pacer, running = self._scheduler.pacer, self._scheduler.running
        if not pacer.model.trusted:
            return _FIRST_STEP_SECONDS, _FIRST_TOKEN_SECONDS, 0.0
        decodes = sum(r.num_tokens - r.num_computed_tokens <= 1 for r in running)
        kv_tokens = sum(r.num_computed_tokens for r in running)
        prefill = max(1, (pacer.step_budget if decodes else pacer.limit) - decodes)
        step = pacer.model.predict(StepShape(0, decodes, kv_tokens))
        with_prefill = pacer.model.predict(StepShape(prefill, decodes, kv_tokens))
        longer = pacer.model.predict(StepShape(prefill, decodes, kv_tokens + 1000))
        return step, with_prefill / prefill, (longer - with_prefill) / 1000 / prefill

    def _backlog(self, state: ReplicaState) -> float:
        waiting = self._scheduler.waiting
        seconds = sum(
            state.prefill.seconds(r.num_computed_tokens, r.num_tokens)
            for r in self._scheduler.running
            if r.num_tokens - r.num_computed_tokens > 1
        )
        looked_up = list(islice(waiting, _MAX_LOOKUPS))
        of_waiting = sum(state.prefill.seconds(self._num_kept(each), each.num_tokens) for each in looked_up)
        return seconds + of_waiting * len(waiting) / max(1, len(looked_up))

    def _num_kept(self, request: Request) -> int:
        """Return how many tokens of a waiting request need not be computed."""
        swapped = request.swapped
        found = self._scheduler.kv.prefix_cache.find(request).num_tokens
        return max(found, 0 if swapped is None else swapped.num_tokens)

    def _num_admissible(self, remaining: int) -> int:
        running, kv = self._scheduler.running, self._scheduler.kv
        places = max(0, self._scheduler.admission.control.max_running - len(running))
        if not running:
            return places
        mean_tokens = (remaining + sum(request.num_tokens for request in running)) / len(running)
        return min(places, int(kv.pool.num_available * kv.block_size / max(1.0, mean_tokens)))
