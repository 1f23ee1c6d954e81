"""From flags to a load: synthetic, from a trace, or one that comes with llmsched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from llmsched.cli.load.lengths import parse_lengths
from llmsched.cli.load.synthetic import Workload
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.lines import TraceError
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.options.engine import with_options
from llmsched.cli.options.load_flags import LoadFlags
from llmsched.engine.errors import ConfigError, LlmschedError, setting
from llmsched.profiles.shipped_workloads import find_workload
from llmsched.profiles.toml_files import UnknownNameError

R = TypeVar("R")

#: Flags of no use to a synthetic load; the first ones say how to read a file, the others what to do with it.
_READING = {"trace_format": "format_name", "timestamp_unit": "unit", "turns": "turns", "limit": "limit"} | {
    "trace_block_size": "block_tokens"
}
_TRACES = (*_READING, "ignore_timestamps", "speedup", "max_input_len", "max_output_len")

#: Flags of no use to a trace, and what to say instead.
_SYNTHETIC = {
    "num_prompts": "--limit keeps the first requests",
    "input_len": "--max-input-len cuts its prompts",
    "prefix_len": "its own blocks or texts say what prompts share",
}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send, when, and how long a request may take (seconds). `trace` is the file that is read for it."""

    load: Workload | TraceLoad
    timeout: float
    trace: Path | None


def with_load_options(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a Typer command the options of a load; it takes a keyword `load_options: LoadOptions` in their place.

    `defaults` are those of a synthetic load that differ between commands; max_concurrency only holds where nothing
    else says when to send.
    """

    def make(flags: LoadFlags) -> LoadOptions:
        if not flags.timeout > 0:
            raise ConfigError("timeout", f"{flags.timeout:g} s is out of range; allowed is above 0")
        return LoadOptions(make_load(flags, defaults), flags.timeout, flags.trace)

    shown = defaults.copy()
    if "max_concurrency" in defaults:
        shown["max_concurrency"] = f"{defaults['max_concurrency']} without --request-rate or a trace's own times"
    return with_options("load_options", LoadFlags, make, shown=shown)


def make_load(flags: LoadFlags, defaults: Mapping[str, Any]) -> Workload | TraceLoad:
    """The load that flags ask for; `defaults` stand for what was left out. Raises LlmschedError naming the flag."""
    values = {f.name: getattr(flags, f.name) for f in fields(flags) if f.name not in ("timeout", "workload", "trace")}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    path, name = flags.trace, None
    shape: Mapping[str, Any] = {}
    if flags.workload is not None:
        if flags.trace is not None:
            raise LlmschedError("--trace and --workload both name a load; give one of them")
        path, name, shape = _shipped(flags.workload)
    if flags.burstiness is not None:
        given.setdefault("arrivals", "gamma")
    if path is not None:
        return _trace_load(path, name, given, defaults.get("max_concurrency"))
    return _synthetic({**shape, **given}, defaults)


def _shipped(wanted: str) -> tuple[Path | None, str | None, Mapping[str, Any]]:
    """The file of a load that comes with llmsched, its name, and the settings of one that has no file."""
    try:
        found = find_workload(wanted)
    except UnknownNameError as problem:
        raise ConfigError("workload", str(problem)) from problem
    return found.file, found.name, found.settings


def _trace_load(path: Path, name: str | None, given: dict[str, Any], concurrency: int | None) -> TraceLoad:
    for flag, instead in _SYNTHETIC.items():
        if flag in given:
            raise ConfigError(flag, f"has no effect on a trace; {instead}")
    reading = {argument: given.pop(flag) for flag, argument in _READING.items() if flag in given}
    try:
        trace = read_trace(path, name=name, **reading)
    except TraceError as problem:
        raise problem if name else ConfigError("trace", problem.message) from problem
    if "output_len" in given:
        given["output_len"] = parse_lengths(given["output_len"], "output_len")
    if not (trace.timed and "ignore_timestamps" not in given):
        _fall_back(given, concurrency)
    return TraceLoad(trace=trace, **given)


def _synthetic(given: dict[str, Any], defaults: Mapping[str, Any]) -> Workload:
    if useless := [name for name in _TRACES if name in given]:
        raise LlmschedError(
            f"{', '.join(map(setting, useless))}: only has an effect with --trace, or a --workload that is a trace"
        )
    if "duration" in given:
        given.setdefault("num_prompts", None)
    _fall_back(given, defaults.get("max_concurrency"))
    settings = {name: value for name, value in defaults.items() if name != "max_concurrency"} | given
    for name in ("input_len", "output_len"):
        settings[name] = parse_lengths(str(settings[name]), name)
    return Workload(**settings)


def _fall_back(given: dict[str, Any], concurrency: int | None) -> None:
    """Where nothing says when to send, that many at a time (None: all at once)."""
    if concurrency is not None and "request_rate" not in given:
        given.setdefault("max_concurrency", concurrency)
