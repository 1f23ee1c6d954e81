"""`llmsched calibrate`: measure what steps cost on this device, fit coefficients, keep them for --simulate local."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from llmsched.cli import render
from llmsched.cli.options.engine_flags import MEMORY_KNOBS, EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, resolve_model
from llmsched.engine.errors import LlmschedError
from llmsched.engine.memory.planner import ModelPlanner, model_name, open_planner
from llmsched.profiles.calibrated import Calibration, calibration_dir, save_calibration
from llmsched.profiles.toml_files import ProfileError, check_directory

if TYPE_CHECKING:
    from llmsched.engine.calibration.timing import Measured

#: The engine flags that steps depend on; scheduling does not matter here.
FLAGS = (*MEMORY_KNOBS, "swap_space")


@with_engine_options(only=FLAGS)
def calibrate(
    model: ModelArgument = None,
    *,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="How often each step is measured; the median counts.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_options: EngineOptions,
) -> None:
    """Measure what the steps of a model cost on this device, for `bench --simulate local` and the like.

    Some twenty steps (decodes, prefills and both together, up to the largest that the engine may plan) are computed in
    turn. A formula with a few coefficients is fitted to their times, and held against each step by a fit to all others:
    the median of those errors is told with every simulated figure. What serving adds, and copies to host memory,
    are measured as well. Nothing else should run meanwhile.

    \b
    Examples:
      llmsched calibrate demo
      llmsched calibrate demo --max-num-batched-tokens 1024 --max-num-seqs 32
      llmsched calibrate ./my-model --repeats 20 --json
    """
    spec = resolve_model(model)
    _check_directory()
    with render.progress_bar() as progress:
        from llmsched.engine.calibration.timing import measure_device

        planner = open_planner(spec, progress)
        measured = measure_device(engine_options.config(spec), repeats, progress)
    calibration = _calibration(spec, planner, measured)
    try:
        path = save_calibration(calibration)
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem
    if as_json:
        render.emit_json(_as_json(spec, measured, calibration, repeats) | {"saved": path})
    else:
        _show(spec, measured, calibration, repeats)
        render.say(f"saved: {path}, for `llmsched bench {spec} --simulate local`")


def _check_directory() -> None:
    """Raise LlmschedError, before the work and not after it, where no calibration can be written."""
    try:
        check_directory(calibration_dir())
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem


def _calibration(spec: str, planner: ModelPlanner, measured: Measured) -> Calibration:
    import torch

    config, plan = measured.engine.config, measured.engine.plan
    assert plan is not None
    cost = {name: value for name, value in measured.cost._asdict().items() if name != "window"}
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
    return Calibration(
        cost=cost,
        error=measured.fit.error,
        swap_seconds_per_byte=measured.swap_seconds_per_byte,
        model={"name": model_name(spec), "digest": planner.digest},
        device={"kind": plan.device.kind, "name": plan.device.name, "threads": torch.get_num_threads()},
        engine={
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            **{name: getattr(config, name) for name in limits},
        },
        versions={
            **{name: version(name) for name in ("llmsched", "torch", "transformers")},
            "python": platform.python_version(),
        },
        steps=tuple(_steps(measured)),
    )


def _steps(measured: Measured) -> list[dict[str, Any]]:
    """Each step with its measured and its predicted time; errors are shares, `left_out` that of a fit to the others."""
    rows = zip(measured.steps, measured.fit.errors, measured.fit.left_out, strict=True)
    return [
        {
            "step": step.name,
            "measured_ms": step.seconds * 1e3,
            "predicted_ms": step.seconds * (1 + error) * 1e3,
            "error": error,
            "error_left_out": left_out,
        }
        for step, error, left_out in rows
    ]


def _as_json(spec: str, measured: Measured, calibration: Calibration, repeats: int) -> dict[str, Any]:
    sizes = np.abs(measured.fit.left_out)
    return {
        "measured": True,
        "target": spec,
        "model": calibration.model,
        "device": calibration.device,
        "engine": calibration.engine,
        "repeats": repeats,
        "steps": calibration.steps,
        "cost": calibration.cost,
        "calibration_error": calibration.error,
        "calibration_error_p90": float(np.percentile(sizes, 90)),
        "calibration_error_max": float(sizes.max()),
        "serving": [
            {"num_seqs": each.num_seqs, "between_steps_ms": each.between * 1e3, "slowdown": each.slowdown}
            for each in measured.serving
        ],
        "swap_bytes_per_s": 1 / calibration.swap_seconds_per_byte,
        "versions": calibration.versions,
    }


def _show(spec: str, measured: Measured, calibration: Calibration, repeats: int) -> None:
    device, engine = calibration.device, calibration.engine
    threads = f", {device['threads']} thread(s)" if device["kind"] == "cpu" else ""
    count = f"{len(measured.steps)} steps, the median of {repeats} each"
    render.say(f"MEASURED {spec} in {engine['dtype']} on {device['name']}{threads}: {count}")
    rows = [
        (
            str(step["step"]),
            f"{step['measured_ms']:.2f}",
            f"{step['predicted_ms']:.2f}",
            f"{step['error']:+.1%}",
            f"{step['error_left_out']:+.1%}",
        )
        for step in calibration.steps
    ]
    render.table("", ("step", "measured ms", "predicted ms", "error", "if not fitted to"), rows)
    sizes = np.abs(measured.fit.left_out)
    render.say(
        f"error on steps that were not fitted to: {np.median(sizes):.1%} (median), {np.percentile(sizes, 90):.1%} "
        f"(P90), {sizes.max():.1%} (worst)"
    )
    for each in measured.serving:
        between = render.human_seconds(each.between)
        render.say(
            f"serving {each.num_seqs} at a time: {between} between steps, which take {each.slowdown:.2f} times as long "
            "as alone"
        )
    render.say(f"copies from and to host memory: {1e-9 / calibration.swap_seconds_per_byte:.3g} GB/s")
