"""Parity check: computes reference outputs with plain transformers, then runs one engine for each case."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel

from llmsched.engine.architecture.adapter_files import read_adapters
from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.dtypes import check_kv_dtype, planned_kv_dtype
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.architecture.quantization import quantization_of
from llmsched.engine.config import EngineConfig, ModelImplementation, ResolvedConfig
from llmsched.engine.core import Engine
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout, group_layers
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.recurrent_state import num_state_slots
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.kv_scales import KV_TYPES, ScaleName, kv_scales
from llmsched.engine.model.loader import ModelInfo, open_model
from llmsched.engine.model.transformers_model import paged_model
from llmsched.engine.parity.cases import ParityCase, ParityPrompt, PromptSet, make_cases, make_prompts
from llmsched.engine.parity.logit_comparison import (
    CaseResult,
    EngineOutput,
    ParityReport,
    Reference,
    RoundingEffect,
    Tolerance,
    compare,
)
from llmsched.engine.parity.quantization_loss import QuantizationLoss, measure_loss
from llmsched.engine.parity.rounded_cache import RoundedCache
from llmsched.engine.progress import Progress, silent, tracked
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.stats import EngineStats
from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: Largest host memory, in bytes, for the logits that are kept for comparison.
MAX_LOGIT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    info: ModelInfo
    tokenizer: Tokenizer
    device: str
    dtype: torch.dtype
    block_size: int = 16
    model_impl: ModelImplementation = "auto"
    dequantised: PreTrainedModel | None = None  # with unquantised weights and the adapter's changes to them
    loss: QuantizationLoss | None = None  # of rounding weights while loading
    kv_cache_dtype: str = "auto"  # auto: the type of the model
    checkpoint_scales: Mapping[ScaleName, torch.Tensor] = field(default_factory=dict)
    lora: tuple[str, ...] | None = None  # the adapter that all requests use, as in the setting
    adapters: Adapters | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_cache_dtype == "auto" else KV_TYPES[self.kv_cache_dtype]

    @property
    def layout(self) -> KVLayout:
        """Layout of the engine's KV cache, chosen without knowing the length of the longest sequence."""
        return group_layers(kv_geometry(self.model.config), self.block_size, None).layout


def load_for_parity(config: EngineConfig, progress: Progress = silent, *, with_reference: bool = True) -> LoadedModel:
    """Load `config.model` on the device and in the dtype that `serve` would use, and measure the loss of rounding.

    Without `with_reference`, the loss and the weights in plain types, which only the reference needs, are left out.
    Raises ModelError if the model or an adapter cannot be loaded, and ConfigError for an unusable device or for more
    than one adapter.
    """
    files = read_adapters(config.lora)
    if len(files) > 1:
        raise ConfigError("lora", f"one adapter is compared at a time, not {len(files)}; name one of them")
    opened = open_model(config, progress)
    model = opened.load(progress)
    adapters = Adapters.fit(model, files) if files else None
    dequantised, loss = None, None
    if with_reference and (opened.packed or opened.quantization or adapters):
        dequantised = opened.load(progress, packed=False)
    if opened.quantization and dequantised is not None:
        progress("measuring the loss", 0, 1)
        loss = measure_loss(model, dequantised, opened.tokenizer)
        progress("measuring the loss", 1, 1)
    if adapters and dequantised is not None:
        adapters.merge_into(dequantised, files[0])
    opened_as = (opened.info, opened.tokenizer, opened.device, opened.dtype)
    quantization, device = quantization_of(read_fields(opened.config)), device_memory(opened.device)
    checkpoint_fp8 = quantization is not None and quantization.fp8_kv
    kv_dtype = planned_kv_dtype(config, "auto", device, checkpoint_fp8=checkpoint_fp8)
    check_kv_dtype(kv_dtype, device)
    scales = opened.kv_scales()
    return LoadedModel(
        *(model, *opened_as, config.block_size, config.model_impl, dequantised, loss, kv_dtype, scales),
        lora=config.lora,
        adapters=adapters,
    )


