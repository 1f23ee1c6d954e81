from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from llmsched.cli import render
from llmsched.cli.kv_budget import gpus_needed, simulated_serving, text_report
from llmsched.cli.kv_budget.analysis import BudgetAnalysis, any_fits
from llmsched.cli.kv_budget.budget_options import ALL, BudgetOptions, all_gpus
from llmsched.cli.kv_budget.command_lines import command_line, serve_line, with_vllm_defaults
from llmsched.cli.kv_budget.json_document import comparison_document, document
from llmsched.cli.options.config_flags import MEMORY_KNOBS, EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, resolve_model, with_options
from llmsched.engine.architecture.dtypes import kv_refusal
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.memory.remedies import MemoryDemand, config_for_demand, longest_context
from llmsched.engine.memory.vllm_profile import VLLM_PROFILES
from llmsched.engine.model.support import refusal

KNOBS = (*MEMORY_KNOBS, "headroom", "max_headroom", "lora", "speculative")


@with_engine_options(only=KNOBS, uses={"lora": "repeatable: the plan counts their memory"})
@with_options("options", BudgetOptions)
def kv_budget(model: ModelArgument = None, *, options: BudgetOptions, engine_options: EngineOptions) -> None:
    """Compute the KV memory per token, the number of blocks that fit, and the number of sequences that they hold.

    MODEL may also be a config.json. Weights are not loaded and no GPU is needed: name one with --gpu or
    --gpu-memory. `serve` with the same options allocates exactly these blocks.

    The exit code is 0 if the model and the requests of --users and --context fit, and 2 for bad input. It is 1 if they
    do not fit (the report says what would help), or if the size of the weights is not known (give --weights-bytes).

    \b
    Examples:
      llmsched kv-budget demo
      llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --max-model-len 8192
      llmsched kv-budget Qwen/Qwen3-8B --gpu all --users 32 --context 8k
      llmsched kv-budget Qwen/Qwen3-8B --gpu h100 --users 32 --context 8k --slo-ttft 1s
      llmsched kv-budget Qwen/Qwen3-32B --gpu 4090 --quantization int4
      llmsched kv-budget ./config.json --gpu-memory 24GiB --lengths trace.csv --json
      llmsched kv-budget Qwen/Qwen3-8B --gpu h100 --emit vllm
      llmsched kv-budget Qwen/Qwen3-8B --simulate h100 --users 64 --context 4k
      llmsched kv-budget ./model --gpu l4 --lora sql=./sql-adapter
      llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --lora-count 20 --lora-rank 32
    """
    spec = resolve_model(model)
    options.check()
    adapted = "lora" if "lora" in engine_options.given else "lora_count" if options.lora_count else None
    if adapted and (options.has_slo or not options.emit == options.simulate is None):
        raise ConfigError(
            adapted, "is for a plan of `llmsched serve`; leave it out, or leave out --emit, --simulate and --slo-..."
        )
    try:
        analyses = _analyses(spec, options, engine_options)
    except ConfigError as problem:
        if problem.field == "max_model_len" and options.context and "max_model_len" not in engine_options.given:
            raise ConfigError("context", problem.message) from problem  # --context set max_model_len
        raise
    if options.gpu == ALL:
        compared = list(zip(all_gpus(), analyses, strict=True))
        if options.json_output:
            render.emit_json(comparison_document(compared))
        else:
            text_report.show_comparison(compared)
            _show_serve_line(next((analysis for analysis in analyses if analysis.fits), analyses[-1]))
    else:
        _report(analyses[0], options)
    if not any_fits(analyses):
        raise typer.Exit(1)


def _report(analysis: BudgetAnalysis, options: BudgetOptions) -> None:
    line = None if options.emit is None or not analysis.fits else command_line(analysis, options.emit)
    simulated = None if options.simulate is None else simulated_serving.simulate(analysis, options.simulate)
    if options.json_output:
        extra: dict[str, Any] = {"emit": line} if options.emit else {}
        if options.simulate is not None:
            extra |= {"simulated": None if simulated is None else simulated[0]}
        if options.counts_gpus:
            extra |= {"gpus_needed": gpus_needed.document(analysis, options.slo)}
        render.emit_json(document(analysis) | {"serve": serve_line(analysis)} | extra)
    elif line is not None:
        render.say(line, wrap=False)
    else:
        text_report.show(analysis, document(analysis))
        if simulated is not None:
            simulated_serving.show(*simulated)
        if options.counts_gpus:
            gpus_needed.show(analysis, options.slo)
        _show_serve_line(analysis)


def _show_serve_line(analysis: BudgetAnalysis) -> None:
    if (line := serve_line(analysis)) is not None:
        if not analysis.fits:
            render.say("with the cheapest change that works on this device:")
        render.say(line, wrap=False)


def _analyses(spec: str, options: BudgetOptions, engine_options: EngineOptions) -> list[BudgetAnalysis]:
    format_of_checkpoint = options.quantization
    if options.rounds:
        engine_options = replace(engine_options, given={**engine_options.given, "quantization": options.quantization})
        format_of_checkpoint = None
    given = {**engine_options.given, **({} if options.users is None else {"max_num_seqs": options.users})}
    config = config_for_demand(engine_options.config(spec), engine_options.given, options.users, options.context)
    lengths, devices = options.distribution(config), options.devices(config)
    demand = MemoryDemand(options.users or 1, options.context or 0)
    weights = None if options.weights is None else Weights(options.weights, "--weights", exact=True)
    with render.progress_bar() as progress:
        planner = open_planner(spec, progress, weights, format_of_checkpoint)
    adapters = options.adapters(config, planner.content)
    planner = replace(planner, profile=VLLM_PROFILES.get(options.emit or ""), adapters=adapters)
    refused, analyses = refusal(planner.content, planner.cache), []
    for device in devices:
        settings = with_vllm_defaults(config, given, device) if planner.profile else config
        if options.users is not None and config.max_model_len is None:
            settings = replace(settings, max_model_len=longest_context(planner, settings, device, options.users))
        kv_refused = kv_refusal(planner.kv_dtype(settings, device), device)
        analyses.append(
            BudgetAnalysis(
                spec=spec,
                planner=planner,
                config=settings,
                plan=planner.plan(settings, device),
                demand=demand,
                has_demand=options.users is not None or options.context is not None,
                mean_len=options.mean_len,
                lengths=lengths,
                refusal=refused or kv_refused,
                gpu=options.simulated_gpu,
                quantization=format_of_checkpoint,
            )
        )
    return analyses
