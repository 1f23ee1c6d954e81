"""Arrival times of a request's tokens, from the most exact token counts that are available."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llmsched.cli.figures.record import RequestRecord
from llmsched.engine.request_latency import Arrival, RequestLatency, request_latency

CountTokens = Callable[[str], int]

#: Sources of a request's output token count, best first.
EXACT = "exact per chunk"
USAGE = "usage, spread evenly over chunks"
RETOKENISED = "re-tokenised text"
CHUNKS = "one token per chunk assumed"


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Completed request with its latencies."""

    record: RequestRecord
    arrivals: Sequence[Arrival]
    latency: RequestLatency
    counted_by: str  # source of the token count


def served(record: RequestRecord, count_tokens: CountTokens | None) -> ServedRequest | None:
    """Return a request with its latencies; None if the request did not complete or got no token."""
    if not record.completed:
        return None
    placed, counted_by = arrivals(record, count_tokens)
    latency = request_latency(record.scheduled, placed)
    return ServedRequest(record, placed, latency, counted_by) if latency else None


def arrivals(record: RequestRecord, count_tokens: CountTokens | None) -> tuple[list[Arrival], str]:
    """Return the arrivals of a request's tokens, and the source of the token count (EXACT, USAGE, ...)."""
    chunks = record.chunks
    told = sum(chunk.tokens or 0 for chunk in chunks)
    times = [chunk.time for chunk in chunks if chunk.text]
    stated = record.usage.output_tokens
    if (
        told
        and all(chunk.tokens is not None for chunk in chunks if chunk.text)
        and (stated in (told, None) or not times)
    ):
        return [Arrival(chunk.time, chunk.tokens or 0) for chunk in chunks], EXACT
    if stated:
        return _spread(stated, times), USAGE
    if count_tokens is not None:
        # Surrogate pairs that were split over chunks are joined, unpaired surrogates replaced.
        text = "".join(chunk.text for chunk in chunks).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return _spread(max(1, count_tokens(text)), times), RETOKENISED
    return _spread(len(times), times), CHUNKS


def worst_source(requests: Sequence[ServedRequest]) -> str | None:
    used = {one.counted_by for one in requests}
    return next((source for source in (CHUNKS, RETOKENISED, USAGE, EXACT) if source in used), None)


def _spread(tokens: int, times: Sequence[float]) -> list[Arrival]:
    if not times:
        return []
    ends = [-(-tokens * (index + 1) // len(times)) for index in range(len(times))]
    return [Arrival(time, after - before) for time, (before, after) in zip(times, pairwise([0, *ends]), strict=True)]
