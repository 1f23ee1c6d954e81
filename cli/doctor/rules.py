"""Rules of `doctor`: what is wrong with a server or run, the number behind it, and what to change.

A rule looks only at an Evidence. To add a rule, add an entry to RULES, and a simulated run to its test that triggers
exactly this rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmsched.cli.doctor.evidence import Evidence
from llmsched.engine.units import human_seconds

#: Fewest requests from which shares and rates are judged.
MIN_REQUESTS = 20

#: A P99 of TTFT below this many seconds is not slow.
_SLOW_TTFT_S = 0.5
#: A wait is the cause of a slow TTFT if it takes this share of the mean TTFT.
_CAUSE = 0.5
#: KV memory counts as idle if requests hold less than this share of it.
_IDLE_KV = 0.5
#: Preemptions per finished request above which there are too many. The scheduler then widens its headroom.
_THRASH = 0.05
#: Largest acceptable shares of requests whose prefix was evicted, that were refused, and that clients gave up.
_EVICTED, _REFUSED, _GIVEN_UP = 0.2, 0.01, 0.05
#: Reasons for the end of requests that clients did not wait for.
_UNANSWERED = ("timeout", "abort", "deadline")
#: A decode is stalled if P99 ITL is this many times P50, and at least this many seconds.
_STALL_RATIO, _STALL_S = 8.0, 0.1
#: P99 of a request's length is close to max_model_len above the first share of it, and far below it under the second.
_CLOSE, _FAR = 0.9, 0.25
#: Share of KV memory that a request of max_model_len tokens may take.
_LARGEST = 0.5
#: Share of the KV memory of requests that may be reserved without holding KV.
_WASTE = 0.4


class Finding(NamedTuple):
    rule: str
    problem: str  # a sentence with the number
    remedy: str  # a sentence that says what to change
    flags: tuple[str, ...]  # of `serve`, that the remedy names


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    needs: tuple[str, ...]  # attributes of Evidence; if one is None, the rule cannot be checked
    holds: Callable[[Evidence], bool]
    problem: Callable[[Evidence], str]
    remedy: Callable[[Evidence], str]
    flags: tuple[str, ...] = ()
    by_share: bool = True  # the rule judges a share or a distribution, which needs MIN_REQUESTS requests

    def can_judge(self, evidence: Evidence) -> bool:
        enough = not self.by_share or evidence.total >= MIN_REQUESTS
        return enough and all(_known(evidence, name) is not None for name in self.needs)


class Diagnosis(NamedTuple):
    findings: list[Finding]
    unchecked: list[str]  # names of the rules for which figures are missing


def diagnose(evidence: Evidence) -> Diagnosis:
    """Apply all rules, in their order."""
    findings, unchecked = [], []
    for rule in RULES:
        if not rule.can_judge(evidence):
            unchecked.append(rule.name)
        elif rule.holds(evidence):
            findings.append(Finding(rule.name, rule.problem(evidence), rule.remedy(evidence), rule.flags))
    return Diagnosis(findings, unchecked)


def _known(evidence: Evidence, name: str) -> object:
    owner = evidence.counts if name in evidence.counts.__slots__ else evidence
    return getattr(owner, name)


def _number(value: float | None) -> float:
    """Return the value of a figure, which is known because the rule's `needs` names it."""
    assert value is not None
    return value


def _seconds(value: float | None) -> str:
    return human_seconds(_number(value))


def _share(value: float | None) -> str:
    return f"{_number(value):.0%}" if value == 0 or _number(value) >= 0.1 else f"{_number(value):.1%}"


def _waits(evidence: Evidence, *reasons: str) -> bool:
    """Return True if TTFT is slow because requests wait for these reasons."""
    waited = sum(evidence.mean_wait(reason) or 0.0 for reason in reasons)
    return _number(evidence.ttft_p99) >= _SLOW_TTFT_S and waited >= _CAUSE * _number(evidence.ttft_mean)


def _has_idle_kv(evidence: Evidence) -> bool:
    return _number(evidence.kv_share) < _IDLE_KV


def _late(evidence: Evidence) -> str:
    return f"P99 TTFT is {_seconds(evidence.ttft_p99)}"


def _waiting_for(evidence: Evidence, *reasons: str) -> str:
    return f"requests wait {human_seconds(sum(evidence.mean_wait(reason) or 0.0 for reason in reasons))} on average"


def _more_slots(evidence: Evidence) -> str:
    if evidence.max_running is None:
        return "raise --max-num-seqs"
    wanted = int(0.8 * evidence.max_running / max(0.01, _number(evidence.kv_share)))
    return f"raise --max-num-seqs, which is {evidence.max_running}; KV memory has room for {wanted} of these requests"


