"""Settings of the engine ("knobs"): name, unit, default, allowed range and help text of each.

The command line, profiles and error messages are generated from these fields, so a new knob is added only here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from llmsched.engine.errors import ConfigError, setting

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
Quantization = Literal["fp8", "int8", "int4"]
Device = Literal["auto", "cuda", "cpu"]
ModelImplementation = Literal["auto", "fused", "transformers"]
Policy = Literal["fair", "fcfs", "sptf", "static", "serial"]
PreemptionMode = Literal["recompute", "swap", "auto"]
Prediction = Literal["learned", "max_tokens", "none"]
Speculation = Literal["off", "ngram", "auto"]


#: Default of max_num_batched_tokens, by kind of device.
DEFAULT_TOKEN_BUDGET: Mapping[str, int] = {"cuda": 2048, "cpu": 256}

#: Limit on KV memory on a CPU if kv_cache_memory_bytes is not set.
DEFAULT_CPU_KV_BYTES = 4 << 30

#: Most draft tokens (see speculative) of one step.
MAX_DRAFT_TOKENS = 64

#: Knobs for which memory is reserved. They may be lowered afterwards, but not raised.
LIMITS = ("max_num_batched_tokens", "max_num_seqs")


class Limits(TypedDict, total=False):
    """Settings that can be changed without a restart of the engine. A setting that is left out keeps its value."""

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
    """Return the dataclass field of a setting, with its help text `why`, unit, choices and range (None: no bound)."""
    return field(default=default, metadata={"why": why, "unit": unit, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine as the user gives them.

    Raises ConfigError if a value is out of range or has no effect in combination with another value.
    """

    model: str = knob("demo", "Hugging Face directory, hub id, .gguf file, or demo")
    dtype: DType = knob(
        "auto",
        "type of the weights, and by default of the KV cache; auto is bfloat16 if the device supports it, else float32",
        choices=get_args(DType),
    )
    kv_cache_dtype: KVDType = knob(
        "auto",
        "type of the KV cache; auto is fp8 if the checkpoint asks for it and the device can use it, else dtype; fp8 "
        "(which is fp8_e4m3, not on GPUs before Ada) and fp8_e5m2 hold twice as many tokens as 16 bits, but round keys "
        "and values (`llmsched verify` shows the effect)",
        choices=get_args(KVDType),
    )
    quantization: Quantization | None = knob(
        None,
        "round the matrices of an unquantised checkpoint to this type while loading; int4 has groups of 32 numbers, "
        "embeddings and lm_head are int8, experts of some models are not rounded; `llmsched verify` measures the loss",
        choices=get_args(Quantization),
    )
    device: Device = knob(
        "auto", "device that runs the model; auto is the GPU if there is one", choices=get_args(Device)
    )
    model_impl: ModelImplementation = knob(
        "auto",
        "what computes the layers: fused, a few large operations per layer, for most models; transformers, the code of "
        "that library, for models that use its attention interface; auto is fused if it knows the model",
        choices=get_args(ModelImplementation),
    )
    lora: tuple[str, ...] | None = knob(
        None,
        "a LoRA adapter in the directory DIR, where peft saved it, and a NAME for it",
    )
    max_model_len: int | None = knob(
        None, "most tokens in one request, prompt plus output; default: the model's limit", unit="tokens", low=1
    )
    max_num_seqs: int = knob(128, "most requests that run at the same time", low=1, high=65536)
    max_num_batched_tokens: int | None = knob(
        None,
        "most tokens computed in one step: a larger limit prefills faster, a smaller one keeps the gaps between tokens "
        f"short; default: {DEFAULT_TOKEN_BUDGET['cuda']} on a GPU, {DEFAULT_TOKEN_BUDGET['cpu']} on a CPU",
        unit="tokens",
        low=1,
        high=1 << 20,
    )
    block_size: int = knob(16, "tokens per KV block", unit="tokens", low=1, high=256)
    gpu_memory_utilization: float = knob(
        0.9, "share of the GPU's memory for weights, activations and KV cache together", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = knob(
        None,
        "memory for KV blocks; default: what gpu_memory_utilization leaves (on a CPU: at most "
        f"{DEFAULT_CPU_KV_BYTES >> 30} GiB)",
        unit="bytes",
        low=1,
    )
    num_gpu_blocks_override: int | None = knob(
        None, "number of KV blocks, for tests and experiments with a small pool", unit="blocks", low=1
    )
    enable_prefix_caching: bool = knob(
        True, "reuse the KV of prompts with the same beginning; with n > 1, choices share the KV of their prompt"
    )
    max_pinned_share: float = knob(
        0.25,
        "largest share of KV blocks that pinned prefixes may take; lowered if needed so that the longest "
        "request still fits",
        low=0,
        high=0.9,
    )
    async_scheduling: bool = knob(
        True, "on a GPU, schedule and launch each step before the results of the step before it are known"
    )
    enforce_eager: bool = knob(
        False,
        "start each operation of every step from Python; by default, steps without a prefill run on a GPU as CUDA "
        "graphs (up to 512 decodes), which take one launch per step and some memory, on a CPU as recordings (up to 8)",
    )
    expert_offload: int = knob(
        0,
        "on a GPU, host memory for routed experts: those of the last layers stay there, as many as fit, and are copied "
        "to the GPU before each use; 0 keeps all on the GPU; implies enforce_eager",
        unit="bytes",
        low=0,
        high=1 << 44,
    )
    preemption_mode: PreemptionMode = knob(
        "auto",
        "what happens to the KV of a preempted request: recompute drops it, swap copies it to host memory while "
        "swap_space lasts, auto does what is predicted to take less time",
        choices=get_args(PreemptionMode),
    )
    swap_space: int = knob(
        0, "host memory for the KV of preempted requests; 0 turns swapping off", unit="bytes", low=0, high=1 << 44
    )
    max_queue_size: int = knob(2048, "most waiting requests; more are refused with HTTP 429", low=1)
    seed: int | None = knob(None, "seed for requests that give none; default: a random seed per request", low=0)
    scheduling_policy: Policy = knob(
        "fair",
        "fair: all features; baselines to compare with: fcfs (continuous batching in order of arrival), sptf (shortest "
        "prompt + max_tokens first), static (whole batches), serial (one request at a time)",
        choices=get_args(Policy),
    )
    priority_step: float = knob(
        10.0,
        "head start in the queue, as seconds of waiting, per priority level; 0 queues by arrival; no request waits "
        "forever",
        unit="seconds",
        low=0,
        high=1e6,
    )
    cache_bonus: float = knob(
        2.0,
        "head start in the queue, as seconds of waiting, for a prefix hit of 512 tokens or more",
        unit="seconds",
        low=0,
        high=1e6,
    )
    fast_lane_share: float = knob(
        0.3,
        "share of a step's prefill tokens that short requests get first; the unused part goes to all requests",
        low=0,
        high=0.9,
    )
    fast_lane_prompt: int = knob(256, "longest uncached prompt of a request that counts as short", unit="tokens", low=1)
    fast_lane_output: int = knob(512, "largest max_tokens of a request that counts as short", unit="tokens", low=1)
    headroom: float = knob(
        0.1, "share of KV blocks that admission keeps free for running requests to grow", low=0, high=0.5
    )
    max_headroom: float = knob(0.25, "largest headroom; preemptions raise the headroom up to this", low=0, high=0.9)
    output_prediction: Prediction = knob(
        "learned",
        "output length assumed at admission: learned from finished requests, max_tokens, or none (admit by the memory "
        "free now)",
        choices=get_args(Prediction),
    )
    max_passes: int = knob(16, "most later requests that may overtake a request that does not fit yet", low=0)
    target_itl: float | None = knob(
        None,
        "target for the gap between tokens (ITL); steps in which requests decode are kept small enough to meet it; "
        "default: 3 times what the decodes of a step take alone, at least 40 ms, more while many prompts wait",
        unit="seconds",
        low=1e-4,
        high=60,
    )
    schedule_window: float = knob(
        0.0,
        "longest time that an idle engine waits for min_schedule_batch requests before it starts",
        unit="seconds",
        low=0,
        high=10,
    )
    min_schedule_batch: int = knob(
        1, "number of waiting requests at which an idle engine starts without waiting longer", low=1
    )

    speculative: Speculation = knob(
        "off",
        "speculative decoding, which leaves the output tokens as they are: if the last tokens of a request occur "
        "earlier in its prompt or output, ngram drafts the tokens that followed there, and checks them in one step; "
        "auto uses only drafts that are expected to give more tokens per second",
        choices=get_args(Speculation),
    )
    num_speculative_tokens: int | None = knob(
        None,
        "most draft tokens per request and step; default: 15 with auto, 8 with ngram",
        unit="tokens",
        low=1,
        high=15,
    )
    prompt_lookup_min: int | None = knob(
        None, "shortest match that gives a draft; default: 1 with auto, 2 with ngram", unit="tokens", low=1, high=16
    )
    prompt_lookup_max: int = knob(
        5,
        "the earlier place with the longest match gives the draft; matches are compared up to this length",
        unit="tokens",
        low=1,
        high=16,
    )

    def __post_init__(self) -> None:
        for f in fields(EngineConfig):
            check_knob(f.name, getattr(self, f.name), f.metadata)
        adapter_directories(self.lora)
        if self.headroom > self.max_headroom:
            raise ConfigError(
                "headroom", f"{self.headroom} is above {setting('max_headroom')} {self.max_headroom}; raise that too"
            )
        if (self.prompt_lookup_min or 1) > self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min",
                f"{self.prompt_lookup_min} is above {setting('prompt_lookup_max')} {self.prompt_lookup_max}; "
                "raise that too",
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

    @property
    def most_sampled_rows(self) -> int:
        """Largest number of rows of logits from which one step samples."""
        return self.max_num_seqs + (0 if self.speculative == "off" else MAX_DRAFT_TOKENS)

    # With auto, a draft token that is not worth its time is not computed. So auto looks at more of them than ngram.
    @property
    def most_draft_tokens(self) -> int:
        """Most draft tokens per request and step."""
        return self.num_speculative_tokens or (15 if self.speculative == "auto" else 8)

    @property
    def shortest_lookup(self) -> int:
        """Length of the shortest match that gives a draft, in tokens."""
        return self.prompt_lookup_min or (1 if self.speculative == "auto" else min(2, self.prompt_lookup_max))

    def chosen(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def knob_rule(name: str) -> Mapping[str, Any]:
        """Return the help text, unit, range and choices of the knob `name`."""
        return next(f.metadata for f in fields(EngineConfig) if f.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings of a planned engine: an EngineConfig with the values that planning chose in place of "auto" and None."""

    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    device: Literal["cuda", "cpu"]
    max_model_len: int
    max_num_batched_tokens: int


#: Values with which the baselines (every scheduling_policy but fair) turn knobs off.
BASELINE: Mapping[str, Any] = {
    "cache_bonus": 0.0,
    "fast_lane_share": 0.0,
    "headroom": 0.0,
    "max_headroom": 0.0,
    "output_prediction": "none",
    "max_passes": 0,
    "priority_step": 0.0,
    "speculative": "off",
    "target_itl": None,
}

#: Knobs that have no effect if another knob has the given value.
_IDLE: Mapping[tuple[str, Any], tuple[str, ...]] = {
    ("enable_prefix_caching", False): ("cache_bonus", "max_pinned_share"),
    ("fast_lane_share", 0.0): ("fast_lane_prompt", "fast_lane_output"),
    ("scheduling_policy", "static"): ("preemption_mode", "swap_space"),
    ("scheduling_policy", "serial"): ("preemption_mode", "swap_space"),
    ("speculative", "off"): ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
}


def check_together(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a given setting has no effect because of another setting."""
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


def adapter_directories(lora: Sequence[str] | None) -> dict[str, Path]:
    """Return the directory of each adapter in the setting `lora`, by the adapter's name, in the given order.

    Raises ConfigError unless each item is NAME=DIR with a name of its own and an existing directory.
    """
    directories: dict[str, Path] = {}
    for item in lora or ():
        name, _, directory = item.partition("=")
        path = Path(directory).expanduser()
        if not name.strip() or not directory or not name.isprintable():
            raise ConfigError("lora", f"{item!r} is not NAME=DIR, such as sql=./sql-adapter")
        if name in directories:
            raise ConfigError("lora", f"two adapters have the name {name!r}; give each its own")
        if not path.is_dir():
            raise ConfigError("lora", f"{name}: there is no directory {directory}")
        directories[name] = path
    return directories


def check_knob(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    """Raise ConfigError if `value` is not one of the choices in `rule`, or is a number outside its range.

    `rule` is the result of `EngineConfig.knob_rule`. None, True and False are always allowed.
    """
    if value is None or isinstance(value, bool):
        return
    if rule["choices"] and value not in rule["choices"]:
        raise ConfigError(name, f"{value!r} is not one of {', '.join(rule['choices'])}")
    if isinstance(value, str | tuple):
        return
    low, high = rule["low"], rule["high"]
    unit = f" {rule['unit']}" if rule["unit"] else ""
    if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise ConfigError(name, f"{value}{unit} is out of range; allowed is {span}")


def check_limits(config: ResolvedConfig, limits: Mapping[str, Any]) -> None:
    """Raise ConfigError if max_num_batched_tokens or max_num_seqs in `limits` is above its value in `config`."""
    for name in LIMITS:
        rule = {**EngineConfig.knob_rule(name), "high": getattr(config, name)}
        check_knob(name, limits.get(name), rule)
