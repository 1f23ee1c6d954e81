"""Running the checks: references first, then one engine per check, all on the one model that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.config import EngineConfig, ResolvedConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout, group_layers
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.model.loader import ModelInfo, open_model
from llmsched.engine.parity.cases import ParityCase, ParityPrompt, PromptSet, make_checks, make_prompts
from llmsched.engine.parity.logit_comparison import (
    Answer,
    CaseResult,
    Continuation,
    ParityReport,
    Reference,
    Tolerance,
    compare,
)
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import SamplingParams, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmsched.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

#: What the logits that are kept for comparison may take of the host's memory.
MAX_LOGIT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model under test, on its device."""

    model: PreTrainedModel
    info: ModelInfo
    tokenizer: Tokenizer
    device: str
    dtype: torch.dtype
    block_size: int = 16

    @property
    def layout(self) -> KVLayout:
        """How the KV cache of a long context would be laid out, unless all layers have a window."""
        return group_layers(kv_geometry(self.model.config), self.block_size, None).layout


def load_for_parity(config: EngineConfig, progress: Progress = silent) -> LoadedModel:
    """Load `config.model` as serving would, in its device and dtype. Raises ModelError, ConfigError."""
    opened = open_model(config, progress)
    model = opened.load(progress)
    return LoadedModel(model, opened.info, opened.tokenizer, opened.device, opened.dtype, config.block_size)


def check_parity(
    loaded: LoadedModel, *, num_prompts: int, num_tokens: int, seed: int = 0, progress: Progress = silent
) -> ParityReport:
    """Compare the engine with plain transformers over `num_tokens` greedy tokens of each prompt.

    Raises ConfigError when the model's context or the host's memory is too small for that.
    """
    prompts = make_prompts(
        loaded.tokenizer, loaded.info.vocab_size, count=num_prompts, block_size=loaded.block_size, seed=seed
    )
    _check_size(loaded, prompts, num_tokens)
    reference, tolerance = Reference(loaded.model), Tolerance.of(loaded.model, loaded.dtype)
    expected: dict[str, Continuation] = {}
    for done, prompt in enumerate(prompts.all):
        progress("plain transformers", done, len(prompts.all))
        expected[prompt.name] = reference.continuation(prompt.token_ids, num_tokens)
    progress("plain transformers", len(prompts.all), len(prompts.all))
    checks = list(make_checks(prompts, num_tokens, loaded.layout))
    results = []
    for done, check in enumerate(checks):
        progress("comparing", done, len(checks))
        result = CaseResult(check.name)
        for answer in _answers(loaded, check, result):
            compare(result, answer, expected[answer.prompt.name], reference, tolerance)
        results.append(result)
    progress("comparing", len(checks), len(checks))
    return ParityReport(tuple(results), tolerance, max(continuation.spread for continuation in expected.values()))


def _check_size(loaded: LoadedModel, prompts: PromptSet, num_tokens: int) -> None:
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
            f"allowed are {MAX_LOGIT_BYTES >> 30} GiB: ask for fewer tokens or prompts",
        )


def _answers(loaded: LoadedModel, check: ParityCase, result: CaseResult) -> list[Answer]:
    """Run the check on an engine of its own; what went wrong besides the numbers is noted in `result`."""
    try:
        return _run(loaded, check, result)
    except Exception as error:  # the other checks may still tell where the fault is
        logger.exception("check %s", check.name)
        result.problems.append(f"the engine failed: {type(error).__name__}: {' '.join(str(error).split())}")
        return []


def _run(loaded: LoadedModel, check: ParityCase, result: CaseResult) -> list[Answer]:
    engine, executor = _engine(loaded, check)
    answers: list[Answer] = []
    last: list[Answer] = []
    for prompts in check.waves:
        last = _run_wave(engine, executor, prompts, check.num_tokens)
        answers += last
    engine.check_integrity()
    stats = engine.stats()
    if check.preempted:
        result.detail = f"{stats.num_preemptions} preemptions, {stats.recomputed_tokens} tokens computed again"
        if not stats.num_preemptions:
            result.problems.append("nobody was preempted")
    if check.preempted == "swap":
        result.detail += f", {stats.num_swapped_in} swapped in"
        if not stats.num_swapped_in:
            result.problems.append("nobody was swapped in")
    if check.cached_tokens is not None:
        found = tuple(answer.num_cached_tokens for answer in last)
        result.detail = f"{', '.join(map(str, found))} cached tokens"
        if found != check.cached_tokens:
            result.problems.append(f"cached tokens should be {', '.join(map(str, check.cached_tokens))}")
    executor.close()
    return answers


def _engine(loaded: LoadedModel, check: ParityCase) -> tuple[Engine, TorchExecutor]:
    longest = max(len(prompt.token_ids) for wave in check.waves for prompt in wave)
    swap = SwapSpace(check.num_blocks if check.preempted == "swap" else 0)
    dtype: Any = str(loaded.dtype).removeprefix("torch.")
    device: Any = loaded.device
    config = ResolvedConfig(
        model=loaded.info.name,
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype,
        max_model_len=longest + check.num_tokens,
        max_num_batched_tokens=check.token_budget,
        block_size=loaded.block_size,
        enable_prefix_caching=check.caching,
        output_prediction="none",  # a pool too small for all is to be filled, not respected
        headroom=0.0,
        preemption_mode=check.preempted or "auto",
        swap_space=swap.num_blocks,  # only the slots themselves count from here on
    )
    executor = TorchExecutor(
        loaded.model,
        num_blocks=check.num_blocks,
        block_size=loaded.block_size,
        device=loaded.device,
        kv_dtype=loaded.dtype,
        max_model_len=config.max_model_len,
        num_host_blocks=swap.num_blocks,
        layout=loaded.layout,
    )
    engine = Engine(config, loaded.info, loaded.tokenizer, executor, check.num_blocks, swap=swap, layout=loaded.layout)
    return engine, executor


def _run_wave(
    engine: Engine, executor: TorchExecutor, prompts: ListLike[ParityPrompt], num_tokens: int
) -> list[Answer]:
    """Hand in all prompts at once and step until they have ended."""
    answers = {prompt.name: Answer(prompt) for prompt in prompts}
    by_sequence = {f"{name}/0": answer for name, answer in answers.items()}

    def keep(sequences: ListLike[Sequence], logits: torch.Tensor) -> None:
        for sequence, row in zip(sequences, logits.to("cpu", copy=True), strict=True):
            by_sequence[sequence.request_id].logits.append(row)

    executor.on_logits = keep
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt.name, list(prompt.token_ids), sampling)
    while engine.has_work():
        for output in engine.step():
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.num_cached_tokens = output.num_cached_tokens
            answer.error = output.error
    return list(answers.values())
