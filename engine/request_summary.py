"""Summaries of the latest requests, to find those whose client waited longest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from llmsched.engine.request import ChoiceRecord, RequestStatus

#: Number of choices that have ended whose summaries are kept.
MAX_SUMMARIES = 512


class RequestSummary(NamedTuple):
    """Counts and times of one choice of a request, which may not have ended yet. Times are in seconds."""

    request_id: str
    status: RequestStatus
    record: ChoiceRecord
    longest_stall: float | None  # longest time between two tokens, or since the last token if more may come

    @property
    def state(self) -> str:
        """FinishReason of a choice that has ended, else its RequestStatus."""
        return self.record.finish_reason or self.status

    @property
    def lasted(self) -> float:
        """Time from the arrival to the end or, if the choice has not ended, to the time of the summary."""
        return self.record.end_time - self.record.arrival_time

    @property
    def ttft(self) -> float | None:
        first = self.record.first_token_time
        return None if first is None else first - self.record.arrival_time

    @property
    def longest_wait(self) -> float:
        """Longest time that the client has waited for a token."""
        return max(self.lasted if self.ttft is None else self.ttft, self.longest_stall or 0.0)


def slowest(summaries: Iterable[RequestSummary], count: int) -> list[RequestSummary]:
    """Return the `count` requests with the longest wait for a token, each with its slowest choice, slowest first."""
    chosen: dict[str, RequestSummary] = {}
    for summary in sorted(summaries, key=lambda each: each.longest_wait, reverse=True):
        chosen.setdefault(summary.request_id, summary)
        if len(chosen) == count:
            break
    return list(chosen.values())
