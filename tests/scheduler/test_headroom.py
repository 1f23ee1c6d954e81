"""HeadroomControl: headroom and concurrency cap under thrash and in quiet."""

from __future__ import annotations

import pytest
from fakes import Harness, make_request, tokens

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.scheduler.headroom import HeadroomControl


def test_headroom_grows_under_thrash_and_decays_in_quiet() -> None:
    control = HeadroomControl(EngineConfig(headroom=0.1, max_headroom=0.25), max_running=32)
    changes = 0
    for i in range(200):
        changes += control.admitted()
        if i % 4 == 0:
            changes += control.preempted(num_running=20)
    assert changes > 3
    assert 0.1 < control.headroom <= 0.25
    assert control.max_running < 32
    tight = control.headroom
    for _ in range(3000):
        control.admitted()
    assert control.headroom == pytest.approx(0.1)
    assert control.headroom < tight
    assert control.max_running == 32


def test_every_change_of_the_headroom_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(24, budget=256, max_num_seqs=8, headroom=0.0, output_prediction="none", fast_lane_share=0.0)
    control, changes = harness.scheduler.admission.control, 0
    with caplog.at_level("INFO", logger="llmsched"):
        for i in range(200):  # first such that outgrow the pool, then such that do not
            harness.add(make_request(f"r{i:03}", tokens(20, seed=i), 90 if i < 30 else 2, arrival=float(i)))
        while harness.scheduler.has_work():
            before = (control.headroom, control.max_running)
            harness.step()
            changes += before != (control.headroom, control.max_running)
    logged = [record.message for record in caplog.records if "headroom" in record.message]
    assert len(logged) == harness.scheduler.counters.num_headroom_changes >= changes > 4
    assert any("concurrency cap 8 -> " in line for line in logged)


def test_one_burst_of_preemptions_is_answered_once() -> None:
    control = HeadroomControl(EngineConfig(headroom=0.1), max_running=32)
    for _ in range(10):
        control.admitted()
    assert sum(control.preempted(num_running=30 - i) for i in range(20)) == 1


def test_headroom_that_has_decayed_to_nothing_stays_there() -> None:
    control = HeadroomControl(EngineConfig(headroom=0.0), max_running=32)
    for _ in range(10):
        control.admitted()
        control.preempted(num_running=20)
    assert control.headroom > 0
    for _ in range(4000):
        control.admitted()
    assert (control.headroom, control.max_running) == (0.0, 32)
    assert not any(control.admitted() for _ in range(4000))


def test_headroom_stays_between_the_two_rates() -> None:
    control = HeadroomControl(EngineConfig(headroom=0.1), max_running=32)
    for i in range(640):
        assert not control.admitted()
        assert i % 32 or not control.preempted(num_running=20)
    assert (control.headroom, control.max_running) == (0.1, 32)
    for _ in range(10):
        control.admitted()
        control.preempted(num_running=20)
    raised = (control.headroom, control.max_running)
    for i in range(640):
        assert not control.admitted() or i < 64
        assert i % 32 or not control.preempted(num_running=20) or i < 64
    assert (control.headroom, control.max_running) == raised, "neither tighter nor bolder"


def test_headroom_above_its_maximum_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_headroom"):
        EngineConfig(headroom=0.3, max_headroom=0.25)
