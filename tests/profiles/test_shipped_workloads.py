"""Shipped workloads: each can be read and agrees with SOURCES.md."""

from __future__ import annotations

import statistics
from importlib.resources import files
from pathlib import Path

import pytest

from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.load.traces.read import read_trace
from llmsched.profiles.shipped_workloads import find_workload, workloads
from llmsched.profiles.toml_files import UnknownNameError


@pytest.mark.parametrize(
    ("name", "form", "inputs", "outputs"),
    [
        ("azure-code", "azure", 2067, 28),
        ("azure-conversation", "azure", 1157, 235),
        ("mooncake-conversation", "mooncake", 13_733, 349),
        ("mooncake-synthetic", "mooncake", 16_157, 146),
    ],
)
def test_traces(name: str, form: str, inputs: int, outputs: int) -> None:
    path = find_workload(name).file
    assert path is not None
    trace = read_trace(path)
    assert (trace.format, trace.timed, len(trace.requests)) == (form, True, 1000)
    assert round(statistics.mean(request.input_len or 0 for request in trace.requests)) == inputs
    assert round(statistics.mean(request.output_len or 0 for request in trace.requests)) == outputs
    assert path.name in (path.parent / "SOURCES.md").read_text()


def test_synthetic_ones_are_settings_of_a_workload() -> None:
    shapes = {name: shipped.settings for name, shipped in workloads().items() if shipped.file is None}
    assert set(shapes) == {"chat", "rag", "agent", "batch"}
    for settings in shapes.values():
        lengths = {name: parse_lengths(settings[name], name) for name in ("input_len", "output_len")}
        planned = SyntheticLoad(**{**settings, **lengths}).plan(range(1000))
        assert len(planned) == 100


def test_an_unknown_one_lists_all() -> None:
    with pytest.raises(UnknownNameError, match=r"azure-code, .*, batch"):
        find_workload("azure")


def test_all_files_are_small_and_named() -> None:
    folder = Path(str(files("llmsched.profiles"))) / "workloads"
    shipped = {found.file for found in workloads().values()} - {None}
    assert {path for path in folder.iterdir() if path.suffix not in (".md", ".toml")} == shipped
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000
