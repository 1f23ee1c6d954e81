"""Ctrl-C in the middle of a run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import CommandLine
from fake_server import FakeServer, steady
from measured_load import measure_load
from virtual_time import run_virtual

from llmsched.cli.figures.live_figures import LiveFigures
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.synthetic_load import SyntheticLoad


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Handle SIGINT as in a terminal; shells let commands in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(after: float, *, partial: bool) -> Measurement:
    """Measure requests at 10/s that take 0.5 s each, in a run that is cancelled after `after` seconds."""
    work = SyntheticLoad(num_prompts=1000, input_len=8, output_len=5, request_rate=10.0, arrivals="constant")

    async def main() -> Measurement:
        task = asyncio.current_task()
        asyncio.get_running_loop().call_later(after, task.cancel)
        server = FakeServer(lambda n: steady(5, 0.1, 0.1))
        figures = await measure_load("http://fake", work, transport=server, timeout=9.0, partial=partial)
        assert not task.cancelling()
        return figures

    return run_virtual(main())


def test_an_interrupted_run_has_the_requests_that_ended() -> None:
    figures = interrupted(2.05, partial=True)
    assert figures.run.interrupted
    assert [record.index for record in figures.run.records] == list(range(16))
    assert (figures.requests.completed, figures.requests.failed) == (16, 0)
    assert figures.duration == pytest.approx(2.0)
    assert figures.rates.requests_steady == pytest.approx(10.0)
    assert figures.warnings[0].startswith("interrupted after 16 requests: requests still running are not counted")


def test_a_run_is_cancelled_if_nothing_ended_or_partial_runs_are_not_wanted() -> None:
    with pytest.raises(asyncio.CancelledError):
        interrupted(0.25, partial=True)
    with pytest.raises(asyncio.CancelledError):
        interrupted(2.05, partial=False)


def test_ctrl_c_from_the_command_line(
    command: CommandLine, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = LiveFigures.ended
    seen: list[object] = []

    def third(self: LiveFigures, record: object) -> None:
        ended(self, record)  # type: ignore[arg-type]
        seen.append(record)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LiveFigures, "ended", third)
    arguments = ("bench", str(tiny_model("llama")), "--num-gpu-blocks-override", "64", "--device", "cpu", "--json")
    load = ("--num-prompts", "500", "--max-concurrency", "1", "--input-len", "8", "--output-len", "3")
    page = tmp_path / "run.html"
    outcome = command(*arguments, *load, "--report", str(page))
    assert outcome.code == 130
    assert outcome.json["interrupted"] is True
    assert 3 <= outcome.json["completed"] < 500
    assert "interrupted after" in page.read_text()
    seen.clear()
    outcome = command(*arguments, *load, "--compare", "fair,fcfs")
    assert (outcome.code, outcome.out) == (130, "")


def test_a_simulated_run_ends_at_once(
    command: CommandLine, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated run blocks the event loop, which would handle Ctrl-C only at its end."""

    def endless(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    monkeypatch.setattr("llmsched.cli.targets.simulated_clients.SimulatedClients.run", endless)
    outcome = command("bench", str(tiny_model("llama")), "--simulate", "l4", "--num-prompts", "3")
    assert (outcome.code, outcome.out) == (130, "")
