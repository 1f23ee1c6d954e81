"""Runs at request rates, and the rates of loads."""

from __future__ import annotations

import pytest
from simulated_machine import SimulatedMachine, made_run

from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.knees import KneeFinder, given_rate
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trials import judge
from llmsched.engine.goodput import Slo

SLO = Slo(ttft=0.8)
SETTING = Setting(2048, 8)
LOAD = SyntheticLoad(num_prompts=20, request_rate=4.0)


def test_runs_last_long_enough_to_show_a_backlog() -> None:
    """At 100 requests/s, an SLO of 0.8 s takes 4 s, 400 requests; a measured run may last 2 s at most."""

    def requests(longest: float, slo: Slo = SLO, load: SyntheticLoad = LOAD) -> int:
        machine = SimulatedMachine(lambda setting: 1.0)
        finder = KneeFinder(machine, load, slo, least=20, longest=longest, tolerance=0.1)
        return finder.requests(100.0)

    assert requests(30.0) == 400
    assert requests(2.0) == 200
    assert requests(0.5) == 20, "the SLO is too loose for such a short run"
    assert requests(30.0, Slo(tpot=0.1)) == 20
    assert requests(30.0, load=SyntheticLoad(num_prompts=None, duration=3.0, request_rate=4.0)) > 200


@pytest.mark.parametrize(
    ("load", "rate"),
    [
        (LOAD, 4.0),
        (SyntheticLoad(num_prompts=20, max_concurrency=4), 3.0),
        (SyntheticLoad(num_prompts=20), float("inf")),
        (SyntheticLoad(num_prompts=20, request_rate=2.0, arrivals="ramp", ramp_to=9.0), None),
    ],
)
def test_the_rate_of_a_load(load: SyntheticLoad, rate: float | None) -> None:
    served = judge(SETTING, [made_run(SETTING, 20, 0, 30.0)], SLO)
    assert given_rate(load, served) == rate