def _fewer_slots(evidence: Evidence) -> str:
    more = "for more KV memory set --kv-cache-dtype fp8 or raise --gpu-memory-utilization"
    if evidence.running is None:
        return f"lower --max-num-seqs, or raise --headroom; {more}"
    return f"lower --max-num-seqs to {max(1, int(0.9 * evidence.running))}, or raise --headroom; {more}"


def _refusal(evidence: Evidence) -> str:
    told = evidence.examples.get("refused")
    return f"{evidence.failures['refused']} of {evidence.total} requests were refused" + (f": {told}" if told else "")


def _failed(evidence: Evidence) -> dict[str, int]:
    return {reason: n for reason, n in evidence.failures.items() if reason not in ("refused", *_UNANSWERED)}


def _failures(evidence: Evidence) -> str:
    told = [
        f"{reason}{f' ({detail})' if (detail := evidence.examples.get(reason)) else ''}: {count}"
        for reason, count in _failed(evidence).items()
    ]
    return f"{sum(_failed(evidence).values())} of {evidence.total} requests failed; {', '.join(told)}"


def _changing_prompts(evidence: Evidence) -> str:
    change = evidence.counts.prompt_change
    hits = "" if evidence.hit_rate is None else f"the prefix hit rate is {_share(evidence.hit_rate)}: "
    if change is None:
        return f"{hits}{_share(evidence.changing_share)} of the latest prompts change at one early token"
    return (
        f"{hits}prompts change at token {change.position:,}; {change.count} of the last {change.window} requests "
        "differ there and are alike after it"
    )