def check_parity(
    loaded: LoadedModel, *, num_prompts: int, num_tokens: int, seed: int = 0, progress: Progress = silent
) -> ParityReport:
    """Compare the engine with plain transformers over `num_tokens` greedy tokens for each prompt.

    Raises ConfigError if a prompt and its output exceed the model's context, or if the logits of all outputs exceed
    MAX_LOGIT_BYTES.
    """
    prompts = make_prompts(
        loaded.tokenizer, loaded.info.vocab_size, count=num_prompts, block_size=loaded.block_size, seed=seed
    )
    check_size(loaded, prompts, num_tokens)
    plain, reference = Reference(loaded.dequantised or loaded.model), _reference(loaded)
    expected = {
        prompt.name: reference.continuation(prompt.token_ids, num_tokens)
        for prompt in tracked(prompts.all, "plain transformers", progress)
    }
    rounding = None
    if loaded.kv_dtype != loaded.dtype:
        found = {prompt: expected[prompt.name] for prompt in prompts.all}
        rounding = RoundingEffect.of(
            [
                (plain.logits([*prompt.token_ids, *each.token_ids], len(prompt.token_ids)), each.logits)
                for prompt, each in tracked(list(found.items()), "plain transformers without rounding", progress)
            ]
        )
    tolerance = Tolerance.of(loaded.model, loaded.dtype, rounding.largest if rounding else 0.0)
    results, model_impl = [], None
    for case in tracked(list(make_cases(prompts, num_tokens, loaded.layout)), "comparing", progress):
        result = CaseResult(case.name)
        results.append(result)
        try:
            engine, executor = engine_for(loaded, case)
            model_impl = executor.model_impl
            waves = [run_wave(engine, executor, dict.fromkeys(wave, case.num_tokens)) for wave in case.waves]
            engine.check_integrity()
            _check_events(case, result, engine.stats(), waves[-1])
            executor.close()
        except ConfigError:
            raise
        except Exception as error:  # the other cases may still show where the fault is
            logger.exception("case %s", case.name)
            result.problems.append(f"the engine failed: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        for output in chain.from_iterable(waves):
            compare(result, output, expected[output.prompt.name], reference, tolerance)
    spread = max(continuation.spread for continuation in expected.values())
    return ParityReport(tuple(results), tolerance, spread, model_impl, rounding)


def _reference(loaded: LoadedModel) -> Reference:
    """Return plain transformers with a KV cache that rounds as the engine's does."""
    model = loaded.dequantised or loaded.model
    if loaded.kv_dtype == loaded.dtype:
        return Reference(model)
    paged, device = paged_model(loaded.model, loaded.model_impl), loaded.model.device
    scales = kv_scales(paged, loaded.kv_dtype, loaded.dtype, device, loaded.checkpoint_scales)
    return Reference(model, lambda: RoundedCache(loaded.kv_dtype, scales))


def check_size(loaded: LoadedModel, prompts: PromptSet, num_tokens: int) -> None:
    """Raise ConfigError if a prompt and its output exceed the context, or all logits exceed MAX_LOGIT_BYTES."""
    longest = max(len(prompt.token_ids) for prompt in prompts.all)
    limit = loaded.info.max_position - longest
    if num_tokens > limit:
        raise ConfigError(
            "num_tokens",
            f"{num_tokens} tokens after a prompt of {longest} do not fit the model's context of "
            f"{loaded.info.max_position}; allowed is {limit} or less, or a smaller {setting('block_size')}",
        )
    kept = 2 * len(prompts.all) * num_tokens * loaded.info.vocab_size * loaded.dtype.itemsize
    if kept > MAX_LOGIT_BYTES:
        raise ConfigError(
            "num_tokens",
            f"logits of {len(prompts.all)} prompts x {num_tokens} tokens take {kept / 2**30:.1f} GiB of host memory; "
            f"allowed are {MAX_LOGIT_BYTES >> 30} GiB: use fewer tokens or prompts",
        )


def _check_events(case: ParityCase, result: CaseResult, stats: EngineStats, last_wave: list[EngineOutput]) -> None:
    if case.preempted:
        result.detail = f"{stats.num_preemptions} preemptions, {stats.recomputed_tokens} tokens computed again"
        if not stats.num_preemptions:
            result.problems.append("no request was preempted")
    if case.preempted == "swap":
        result.detail += f", {stats.num_swapped_in} swapped in"
        if not stats.num_swapped_in:
            result.problems.append("no request was swapped in")
    if case.cached_tokens is not None:
        found = tuple(output.num_cached_tokens for output in last_wave)
        result.detail = f"{', '.join(map(str, found))} cached tokens"
        if found != case.cached_tokens:
            result.problems.append(f"cached tokens should be {', '.join(map(str, case.cached_tokens))}")


def engine_for(loaded: LoadedModel, case: ParityCase) -> tuple[Engine, TorchExecutor]:
    """Build an engine with the settings of the case. Close its executor after use."""
    longest = max(len(prompt.token_ids) for wave in case.waves for prompt in wave)
    num_seqs = max(map(len, case.waves))
    num_states = num_state_slots(num_seqs, enable_prefix_caching=case.caching)
    swaps = case.preempted == "swap"
    swap = SwapSpace(case.num_blocks if swaps else 0, num_states=num_seqs if swaps and loaded.layout.recurrent else 0)
    dtype: Any = str(loaded.dtype).removeprefix("torch.")
    kv_dtype: Any = dtype if loaded.kv_cache_dtype == "auto" else loaded.kv_cache_dtype
    device: Any = loaded.device
    config = ResolvedConfig(
        model=loaded.info.name,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_model_len=longest + case.num_tokens,
        max_num_batched_tokens=case.token_budget,
        max_num_seqs=num_seqs,
        block_size=loaded.block_size,
        enable_prefix_caching=case.caching,
        output_prediction="none",  # admit all requests, although the pool is too small for their outputs
        headroom=0.0,
        preemption_mode=case.preempted or "auto",
        lora=loaded.lora,
        swap_space=swap.num_blocks,  # any value above 0: the number of host blocks is already given
    )
    executor = TorchExecutor(
        loaded.model,
        num_blocks=case.num_blocks,
        block_size=loaded.block_size,
        device=loaded.device,
        kv_dtype=loaded.kv_dtype,
        max_model_len=config.max_model_len,
        num_host_blocks=swap.num_blocks,
        num_states=num_states,
        num_host_states=swap.states.count,
        layout=loaded.layout,
        model_impl=loaded.model_impl,
        adapters=loaded.adapters,
        checkpoint_scales=loaded.checkpoint_scales,
    )
    executor.capture(num_seqs, config.max_model_len)  # as serve does
    kv = make_kv(config, case.num_blocks, swap, loaded.layout)
    return Engine(config, loaded.info, loaded.tokenizer, executor, kv), executor


def run_wave(engine: Engine, executor: TorchExecutor, lengths: Mapping[ParityPrompt, int]) -> list[EngineOutput]:
    """Continue all prompts together, each by the number of greedy tokens in `lengths`, and keep the logits."""
    outputs = {prompt.name: EngineOutput(prompt) for prompt in lengths}
    by_sequence = {f"{name}/0": output for name, output in outputs.items()}

    def keep(sequences: ListLike[Sequence], logits: torch.Tensor) -> None:
        for sequence, row in zip(sequences, logits.to("cpu", copy=True), strict=True):
            by_sequence[sequence.request_id].logits.append(row)

    executor.on_logits = keep
    adapter = next(iter(engine.adapters), None)
    for prompt, num_tokens in lengths.items():
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        engine.add_request(prompt.name, list(prompt.token_ids), sampling, adapter=adapter)
    while engine.has_work():
        for step in engine.step():
            output = outputs[step.request_id]
            output.token_ids += step.token_ids
            output.num_cached_tokens = step.num_cached_tokens
            output.error = step.error
    return list(outputs.values())
