from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import ServedRequest
from llmsched.cli.timeline import timeline_body
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo

#: Format marker in the first line of a file.
FORMAT = "llmsched bench detailed 1"

#: Times of a request, each None if the event did not happen.
_EVENTS = ("scheduled", "ready", "connecting", "connected", "sent", "end")


def detailed_lines(report: Mapping[str, Any], run: MeasuredRun) -> Iterator[str]:
    """Yield the lines of a `--save-detailed` file: the run, its requests, the target's states. Times are in seconds."""
    experiment, figures = run
    yield _line({"kind": "run", "format": FORMAT, "report": report})
    served = {one.record.index: one for one in figures.served}
    for record in figures.run.records:
        yield _line(
            {"kind": "request", **_request(record, served.get(record.index), experiment.slo, figures.run.start)}
        )
    for sample in figures.samples:
        state = {name: value if value is None else round(value, 6) for name, value in sample._asdict().items()}
        yield _line({"kind": "sample", **state})


def read_request(path: Path, name: str) -> dict[str, Any]:
    """Return the saved request whose id is `name` or, if there is none, whose index is `name`.

    Raises LlmschedError if no request matches.
    """
    found: dict[str, Any] | None = None
    try:
        if path.is_char_device():
            raise LlmschedError(f"--file {path}: is a device, not a file")
        with path.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                line = json.loads(text)
                if number == 1 and not (isinstance(line, dict) and line.get("format") == FORMAT):
                    raise ValueError("its first line lacks the format marker")
                if isinstance(line, dict) and line.get("kind") == "request":
                    if line.get("id") == name:
                        return line
                    if str(line.get("index")) == name:
                        found = line
    except OSError as problem:
        raise LlmschedError(f"--file {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise LlmschedError(f"--file {path} was not written by bench --save-detailed: {problem}") from problem
    if found is None:
        raise LlmschedError(
            f"--file {path} has no request {name!r}; allowed are the ids and the indices of its requests"
        )
    return found


def _request(record: RequestRecord, served: ServedRequest | None, slo: Slo, start: float) -> dict[str, Any]:
    """Return a request as JSON. Times are in seconds after `start`, latencies in milliseconds."""

    def after(time: float | None) -> float | None:
        return None if time is None else round(time - start, 6)

    latency = None if served is None else served.latency
    if served is None:  # then use the token counts that the target reports
        chunks = [(after(chunk.time), chunk.tokens) for chunk in record.chunks if chunk.text or chunk.tokens]
    else:
        chunks = [(after(arrival.time), arrival.tokens) for arrival in served.arrivals]
    timeline, failure = record.timeline, record.failure
    return {
        "index": record.index,
        "id": record.request_id,
        **{f"{event}_s": after(getattr(record, event)) for event in _EVENTS},
        "failure": None if failure is None else {"reason": failure.reason, "detail": failure.detail},
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.usage.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "output_tokens": None if served is None else sum(arrival.tokens for arrival in served.arrivals),
        "token_counts": None if served is None else served.counted_by,
        "ttft_ms": None if latency is None else _ms(latency.ttft),
        "tpot_ms": None if latency is None or latency.tpot is None else _ms(latency.tpot),
        "e2e_ms": None if latency is None else _ms(latency.e2e),
        "itl_ms": None if latency is None else [_ms(gap) for gap in latency.itl],
        "met": None if latency is None else slo.met_by(latency),
        "chunks": chunks,
        "arrived_s": None if timeline is None else after(timeline.start),
        "decisions": None if timeline is None else timeline_body(timeline)["entries"],
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"
