"""The bench's self-check: its verdicts, and its scripted server."""

from __future__ import annotations

from itertools import pairwise

import pytest
from command_line import CommandLine
from virtual_time import run_virtual

from llmsched.cli.bench.report.report_content import show
from llmsched.cli.bench.selfcheck import self_check
from llmsched.cli.bench.selfcheck.scripted_server import SCRIPTS, AnswerLog
from llmsched.cli.bench.selfcheck.self_check import (
    PROBES,
    FigureCheck,
    Probe,
    ProbeOutcome,
    Verdict,
    checks_of,
    tried,
)
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.engine.goodput import Slo

BY_NAME = {probe.name: probe for probe in PROBES}


def served(
    probe: Probe, read_late: float = 0.0, server_late: float = 0.0, count: int = 4
) -> tuple[Measurement, AnswerLog]:
    """Measure requests due at 50.0 that arrive at 50.01; server and client are late by these seconds."""
    script, came = SCRIPTS[probe.name][0], 50.01
    log: AnswerLog = [
        (came, [(came + part.at + server_late, part.tokens) for part in script.parts]) for _ in range(count)
    ]
    records = []
    for index, (_, written) in enumerate(log):
        chunks = [Chunk(at + read_late, "x" if tokens else "", tokens) for at, tokens in written]
        usage = ReportedUsage(8, 0, script.tokens)
        records.append(RequestRecord(index, 50.0, 50.0, 50.001, None, chunks[-1].time, chunks, usage))
    return measure(RunRecord(records), probe.load, Slo()), log


@pytest.mark.parametrize("name", ["steady", "chunks", "role", "stall"])
def test_a_late_server_does_not_make_the_client_wrong(name: str) -> None:
    checks = checks_of(BY_NAME[name], *served(BY_NAME[name], read_late=0.001, server_late=0.2))
    assert [one.figure for one in checks if not one.right] == []
    ttft = checks[0]
    assert (ttft.figure, ttft.error) == ("TTFT mean", pytest.approx(1.0))
    assert ttft.server == pytest.approx((ttft.script or 0) + 210.0)


def test_a_client_that_reads_late_is_wrong() -> None:
    checks = {one.figure: one for one in checks_of(BY_NAME["steady"], *served(BY_NAME["steady"], read_late=0.03))}
    assert not checks["TTFT mean"].right
    assert not checks["E2E mean"].right
    assert checks["ITL mean"].right
    assert checks["TTFT mean"].error == pytest.approx(30.0)


def test_a_missing_figure_is_not_right() -> None:
    nothing = measure(
        RunRecord([RequestRecord(0, 50.0, failure=RequestFailed("connect"))]), BY_NAME["steady"].load, Slo()
    )
    checks = checks_of(BY_NAME["steady"], nothing, served(BY_NAME["steady"])[1])
    assert [one.figure for one in checks if one.right] == []
    assert FigureCheck("a", "b", 1, 1, None, 5).error is None


def test_scripts_match_their_names() -> None:
    assert {probe.name for probe in PROBES} < SCRIPTS.keys()
    assert [script.ending for script in SCRIPTS["failures"]] == ["done", "cut", "error", "refused", "done"]
    assert SCRIPTS["chunks"][0].tokens == 50
    times = [part.at for part in SCRIPTS["stall"][0].parts]
    assert max(after - before for before, after in pairwise(times)) == pytest.approx(0.52)


