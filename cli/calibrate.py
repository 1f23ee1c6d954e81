from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from llmsched.cli import render
from llmsched.cli.options.config_flags import MEMORY_KNOBS, EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, resolve_model
from llmsched.cli.profiles.this_machine import versions_table
from llmsched.engine.memory.planner import ModelPlanner, model_name, open_planner
from llmsched.profiles.calibrated import Calibration, calibration_dir, save_calibration
from llmsched.profiles.toml_files import check_directory

if TYPE_CHECKING:
    from llmsched.engine.calibration.timing import DeviceTimings

#: Engine flags that step times depend on; scheduling flags have no effect here.
FLAGS = (*MEMORY_KNOBS, "swap_space")


@with_engine_options(only=FLAGS)
def calibrate(
    model: ModelArgument = None,
    *,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Measurements of each step; their median is used.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_options: EngineOptions,
) -> None:
    """Measure a model's step times on this device, for `--simulate local` of bench, tune and kv-budget.

    The command runs about twenty kinds of steps (decode, prefill and mixed, up to the largest step of the engine) and
    fits a cost model with a few coefficients to their times. To estimate the error of a step, it fits the model to all
    other steps. Every simulated figure is printed with the median of these errors. The command also measures the
    overhead of serving and the bandwidth of copies to host memory. Nothing else should run on the machine meanwhile.

    \b
    Examples:
      llmsched calibrate demo
      llmsched calibrate demo --max-num-batched-tokens 1024 --max-num-seqs 32
      llmsched calibrate ./my-model --repeats 20 --json
    """
    spec = resolve_model(model)
    check_directory(calibration_dir())
    with render.progress_bar() as progress:
        from llmsched.engine.calibration.timing import measure_device

        planner = open_planner(spec, progress)
        measured = measure_device(engine_options.config(spec), repeats, progress)
    calibration = _calibration(spec, planner, measured)
    path = save_calibration(calibration)
    if as_json:
        render.emit_json(_as_json(spec, measured, calibration, repeats) | {"saved": path})
    else:
        _show(spec, measured, calibration, repeats)
        render.say(f"saved: {path}, for `llmsched bench {spec} --simulate local`")


def _calibration(spec: str, planner: ModelPlanner, measured: DeviceTimings) -> Calibration:
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
        versions=versions_table(),
        # Errors are shares; `error_left_out` is the error of a fit to all other steps.
        steps=tuple(
            {
                "step": step.name,
                "measured_ms": step.seconds * 1e3,
                "predicted_ms": step.seconds * (1 + error) * 1e3,
                "error": error,
                "error_left_out": left_out,
            }
            for step, error, left_out in zip(measured.steps, measured.fit.errors, measured.fit.left_out, strict=True)
        ),
    )


def _as_json(spec: str, measured: DeviceTimings, calibration: Calibration, repeats: int) -> dict[str, Any]:
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


def _show(spec: str, measured: DeviceTimings, calibration: Calibration, repeats: int) -> None:
    device, engine = calibration.device, calibration.engine
    threads = f", {device['threads']} thread(s)" if device["kind"] == "cpu" else ""
    count = f"{len(measured.steps)} steps, median of {repeats} runs each"
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
    render.table("", ("step", "measured ms", "predicted ms", "error", "error if left out"), rows)
    sizes = np.abs(measured.fit.left_out)
    render.say(
        f"error on steps left out of the fit: {np.median(sizes):.1%} (median), {np.percentile(sizes, 90):.1%} (P90), "
        f"{sizes.max():.1%} (worst)"
    )
    for each in measured.serving:
        between = render.human_seconds(each.between)
        render.say(
            f"serving, {each.num_seqs} in flight: {between} between steps; steps take "
            f"{each.slowdown:.2f} times as long as in isolation"
        )
    render.say(f"copies from and to host memory: {1e-9 / calibration.swap_seconds_per_byte:.3g} GB/s")
