"""Resuming an interrupted search with the runs it has made."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from simulated_machine import SimulatedMachine, hill, made_run
from virtual_time import run_virtual

from llmsched.cli.tune.knob_search import SearchSpace, search
from llmsched.cli.tune.knobs import Setting, powers_of_two
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.race import Race, rung_lengths
from llmsched.cli.tune.resume import ResumableRunner, state_path
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo

ABOUT = {"model": "m", "SLOs": {"itl": 0.05}}
RATE = hill(128, 4, steep=0.15)


class Interrupted(SimulatedMachine):
    """Machine that is interrupted (Ctrl-C) in the run after the first `most`."""

    most = 10**9

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        if len(self.log) == self.most:
            raise asyncio.CancelledError
        return await super().run(setting, requests, round_index, rate)


def steady() -> SimulatedMachine:
    """Return a machine that makes 10 tokens per second with every setting."""
    return SimulatedMachine(lambda setting: 10.0, noise=0.0)


def started(path: Path, *budgets: int) -> ResumableRunner:
    """Start a journal, and run a setting with each token budget."""
    runner = ResumableRunner(steady(), path, ABOUT, resume=False)
    for tokens in budgets:
        run_virtual(runner.run(Setting(tokens, 8), 8, 0))
    return runner


def resumed(path: Path, about: dict[str, object] = ABOUT) -> ResumableRunner:
    return ResumableRunner(steady(), path, about, resume=True)


def searched(machine: SimulatedMachine, path: Path, *, resume: bool = False) -> TrialHistory:
    history = TrialHistory(Slo(itl=1.0), "throughput", Setting(32, 16))

    async def main() -> None:
        runner = ResumableRunner(machine, path, ABOUT, resume=resume)
        race = Race(runner, history, rung_lengths(32, 4), 2)
        budgets = tuple(powers_of_two(32, 1024))
        await search(SearchSpace(("max_num_batched_tokens", "max_num_seqs"), budgets, Setting(32, 16), 16, 0.25), race)

    run_virtual(main())
    return history


def test_a_run_survives_the_journal(tmp_path: Path) -> None:
    path, setting = tmp_path / "s.jsonl", Setting(64, 8, 0.05, 0.02)
    first = run_virtual(ResumableRunner(steady(), path, ABOUT, resume=False).run(setting, 4, 2))
    assert first == made_run(setting, 4, 2, 10.0)
    assert run_virtual(resumed(path).run(setting, 4, 2)) == first


@pytest.mark.parametrize("most", [1, 3, 9, 11])
def test_no_run_is_made_twice_and_the_result_is_the_same(tmp_path: Path, most: int) -> None:
    whole = SimulatedMachine(RATE, noise=0.0, says=RATE)
    expected = searched(whole, tmp_path / "whole.jsonl")

    first, path = Interrupted(RATE, noise=0.0, says=RATE), tmp_path / "cut.jsonl"
    first.most = most
    with pytest.raises(asyncio.CancelledError):
        searched(first, path)
    second = SimulatedMachine(RATE, noise=0.0, says=RATE)
    found = searched(second, path, resume=True)
    assert first.log + second.log == whole.log
    assert found.trials() == expected.trials()
    assert best_trial(found) == best_trial(expected)


def test_the_time_limit_ends_a_run(tmp_path: Path) -> None:
    """The run is dropped, not counted as a failure of its setting."""

    async def main() -> float:
        runner = ResumableRunner(steady(), tmp_path / "s.jsonl", ABOUT, resume=False, deadline=5.0)
        with pytest.raises(OutOfTimeError):
            await runner.run(Setting(64, 8), 8, 0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 5.0
    assert "run" not in (tmp_path / "s.jsonl").read_text().splitlines()[-1]


def test_a_setting_that_broke_is_not_tried_again(tmp_path: Path) -> None:
    class Breaks(SimulatedMachine):
        async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
            self.log.append((setting, requests, round_index))
            raise MemoryError("out of\nmemory")

    path, setting = tmp_path / "s.jsonl", Setting(64, 8)
    for resume in (False, True):
        runner = Breaks(RATE)
        run = asyncio.run(ResumableRunner(runner, path, ABOUT, resume=resume).run(setting, 8, 0))
        assert run.problem == "MemoryError: out of memory"
        assert len(runner.log) == (0 if resume else 1)


def test_the_journal_of_another_search_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    started(path)
    with pytest.raises(LlmschedError, match=r"another SLOs \({'itl': 0.05}, now {'itl': 0.1}\)"):
        resumed(path, {**ABOUT, "SLOs": {"itl": 0.1}})
    with pytest.raises(LlmschedError, match="another workload"):
        resumed(path, {**ABOUT, "workload": "x"})
    with pytest.raises(LlmschedError, match="there is no unfinished search at"):
        resumed(tmp_path / "away.jsonl")


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    started(path, 64, 32)
    whole = path.read_text()
    path.write_text(whole[:-9])
    machine = steady()
    cut = ResumableRunner(machine, path, ABOUT, resume=True)
    for tokens in (64, 32):
        run_virtual(cut.run(Setting(tokens, 8), 8, 0))
    assert [setting for setting, _, _ in machine.log] == [Setting(32, 8)]
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "text", ["", "\n", "{}\n", "[1]\n", "nonsense\n", '{"about": 3}\n', '{"about": {}}\n{"run": 3}\n']
)
def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(LlmschedError, match="--resume") as problem:
        resumed(path, {})
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"requests": 8', '"requests": "eight"'),
        ('"tokens_per_s": 10.0', '"tokens_per_s": NaN'),
        ('"seconds": 8.0', '"seconds": "soon"'),
        ('"max_num_seqs": 8', '"max_num_seqs": [8]'),
        ('"values": [0.02]', '"values": ["fast"]'),
        ('"problem": null', '"problem": 3'),
        ('"samples": {', '"samples": ' + 5000 * "[" + "{"),
    ],
)
def test_an_invalid_run_is_refused(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "s.jsonl"
    started(path, 64)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LlmschedError, match="is not a search journal; leave out --resume"):
        resumed(path)


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    os.mkfifo(path)
    with pytest.raises(LlmschedError, match="is not a regular file"):
        resumed(path)


def test_an_unwritable_journal_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlmschedError, match="cannot be written"):
        started(tmp_path / "file" / "s.jsonl")


def test_a_disk_that_is_full_does_not_end_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "s.jsonl"
    runner = started(path)
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("")
    for _ in range(2):
        assert run_virtual(runner.run(Setting(64, 8), 8, 0)).completed == 8
    assert capsys.readouterr().err.count("the search cannot be resumed") == 1


def test_the_journal_lies_beside_the_profile_until_the_search_ends(tmp_path: Path) -> None:
    path = state_path(tmp_path / "chat.toml")
    assert path == tmp_path / "chat.state.jsonl"
    runner = started(path)
    assert path.exists()
    runner.delete_journal()
    assert not path.exists()
    runner.delete_journal()
