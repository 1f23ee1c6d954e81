"""Words for the entries of a request's timeline (see timeline.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmsched.engine.units import human_seconds


def summary(entries: Sequence[dict[str, Any]]) -> str:
    """Return a line that says how long the request waited, how often it was preempted and how it ended."""
    admitted = [entry for entry in entries if entry["what"] == "admitted"]
    waited = human_seconds((admitted[0] if admitted else entries[-1])["until_ms"] / 1e3)
    told = [f"waited {waited}" if admitted else f"not admitted after {waited}"]
    if preempted := sum(entry["count"] for entry in entries if entry["what"] == "preempted"):
        told.append(f"preempted {times(preempted)}")
    last = entries[-1]
    if last["what"] == "finished":
        details = last["details"]
        told.append(
            f"ended ({details['reason']}) after {human_seconds(last['at_ms'] / 1e3)} "
            f"with {details['output_tokens']} tokens"
        )
    else:
        told.append("has not ended")
    return ", ".join(told)


def decision_text(entry: dict[str, Any]) -> str:
    details = entry["details"]
    try:
        words = _WORDS[entry["what"]](details)
    except KeyError:
        words = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in details.items())
    return words if entry["count"] == 1 else f"{words} ({times(entry['count'])})"


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


#: Words for each WaitReason of the scheduler.
_WAITED_FOR = {
    "slot": "room among the running requests (max_num_seqs)",
    "memory": "memory",
    "step": "token budget",
    "prefix": "a prefix that another request was computing",
}


def _admitted(details: dict[str, Any]) -> str:
    words = f"{details['cached_tokens']} of {details['tokens']} tokens cached, {details['running']} running"
    if waits := [
        f"{human_seconds(ms / 1e3)} for {name}"
        for what, name in _WAITED_FOR.items()
        if (ms := details.get(f"waited_for_{what}_ms"))
    ]:
        words = f"waited {', '.join(waits)}; {words}"
    if restored := details.get("restored_blocks"):
        words += f"; {restored} blocks copied back from host memory"
    prefix, known = details.get("prefix"), details.get("known_tokens")
    if prefix == "diverged":
        return f"{words}; same as cached text up to token {known}, then different"
    if prefix == "evicted":
        age = details.get("evicted_s_ago")
        return f"{words}; the rest was evicted" + ("" if age is None else f" {human_seconds(age)} ago")
    return words if prefix in (None, "hit") else f"{words}; not cached: {prefix}"


def _does_not_fit(details: dict[str, Any]) -> str:
    when = {
        "now": f"with a headroom of {details['headroom_blocks']}",
        "predicted peak": "at the running requests' predicted peak",
    }[details["reason"]]
    return (
        f"{details['missing_blocks']} blocks short {when}; {details['free_blocks']} available, "
        f"{details['running']} running"
    )


def _preempted(details: dict[str, Any]) -> str:
    cost = human_seconds(details["cost_ms"] / 1e3)
    reason = {
        "memory": "memory ran out",
        "class": "a request of higher priority needed its room",
        "step_memory": "a step ran out of memory",
    }[details["reason"]]
    if details["how"] == "swap":
        return f"{reason}; {details['swapped_blocks']} blocks swapped to host memory, about {cost} out and back"
    return f"{reason}; {details['lost_tokens']} tokens to recompute, about {cost}"


def _computed(details: dict[str, Any]) -> str:
    words = f"up to token {details['up_to']} of {details['of']}"
    if details.get("reason") != "itl":
        return words
    within, decoding = human_seconds(details["step_ms"] / 1e3), details["decoding"]
    return f"{words}; each step is kept within {within} for the tokens of {decoding} decoding requests"


def _routed(details: dict[str, Any]) -> str:
    words = f"to {details['replica']}: {details['reason']}"
    candidates = details["candidates"]
    if candidates and candidates[0]["replica"] != details["replica"]:
        words += f" (to within {details['tie_ms']:g} ms; then the emptier cache wins)"
    if told := [_candidate(each) for each in candidates]:
        words += f"; expected TTFT {'; '.join(told)}"
        if more := details["num_candidates"] - len(told):
            words += f"; {more} more later"
    if refused := details["refused_by"]:
        words += f"; refused by {', '.join(refused)} before"
    return words


def _candidate(candidate: dict[str, Any]) -> str:
    ttft, queue, prefill = (human_seconds(candidate[f"{name}_ms"] / 1e3) for name in ("ttft", "queue", "prefill"))
    return (
        f"{ttft} at {candidate['replica']} ({queue} queue, {prefill} prefill with {candidate['cached_tokens']} tokens "
        f"cached, reported {human_seconds(candidate['age_ms'] / 1e3)} ago)"
    )


#: Functions that put the details of a scheduler's decision or of a client's event into words, by the name of the entry.
_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "routed": _routed,
    "queued": lambda d: f"{d['ahead']} waiting, {d['running']} running",
    "adapter": lambda d: f"computed with the LoRA adapter {d['name']}",
    "held back": lambda d: str(d["reason"]),
    "passed": lambda d: f"{d['by']} (priority {d['by_priority']}) goes first; overtaken {times(d['times'])} so far",
    "waits for a prefix": lambda d: f"another request is computing {d['tokens']} tokens that both need",
    "does not fit": _does_not_fit,
    "admitted": _admitted,
    "preempted": _preempted,
    "drafted": lambda d: f"{d['accepted']} of {d['of']} draft tokens were right so far",
    "computed": _computed,
    "longest stall": lambda d: f"{human_seconds(d['lasted_ms'] / 1e3)} without a token",
    "failed": lambda d: f"{d['reason']}: {d['detail']}" if d["detail"] else str(d["reason"]),
    "complete": lambda d: f"{d['output_tokens']} tokens",
    "finished": lambda d: f"{d['reason']}, {d['output_tokens']} tokens",
}