RULES: Sequence[Rule] = (
    Rule(
        "client late",
        ("client_was_late", "client_lag_p99"),
        lambda e: bool(e.client_was_late),
        lambda e: f"the client, not the server, was late: P99 of its lag is {_seconds(e.client_lag_p99)}",
        lambda e: "lower the load of this client, send it from several machines, or end other work on this machine",
        by_share=False,
    ),
    Rule(
        "requests failed",
        (),
        lambda e: bool(_failed(e)),
        _failures,
        lambda e: "the server's log has the reason; `llmsched doctor --system` checks the machine",
        by_share=False,
    ),
    Rule(
        "requests refused",
        (),
        lambda e: e.share_of("refused") >= _REFUSED,
        _refusal,
        lambda e: (
            "if the queue was full, raise --max-queue-size, or send less; if requests were too long, raise "
            "--max-model-len"
        ),
        ("--max-queue-size", "--max-model-len"),
    ),
    Rule(
        "clients gave up",
        (),
        lambda e: e.share_of(*_UNANSWERED) >= _GIVEN_UP,
        lambda e: (
            f"clients gave up {_share(e.share_of(*_UNANSWERED))} of {e.total} requests before they ended"
            + (f", {late} of them by their deadline" if (late := e.failures.get("deadline")) else "")
        ),
        lambda e: "the rate is too high for these lengths: `llmsched bench --find-knee` finds one that meets your SLOs",
    ),
    Rule(
        "prompts change",
        ("prefix_misses",),
        lambda e: e.counts.prompt_change is not None or (e.changing_share or 0.0) > 0,
        _changing_prompts,
        lambda e: (
            "move what changes there (a time, an id) behind the part that stays the same, for example into the last "
            "message; GET /v1/cache, with an administrative key, names the token, and with `serve --show-prompt-text` "
            "quotes two prompts"
        ),
        ("--show-prompt-text",),
    ),
    Rule(
        "prefixes evicted",
        ("evicted_share",),
        lambda e: _number(e.evicted_share) >= _EVICTED,
        lambda e: (
            f"{_share(e.evicted_share)} of requests find that their prefix was evicted; the prefix hit rate is "
            f"{'unknown' if e.hit_rate is None else _share(e.hit_rate)}"
        ),
        lambda e: (
            "keep the prefix with --pin-prefix FILE, or get more KV memory with --kv-cache-dtype fp8 or a higher "
            "--gpu-memory-utilization"
        ),
        ("--pin-prefix", "--kv-cache-dtype", "--gpu-memory-utilization"),
    ),
    Rule(
        "preemptions",
        ("preemption_rate",),
        lambda e: _number(e.preemption_rate) >= _THRASH,
        lambda e: (
            f"the preemption rate is {_share(e.preemption_rate)}: {e.counts.preemptions} preemptions in {e.finished} "
            "requests, each of which pauses a stream"
        ),
        _fewer_slots,
        ("--max-num-seqs", "--headroom", "--kv-cache-dtype", "--gpu-memory-utilization"),
    ),
    Rule(
        "idle KV memory",
        ("waited", "ttft_p99", "ttft_mean", "kv_share"),
        lambda e: _waits(e, "slot") and _has_idle_kv(e),
        lambda e: (
            f"{_late(e)} although only {_share(e.kv_share)} of KV memory is in use: {_waiting_for(e, 'slot')} "
            "for a place among the running requests"
        ),
        _more_slots,
        ("--max-num-seqs",),
    ),
    Rule(
        "queue without load",
        ("waited", "ttft_p99", "ttft_mean", "kv_share"),
        lambda e: _waits(e, "memory") and _has_idle_kv(e),
        lambda e: (
            f"{_late(e)} although only {_share(e.kv_share)} of KV memory is in use: {_waiting_for(e, 'memory')} "
            "for memory that is kept for headroom and for outputs as long as predicted"
        ),
        lambda e: "lower --headroom, set --output-prediction learned, or let clients send a smaller max_tokens",
        ("--headroom", "--output-prediction"),
    ),
    Rule(
        "KV memory full",
        ("waited", "ttft_p99", "ttft_mean", "kv_share"),
        lambda e: _waits(e, "slot", "memory") and not _has_idle_kv(e),
        lambda e: f"{_late(e)}: {_waiting_for(e, 'slot', 'memory')} while {_share(e.kv_share)} of KV memory is in use",
        lambda e: (
            "get more KV memory with --kv-cache-dtype fp8, --quantization or a higher --gpu-memory-utilization, "
            "or send less: `llmsched bench --find-knee` finds the highest rate"
        ),
        ("--kv-cache-dtype", "--quantization", "--gpu-memory-utilization"),
    ),
    Rule(
        "prefill too slow",
        ("waited", "ttft_p99", "ttft_mean"),
        lambda e: _waits(e, "step"),
        lambda e: f"{_late(e)}: {_waiting_for(e, 'step')} for token budget, because other prompts fill the steps",
        lambda e: (
            "raise --max-num-batched-tokens, and --target-itl if it is set; if that does not help, the prompts "
            "are more than this device can compute at this rate"
        ),
        ("--max-num-batched-tokens", "--target-itl"),
    ),
    Rule(
        "decodes stall",
        ("itl_p50", "itl_p99"),
        lambda e: _number(e.itl_p99) >= max(_STALL_S, _STALL_RATIO * _number(e.itl_p50)),
        lambda e: (
            f"P99 ITL is {_seconds(e.itl_p99)}, {_number(e.itl_p99) / max(1e-9, _number(e.itl_p50)):.0f} times "
            f"P50 ({_seconds(e.itl_p50)}): long steps of prefills stop the streams"
        ),
        lambda e: "lower --max-num-batched-tokens or --target-itl, and use --scheduling-policy fair",
        ("--max-num-batched-tokens", "--target-itl", "--scheduling-policy"),
    ),
    Rule(
        "context too short",
        ("request_tokens_p99", "max_model_len"),
        lambda e: _number(e.request_tokens_p99) >= _CLOSE * _number(e.max_model_len),
        lambda e: (
            f"P99 of a request's length is {_number(e.request_tokens_p99):,.0f} tokens, and max_model_len is "
            f"{e.max_model_len:,}: longer requests are refused or cut"
        ),
        lambda e: f"raise --max-model-len to {2 * _number(e.max_model_len):,.0f}, if the model allows it",
        ("--max-model-len",),
    ),
    Rule(
        "context too long",
        ("request_tokens_p99", "max_model_len", "kv_tokens"),
        lambda e: (
            _number(e.request_tokens_p99) <= _FAR * _number(e.max_model_len)
            and _number(e.max_model_len) >= _LARGEST * _number(e.kv_tokens)
        ),
        lambda e: (
            f"P99 of a request's length is {_number(e.request_tokens_p99):,.0f} tokens, but one request may have "
            f"{e.max_model_len:,}, which is {_number(e.max_model_len) / max(1, _number(e.kv_tokens)):.0%} of KV memory"
        ),
        lambda e: (
            f"lower --max-model-len to {256 * -(-int(2 * _number(e.request_tokens_p99)) // 256):,}, so that no "
            "request can take the memory of all others"
        ),
        ("--max-model-len",),
    ),
    Rule(
        "KV memory wasted",
        ("kv_waste",),
        lambda e: _number(e.kv_waste) >= _WASTE,
        lambda e: f"{_share(e.kv_waste)} of the KV memory that requests hold is reserved and still empty",
        lambda e: "lower --block-size (16 by default), and use --scheduling-policy fair",
        ("--block-size", "--scheduling-policy"),
    ),
    Rule(
        "late compilations",
        ("late_compilations",),
        lambda e: bool(e.counts.late_compilations),
        lambda e: f"{e.counts.late_compilations} kernels were compiled while requests waited",
        lambda e: (
            "the next start finds them in the cache on disk: keep that directory (in a container, mount it as a "
            "volume); if it happens at each start, `llmsched doctor --system` says why"
        ),
        by_share=False,
    ),
)