def test_self_check_over_sockets(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are exact on any machine; times depend on its load, so they are only reported."""
    few = tuple(BY_NAME[name] for name in ("chunks", "role", "failures"))
    monkeypatch.setattr(self_check, "PROBES", few)
    outcome = command("bench", "--self-check", "--json")
    report = outcome.json
    found = {(one["probe"], one["figure"]): one for one in report["checks"]}
    counts = [name for name in found if name[0] == "failures" or name[1] == "tokens"]
    assert len(counts) == 8
    assert [name for name in counts if not found[name]["right"]] == []
    assert found["chunks", "tokens"]["measured"] == 200
    assert found["chunks", "TTFT mean"]["measured"] > 100
    assert report["right"] == all(one["right"] for one in report["checks"])
    assert report["wrong"] == any(one["verdict"] == "wrong" for one in report["checks"])
    assert [one["probe"] for one in report["probes"]] == ["chunks", "role", "failures"]
    assert all(1 <= one["tries"] <= 3 and one["held_up_ms"] > 0 for one in report["probes"])
    assert outcome.code == (0 if report["right"] else 1)


STEADY = BY_NAME["steady"]


@pytest.mark.parametrize(
    ("late", "held_up", "verdict"),
    [
        (0.03, 0.0, "wrong"),
        (0.03, 0.004, "wrong"),
        (0.03, 0.02, "disturbed"),
        (0.2, 0.02, "wrong"),
        (0.0, 0.4, "right"),
    ],
)
def test_errors_due_to_other_work_are_not_wrong(late: float, held_up: float, verdict: Verdict) -> None:
    """Other work excuses an error only as far as client or server were observed to wait."""
    checks = checks_of(STEADY, *served(STEADY, read_late=late), held_up)
    ttft = next(check for check in checks if check.figure == "TTFT mean")
    assert ttft.verdict == verdict
    assert ProbeOutcome(STEADY, checks).verdict == verdict
    tokens = next(check for check in checks if check.figure == "tokens")
    assert tokens.excuse == 0


def attempts(*found: tuple[float, float]) -> ProbeOutcome:
    """Return the outcome of a probe with these (error in ms, held up in seconds), one pair per try."""
    left = iter(found)

    async def attempt() -> tuple[list[FigureCheck], float]:
        error, held_up = next(left)
        return [FigureCheck("steady", "TTFT mean", 100, 100, 100 + error, 5, 2e3 * held_up)], held_up

    return run_virtual(tried(STEADY, attempt))


def test_a_disturbed_probe_is_tried_again() -> None:
    good = attempts((20, 0.03), (1, 0.002))
    assert (good.verdict, good.tries) == ("right", 2)
    busy = attempts((20, 0.03), (9, 0.01), (30, 0.1), (0, 0))
    assert (busy.verdict, busy.tries, busy.held_up) == ("disturbed", 3, 0.1)
    assert (attempts((90, 0.03), (1, 0.03)).verdict, attempts((4, 0.3)).tries) == ("right", 1)


def test_an_undisturbed_probe_is_wrong_at_the_first_try() -> None:
    outcome = attempts((20, 0.002), (0, 0))
    assert (outcome.verdict, outcome.tries) == ("wrong", 1)


def test_conclusions_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    right = [ProbeOutcome(probe, [FigureCheck(probe.name, "tokens", 5, 5, 5, 0)]) for probe in PROBES]
    show(self_check.content(right))
    assert "all 7 figures are within the allowed error" in capsys.readouterr().out
    wrong = ProbeOutcome(STEADY, [FigureCheck("steady", "TTFT mean", 100, 101, 131, 5)])
    busy = ProbeOutcome(
        BY_NAME["crowd"], [FigureCheck("crowd", "E2E mean", 100, 101, 131, 5, 60)], held_up=0.03, tries=3
    )
    show(self_check.content([*right, wrong, busy]))
    out = capsys.readouterr().out
    assert "  wrong\n" in out
    assert "disturbed" in out
    assert "wrong: steady TTFT mean, by more than" in out
    assert "tried again, because this machine was busy with other work: crowd (3 tries)" in out
    assert "uncertain: crowd E2E mean. Other work made the bench wait for up to 30.0 ms" in out
    assert "within the allowed error" not in out
    report = self_check.as_json([wrong, busy])
    assert (report["right"], report["wrong"], self_check.as_json([busy])["wrong"]) == (False, True, False)
    assert [one["verdict"] for one in report["checks"]] == ["wrong", "disturbed"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("http://x",), "uses its own server"),
        (("--compare", "fcfs,fair"), "leave out --compare and --find-knee"),
        (("--csv", "x.csv"), "--csv and --report do not apply to --self-check"),
        (("--save-detailed", "x.jsonl"), "works only with a single run"),
    ],
)
def test_flags_that_do_not_go_with_it(command: CommandLine, flags: tuple[str, ...], message: str) -> None:
    assert message in command.refused("bench", "--self-check", *flags)
