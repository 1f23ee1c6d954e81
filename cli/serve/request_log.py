"""Record of each request to the model that has ended, and its line in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmsched.cli.log_lines import event
from llmsched.engine.request import ChoiceRecord
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.units import human_seconds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Record of an HTTP request to the model. Times are in seconds of the engine's clock."""

    request_id: str  # X-Request-Id
    answer_id: str
    path: str
    model: str
    key_name: str | None  # of its API key
    streamed: bool
    choices: Sequence[ChoiceRecord]  # of all its prompts
    headers: Mapping[str, str]
    sampling: SamplingParams  # of the first prompt

    @property
    def reason(self) -> str:
        """Finish reasons of all choices."""
        return ",".join(dict.fromkeys(choice.finish_reason for choice in self.choices if choice.finish_reason))

    @property
    def arrival_time(self) -> float:
        return min(choice.arrival_time for choice in self.choices)

    @property
    def end_time(self) -> float:
        return max(choice.end_time for choice in self.choices)

    @property
    def first_scheduled_time(self) -> float | None:
        times = (choice.first_scheduled_time for choice in self.choices)
        return min((time for time in times if time is not None), default=None)

    @property
    def first_token_time(self) -> float | None:
        times = (choice.first_token_time for choice in self.choices)
        return min((time for time in times if time is not None), default=None)

    @property
    def itl_p99(self) -> float | None:
        gaps = [gap for choice in self.choices for gap in choice.gaps]
        return float(np.percentile(gaps, 99)) if gaps else None

    def tokens(self) -> dict[str, int]:
        """Return the counts of tokens. A prompt with many choices counts once."""
        firsts = [choice for choice in self.choices if choice.index == 0]
        return {
            "prompt_tokens": sum(choice.num_prompt_tokens for choice in firsts),
            "cached_tokens": sum(choice.num_cached_tokens for choice in firsts),
            "output_tokens": sum(choice.num_output_tokens for choice in self.choices),
        }

    def times(self) -> dict[str, float | None]:
        """Return latencies in seconds by name. A latency is None if the tokens for it did not come."""
        start, scheduled, first = self.arrival_time, self.first_scheduled_time, self.first_token_time
        return {
            "queue": None if scheduled is None else scheduled - start,
            "prefill": None if first is None or scheduled is None else first - scheduled,
            "ttft": None if first is None else first - start,
            "itl_p99": self.itl_p99,
            "e2e": self.end_time - start,
        }


RequestObserver = Callable[[EndedRequest], None]


def log_request(request: EndedRequest) -> None:
    """Log a line about the request."""
    tokens, times = request.tokens(), request.times()
    preemptions = sum(choice.num_preemptions for choice in request.choices)
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "id": request.answer_id,
        "path": request.path,
        "model": request.model,
        "key": request.key_name,
        "stream": request.streamed,
        "choices": len(request.choices),
        "finish_reason": request.reason,
        **tokens,
        "preemptions": preemptions,
        **{f"{name}_ms": None if time is None else round(1e3 * time, 3) for name, time in times.items()},
    }
    parts = [
        f"{tokens['prompt_tokens']} ({tokens['cached_tokens']} cached) + {tokens['output_tokens']} tokens",
        *(f"{label} {human_seconds(time)}" for name, label in _LABELS.items() if (time := times[name]) is not None),
    ]
    if preemptions:
        parts.append(f"{preemptions} preemptions")
    by = "" if request.key_name is None else f" by {request.key_name}"
    logger.info(
        "request %s%s: %s | %s",
        request.request_id,
        by,
        request.reason,
        " | ".join(parts),
        extra=event("request", fields),
    )


_LABELS = {"queue": "queue", "ttft": "TTFT", "itl_p99": "P99 ITL", "e2e": "E2E"}
