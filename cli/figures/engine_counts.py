"""Counts of an engine: preemptions, waits, cache misses, late compilations, drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from llmsched.engine.kv.misses import MissKind
from llmsched.engine.scheduler.ledger import WAITS
from llmsched.kernels.dispatch import num_compiled

if TYPE_CHECKING:
    from llmsched.engine.scheduler.scheduler import Scheduler


#: Field of SchedulerCounters by key of EngineCounts.drafts.
DRAFT_COUNTS = {"drafts": "num_drafts", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens"}


@dataclass(frozen=True, slots=True)
class ChangingToken:
    """Early token at which `count` of the last `window` prompts differ, although they are alike after it."""

    position: int
    count: int
    window: int


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Totals that an engine has counted, since it started or during a run. None: unknown."""

    preemptions: int | None = None
    late_compilations: int | None = None
    #: Seconds that requests waited, summed over requests, by the reason of the wait (a key of WAITS).
    waited: Mapping[str, float] | None = None
    prefix_misses: Mapping[str, int] | None = None  # requests by MissKind, in lower case
    prompt_change: ChangingToken | None = None  # of the latest prompts
    #: Rows with a draft of speculative decoding, their draft tokens, and those that became output (see DRAFT_COUNTS).
    drafts: Mapping[str, int] | None = None
    replicas: Mapping[str, int] | None = None  # finished requests by replica; None without replicas

    def since(self, before: EngineCounts) -> EngineCounts:
        """Return what was counted after `before`. A count that fell (the server restarted) is None."""
        return EngineCounts(
            _difference(self.preemptions, before.preemptions),
            _difference(self.late_compilations, before.late_compilations),
            _differences(self.waited, before.waited),
            _differences(self.prefix_misses, before.prefix_misses),
            self.prompt_change,
            _differences(self.drafts, before.drafts),
            _differences(self.replicas, before.replicas),
        )

    @classmethod
    def sum(cls, counts: Sequence[EngineCounts]) -> Self:
        """Return the sums over several runs. A count that one run lacks is None."""

        def total(name: str, add: Callable[[list[Any]], Any]) -> Any:
            values = [getattr(one, name) for one in counts]
            return None if not values or None in values else add(values)

        plain, by_key = ("preemptions", "late_compilations"), ("waited", "prefix_misses", "drafts", "replicas")
        sums = {name: total(name, sum) for name in plain} | {name: total(name, _summed) for name in by_key}
        return cls(**sums, prompt_change=next((one.prompt_change for one in counts if one.prompt_change), None))

    @property
    def acceptance(self) -> float | None:
        """Share of draft tokens that were accepted; None without drafts."""
        drafts = self.drafts
        return drafts["accepted_tokens"] / drafts["draft_tokens"] if drafts and drafts["draft_tokens"] else None

    @property
    def tokens_per_draft(self) -> float | None:
        drafts = self.drafts
        return 1 + drafts["accepted_tokens"] / drafts["drafts"] if drafts and drafts["drafts"] else None

    def as_json(self) -> dict[str, Any]:
        """Return all counts but `preemptions`, which is a figure of its own."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preemptions"}
        return values | {"prompt_change": self.prompt_change and asdict(self.prompt_change)}


def scheduler_counts(scheduler: Scheduler) -> EngineCounts:
    """Return the totals of an engine in this process."""
    misses = scheduler.kv.prefix_cache.misses
    change = misses.watch.report()
    return EngineCounts(
        preemptions=scheduler.counters.num_preemptions,
        late_compilations=num_compiled(),
        waited={reason: getattr(scheduler.counters, name) for reason, name in WAITS.items()},
        prefix_misses={kind.name.lower(): misses.counts[kind] for kind in MissKind},
        prompt_change=None if change is None else ChangingToken(change.position, change.count, change.window),
        drafts={key: getattr(scheduler.counters, name) for key, name in DRAFT_COUNTS.items()},
    )


def changing_token(body: Any) -> ChangingToken | None:
    """Return the change of prompts that the body of /v1/cache reports."""
    match body:
        case {"prompt_change": {"position": int(position), "count": int(count), "window": int(window)}}:
            return ChangingToken(position, count, window)
    return None


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None or after < before else after - before


def _differences(after: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if after is None or before is None:
        return None
    found = {key: value - before.get(key, 0) for key, value in after.items()}
    return None if any(value < 0 for value in found.values()) else found


def _summed(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
