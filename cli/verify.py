from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.options.config_flags import EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, resolve_model, with_options
from llmsched.cli.verify_against import SavedOutputFlags, run_saved

if TYPE_CHECKING:
    import torch

    from llmsched.engine.parity.logit_comparison import CaseResult, ParityReport
    from llmsched.engine.parity.verification import LoadedModel

#: Maximum number of sequences with differing tokens that are listed for each check.
MAX_PARTINGS = 4


@dataclass(frozen=True, slots=True)
class PromptFlags:
    """Flags of `verify` for the prompts and for the number of tokens to generate."""

    num_prompts: Annotated[
        int,
        typer.Option(
            "--num-prompts",
            min=1,
            max=256,
            help="Prompts of varied length; six near block boundaries are added.",
        ),
    ] = 4
    num_tokens: Annotated[
        int, typer.Option("--num-tokens", min=2, max=4096, help="Greedy tokens to generate for each prompt.")
    ] = 24
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts; the same seed gives the same prompts.")] = 0


@with_engine_options(
    only=("dtype", "quantization", "kv_cache_dtype", "device", "block_size", "model_impl", "lora"),
    uses={"lora": "the prompts are computed with it"},
)
@with_options("saved", SavedOutputFlags)
@with_options("prompts", PromptFlags)
def verify(
    context: typer.Context,
    model: ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    prompts: PromptFlags,
    saved: SavedOutputFlags,
    engine_options: EngineOptions,
) -> None:
    """Compare the engine with plain transformers on the same weights, device and dtype, or with its saved outputs.

    The engine computes the model as `serve` would: with its own fused decoder or, for an architecture that the decoder
    does not know, with the layers of transformers. Use --model-impl transformers to check the layers of transformers.

    The engine continues every prompt alone, in a mixed batch, in chunks of odd sizes, after a prefix hit and after a
    forced preemption. The logits of each token are compared with those of a full pass with transformers' own attention,
    and the tokens with those of transformers' generate. Tokens may differ at a near tie: two tokens whose logits are so
    close that the difference between the engine's logits and those of transformers can swap them. The check then passes
    and prints the margin between the two. Near ties are common in bfloat16 and rare in float32. The exit code is 1 if
    logits differ, or if tokens differ without a near tie.

    With --quantization, the engine is compared with transformers on the rounded weights, and the loss of rounding is
    measured: the mean KL divergence per token of the model's distribution from that of the unrounded weights, in nats,
    on fixed texts and their continuations. With --kv-cache-dtype, transformers' keys and values are rounded in the same
    way, and the report says how much this changes its logits.

    With --lora, all requests use the adapter, and transformers computes the model with the adapter merged into its
    weights.

    --save keeps the engine's outputs, and --against compares with them later. Each position is compared after the saved
    tokens before it. The exit code is 1 if the mean KL divergence per token exceeds --max-kl.

    \b
    Examples:
      llmsched verify demo --dtype float32
      llmsched verify Qwen/Qwen3-8B --device cuda --num-tokens 64
      llmsched verify Qwen/Qwen3-8B --quantization int4
      llmsched verify demo --kv-cache-dtype fp8
      llmsched verify ./my-model --lora sql=./sql-adapter
      llmsched verify ./my-model --json
      llmsched verify demo --save before.json
      llmsched verify demo --against before.json --max-kl 0.001
    """
    saved.check(context)
    config, settings = engine_options.config(resolve_model(model)), asdict(prompts)
    if saved.given:
        if not run_saved(config, saved, settings, as_json):
            raise typer.Exit(1)
        return
    with render.progress_bar() as progress:
        from llmsched.engine.parity.verification import check_parity, load_for_parity

        subject = load_for_parity(config, progress)
        report = check_parity(subject, **settings, progress=progress)
    if as_json:
        render.emit_json(_as_dict(subject, report) | settings)
    else:
        _show(subject, report)
    if not report.ok:
        raise typer.Exit(1)


def _as_dict(subject: LoadedModel, report: ParityReport) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "model": subject.info.name,
        "lora": subject.lora and subject.lora[0],
        "device": subject.device,
        "dtype": _name(subject.dtype),
        "kv_cache_dtype": _name(subject.kv_dtype),
        "rounding_of_kv": report.rounding and {"kl_per_token": report.rounding.kl, "max": report.rounding.largest},
        "block_size": subject.block_size,
        "model_impl": report.model_impl,
        "tolerance_rule": report.tolerance.rule,
        "transformers_spread": report.spread,
        "quantization_loss": None if subject.loss is None else asdict(subject.loss),
        "checks": [
            {
                "name": check.name,
                "ok": check.ok,
                "max_abs_logit_diff": check.max_abs_logit_diff,
                "judged_logit_diff": check.judged_logit_diff,
                "tolerance": check.tolerance,
                "tokens_equal": check.tokens_equal,
                "num_positions": len(check.differences),
                "detail": check.detail,
                "partings": check.divergences,
                "problems": check.problems,
            }
            for check in report.checks
        ],
    }


def _show(subject: LoadedModel, report: ParityReport) -> None:
    rows = [
        (
            check.name,
            "ok" if check.ok else "FAILED",
            "equal" if check.tokens_equal else f"{len(check.divergences)} differ",
            check.detail,
            "-" if check.max_abs_logit_diff is None else f"{check.max_abs_logit_diff:.2g}",
            f"{check.tolerance:.2g}",
        )
        for check in report.checks
    ]
    columns = ("check", "result", "tokens", "detail", "max |logit difference|", "tolerance")
    kv = f" with KV in {_name(subject.kv_dtype)}" if report.rounding else ""
    name = subject.info.name
    if subject.lora:
        name += f" with adapter {subject.lora[0].partition('=')[0]}"
    where = f"{name} in {_name(subject.dtype)}{kv} on {subject.device}, {report.model_impl} layers"
    render.table(f"{where}, compared with plain transformers", columns, rows, text_columns=4)
    render.say(f"tolerance   {report.tolerance.rule}")
    render.say(f"            transformers itself differs by {report.spread:.2g} with and without its KV cache")
    if (loss := subject.loss) is not None:
        render.say(
            f"rounding    mean KL divergence {loss.mean_kl:.2g} nats per token, same most probable token at "
            f"{loss.same_token:.1%} of {loss.num_positions} positions"
        )
    if report.rounding is not None:
        render.say(
            f"rounded KV  changes the logits of transformers by up to {report.rounding.largest:.2g}; KL divergence per "
            f"token {report.rounding.kl:.2g} nats, from KV in {_name(subject.dtype)}"
        )
    for check in report.checks:
        for line in _remarks(check):
            render.say(f"{check.name}: {line}")
    parted = any(not check.tokens_equal for check in report.checks)
    render.say("NOT equal" if not report.ok else "equal, except for near ties" if parted else "equal")


def _remarks(check: CaseResult) -> Iterator[str]:
    yield from check.problems
    partings = sorted(check.divergences, key=lambda parting: parting.explained)
    for parting in partings[:MAX_PARTINGS]:
        verdict = "a near tie" if parting.explained else "NOT explained by the logit difference"
        yield (
            f"{parting.prompt}, token {parting.position} is {parting.got} instead of {parting.expected}, "
            f"margin {parting.margin:.2g}: {verdict}"
        )
    if len(partings) > MAX_PARTINGS:
        yield f"{len(partings) - MAX_PARTINGS} more sequences differ"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
