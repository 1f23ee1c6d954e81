"""The bench measuring itself: what counts as right, and the server that it does it with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from command_line import CommandLine

from llmsched.cli.bench.figures.measure import Measurement, measure
from llmsched.cli.bench.figures.record import Chunk, RequestFailed, RequestRecord, Usage
from llmsched.cli.bench.selfcheck import check, mode
from llmsched.cli.bench.selfcheck.check import PROBES, Check, Probe, checks_of
from llmsched.cli.bench.selfcheck.scripts import SCRIPTS
from llmsched.cli.bench.selfcheck.server import Log
from llmsched.engine.latency import Slo

BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def served(probe: Probe, read_late: float = 0.0, server_late: float = 0.0, count: int = 4) -> tuple[Measurement, Log]:
    """Requests due at 50.0, there at 50.01, answered by the probe's script by a server that is late, and read late."""
    script, came = SCRIPTS[probe.name][0], 50.01
    log: Log = [(came, [(came + part.at + server_late, part.tokens) for part in script.parts]) for _ in range(count)]
    records = []
    for index, (_, written) in enumerate(log):
        chunks = [Chunk(at + read_late, "x" if tokens else "", tokens) for at, tokens in written]
        usage = Usage(8, 0, script.tokens)
        records.append(RequestRecord(index, 50.0, 50.0, 50.001, None, chunks[-1].time, chunks, usage))
    return measure(records, probe.load, Slo()), log


@pytest.mark.parametrize("name", ["steady", "chunks", "role", "stall"])
def test_a_client_that_measures_right_is_right_even_if_the_server_is_late(name: str) -> None:
    checks = checks_of(BY_NAME[name], *served(BY_NAME[name], read_late=0.001, server_late=0.2))
    assert [one.figure for one in checks if not one.right] == []
    ttft = checks[0]
    assert (ttft.figure, ttft.error) == ("TTFT mean", pytest.approx(1.0))
    assert ttft.server == pytest.approx((ttft.script or 0) + 210.0)


def test_a_client_that_reads_late_is_off() -> None:
    checks = {one.figure: one for one in checks_of(BY_NAME["steady"], *served(BY_NAME["steady"], read_late=0.03))}
    assert not checks["TTFT mean"].right
    assert not checks["E2E mean"].right
    assert checks["ITL mean"].right
    assert checks["TTFT mean"].error == pytest.approx(30.0)


def test_what_was_not_measured_is_not_right() -> None:
    nothing = measure([RequestRecord(0, 50.0, failure=RequestFailed("connect"))], BY_NAME["steady"].load, Slo())
    checks = checks_of(BY_NAME["steady"], nothing, served(BY_NAME["steady"])[1])
    assert [one.figure for one in checks if one.right] == []
    assert Check("a", "b", 1, 1, None, 5).error is None


def test_scripts_are_what_their_names_say() -> None:
    assert {probe.name for probe in PROBES} < SCRIPTS.keys()
    assert [script.ending for script in SCRIPTS["failures"]] == ["done", "cut", "error", "refused", "done"]
    assert SCRIPTS["chunks"][0].tokens == 50
    times = [part.at for part in SCRIPTS["stall"][0].parts]
    assert max(after - before for before, after in pairwise(times)) == pytest.approx(0.52)


def test_the_whole_way_over_sockets(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are exact on any machine; times are as good as the machine is idle, and only told."""
    few = tuple(BY_NAME[name] for name in ("chunks", "role", "failures"))
    for module in (check, mode):
        monkeypatch.setattr(module, "PROBES", few)
    outcome = command("bench", "--self-check", "--json")
    report = outcome.json
    found = {(one["probe"], one["figure"]): one for one in report["checks"]}
    counts = [name for name in found if name[0] == "failures" or name[1] == "tokens"]
    assert len(counts) == 8
    assert [name for name in counts if not found[name]["right"]] == []
    assert found["chunks", "tokens"]["measured"] == 200
    assert found["chunks", "TTFT mean"]["measured"] > 100
    assert report["right"] == all(one["right"] for one in report["checks"])
    assert outcome.code == (0 if report["right"] else 1)


def test_a_table_for_each_probe(capsys: pytest.CaptureFixture[str]) -> None:
    right = [Check(probe.name, "tokens", 5, 5, 5, 0) for probe in PROBES]
    mode.show(right)
    assert "all 7 figures are right" in capsys.readouterr().out
    mode.show([*right, Check("steady", "TTFT mean", 100, 101, 131, 5)])
    out = capsys.readouterr().out
    assert "OFF" in out
    assert "off: steady TTFT mean." in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("http://x",), "has its own server"),
        (("--compare", "fcfs,fair"), "goes with neither --compare nor --find-knee"),
        (("--csv", "x.csv"), "--csv and --report are of the run of a load"),
        (("--save-detailed", "x.jsonl"), "is of one run of a load"),
    ],
)
def test_what_does_not_go_with_it(command: CommandLine, flags: tuple[str, ...], message: str) -> None:
    outcome = command("bench", "--self-check", *flags)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
