"""Every knob of the engine, once: name, unit, default, allowed range, why.

The command line, profiles and error messages are made from these fields, so a knob is added here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from llmsched.engine.errors import ConfigError, setting

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Device = Literal["auto", "cuda", "cpu"]
Policy = Literal["fair", "fcfs", "sptf", "static", "serial"]
PreemptionMode = Literal["recompute", "swap", "auto"]
Prediction = Literal["learned", "max_tokens", "none"]


class Limits(TypedDict, total=False):
    """The knobs that an engine can change without a restart; what is left out stays as it is."""

    max_num_batched_tokens: int
    max_num_seqs: int
    headroom: float
    target_itl: float | None


def knob(
    default: Any,
    why: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that carries its own documentation and range (both ends included)."""
    return field(default=default, metadata={"why": why, "unit": unit, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. None means: chosen from the model and the device, and printed at start-up.

    Raises ConfigError when a value is outside its range, or one has no effect beside another.
    """

    model: str = knob("demo", "Hugging Face directory, hub id, .gguf file, or demo")
    dtype: DType = knob(
        "auto",
        "type of weights, and of KV by default; auto is bfloat16 where the device computes in it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: KVDType = knob(
        "auto",
        "type of KV; auto is dtype, or what the checkpoint asks for; the fp8 types can be planned for, not served",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    device: Device = knob("auto", "auto takes the GPU when there is one", choices=("auto", "cuda", "cpu"))
    max_model_len: int | None = knob(
        None, "prompt and output of one request together; default: the model's own limit", unit="tokens", low=1
    )
    max_num_seqs: int = knob(128, "requests that run at the same time", low=1, high=65536)
    max_num_batched_tokens: int | None = knob(
        None,
        "tokens computed in one step: larger steps prefill faster, smaller ones keep the gaps between tokens short; "
        "default: 2048 on a GPU, 256 on a CPU",
        unit="tokens",
        low=1,
        high=1 << 20,
    )
    block_size: int = knob(16, "tokens of one KV block", unit="tokens", low=1, high=256)
    gpu_memory_utilization: float = knob(
        0.9, "share of the GPU's memory that weights, activations and KV may take together", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = knob(
        None,
        "memory for KV blocks; default: what utilisation leaves over (on a CPU: at most 4 GiB)",
        unit="bytes",
        low=1,
    )
    num_gpu_blocks_override: int | None = knob(
        None, "exact number of KV blocks, for tests and experiments with a small pool", unit="blocks", low=1
    )
    enable_prefix_caching: bool = knob(
        True, "reuse the KV of prompts that begin alike; the choices of n > 1 share that of their prompt by it"
    )
    max_pinned_share: float = knob(
        0.25,
        "share of blocks that pinned prefixes may take; the longest request still fits",
        low=0,
        high=0.9,
    )
    preemption_mode: PreemptionMode = knob(
        "auto",
        "what becomes of the KV of a request that has to make room: recompute throws it away; swap copies it to host "
        "memory as long as swap_space lasts; auto does what is predicted to take less time",
        choices=("recompute", "swap", "auto"),
    )
    swap_space: int = knob(
        0, "host memory for the KV of preempted requests; 0: no swap", unit="bytes", low=0, high=1 << 44
    )
    max_queue_size: int = knob(2048, "waiting requests beyond which new ones are refused with 429", low=1)
    seed: int | None = knob(None, "seed for requests that bring none; default: a fresh one per request", low=0)
    scheduling_policy: Policy = knob(
        "fair",
        "fair is the whole scheduler; fcfs: continuous batching without cleverness; sptf: shortest prompt + max_tokens "
        "first; static: whole batches; serial: one at a time",
        choices=("fair", "fcfs", "sptf", "static", "serial"),
    )
    priority_step: float = knob(
        10.0,
        "waiting that one priority level is worth, 0: none; ageing is linear, so nobody starves",
        unit="seconds",
        low=0,
        high=1e6,
    )
    cache_bonus: float = knob(
        2.0, "waiting that a prefix hit of 512 tokens or more is worth", unit="seconds", low=0, high=1e6
    )
    fast_lane_share: float = knob(
        0.3, "share of a step's prefill tokens kept for short requests; unused parts go to the others", low=0, high=0.9
    )
    fast_lane_prompt: int = knob(256, "longest uncached prompt of a short request", unit="tokens", low=1)
    fast_lane_output: int = knob(512, "largest max_tokens of a short request", unit="tokens", low=1)
    headroom: float = knob(
        0.1, "share of blocks that admission leaves for running requests to grow into", low=0, high=0.5
    )
    max_headroom: float = knob(0.25, "how far the headroom may grow when requests are preempted", low=0, high=0.9)
    output_prediction: Prediction = knob(
        "learned",
        "how long outputs are taken to be on admission: learned from those that ended, max_tokens, or none (admit by "
        "present memory alone)",
        choices=("learned", "max_tokens", "none"),
    )
    max_passes: int = knob(16, "later requests that may pass one that does not fit yet", low=0)
    target_itl: float | None = knob(
        None, "gap between tokens that steps are sized to meet while requests decode", unit="seconds", low=1e-4, high=60
    )
    schedule_window: float = knob(
        0.0,
        "how long an idle engine waits for min_schedule_batch requests before it starts",
        unit="seconds",
        low=0,
        high=10,
    )
    min_schedule_batch: int = knob(1, "requests that an idle engine starts with at once", low=1)

    def __post_init__(self) -> None:
        for f in fields(EngineConfig):
            check_knob(f.name, getattr(self, f.name), f.metadata)
        if self.headroom > self.max_headroom:
            raise ConfigError(
                "headroom", f"{self.headroom} is above {setting('max_headroom')} {self.max_headroom}; raise that too"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError(
                "preemption_mode", f"swap needs host memory; set {setting('swap_space')}, for example to 4GiB"
            )
        if self.preemption_mode == "recompute" and self.swap_space:
            raise ConfigError(
                "swap_space", f"has no effect with {setting('preemption_mode')} recompute; leave one of them out"
            )
        if self.schedule_window and self.min_schedule_batch == 1:
            raise ConfigError(
                "schedule_window", f"has no effect with {setting('min_schedule_batch')} 1; set that to 2 or more"
            )
        if self.min_schedule_batch > 1 and not self.schedule_window:
            raise ConfigError(
                "min_schedule_batch",
                f"needs time to collect requests; set {setting('schedule_window')}, for example to 10ms",
            )

    @staticmethod
    def knob_rule(name: str) -> Mapping[str, Any]:
        """Return the documentation and range of the knob `name`."""
        return next(f.metadata for f in fields(EngineConfig) if f.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings of a planned engine: each knob that planning chooses has its value (see `MemoryPlan.resolve`)."""

    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    device: Literal["cuda", "cpu"]
    max_model_len: int
    max_num_batched_tokens: int


#: What the baselines (every scheduling_policy but fair) do without, and what that is set to.
BASELINE: Mapping[str, Any] = MappingProxyType(
    {
        "cache_bonus": 0.0,
        "fast_lane_share": 0.0,
        "headroom": 0.0,
        "max_headroom": 0.0,
        "output_prediction": "none",
        "max_passes": 0,
        "priority_step": 0.0,
        "target_itl": None,
    }
)

#: Beside this setting with this value, those have no effect.
_IDLE: Mapping[tuple[str, Any], tuple[str, ...]] = MappingProxyType(
    {
        ("enable_prefix_caching", False): ("cache_bonus", "max_pinned_share"),
        ("fast_lane_share", 0.0): ("fast_lane_prompt", "fast_lane_output"),
        ("scheduling_policy", "static"): ("preemption_mode", "swap_space"),
        ("scheduling_policy", "serial"): ("preemption_mode", "swap_space"),
    }
)


def check_together(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that was `given` and that another one given with it leaves without effect."""
    policy = given.get("scheduling_policy", "fair")
    if policy != "fair":
        no_lane = {"fast_lane_prompt": None, "fast_lane_output": None}
        for name, value in {**BASELINE, **no_lane, **({"max_num_seqs": 1} if policy == "serial" else {})}.items():
            if name in given and given[name] != value:
                raise _no_effect(name, given, f"{setting('scheduling_policy')} {policy}, a baseline")
    for (other, value), names in _IDLE.items():
        for name in names:
            if name in given and given.get(other) == value:
                raise _no_effect(name, given, f"{setting(other)} {'off' if value is False else value}")


def _no_effect(name: str, given: Mapping[str, Any], beside: str) -> ConfigError:
    return ConfigError(name, f"{given[name]} has no effect with {beside}; leave one of them out")


def check_knob(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `value` obeys the knob's `rule` (choices, finite, low, high)."""
    if value is None or isinstance(value, bool):
        return
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(name, f"{value!r} is not one of {', '.join(rule['choices'])}")
    if isinstance(value, str):
        return
    low, high = rule["low"], rule["high"]
    unit = f" {rule['unit']}" if rule["unit"] else ""
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise ConfigError(name, f"{value}{unit} is out of range; allowed is {span}")


def check_limits(config: ResolvedConfig, limits: Limits) -> None:
    """Raise ConfigError unless an engine with `config`, which memory was reserved for, can change to these limits."""
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        rule = {**EngineConfig.knob_rule(name), "high": getattr(config, name)}
        check_knob(name, limits.get(name), rule)
