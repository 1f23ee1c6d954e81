"""Settings that go together, and those that do not."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from llmsched.engine.config import BASELINE, EngineConfig, Policy, check_policy
from llmsched.engine.errors import ConfigError


def test_the_whole_scheduler_heeds_every_setting() -> None:
    check_policy({"headroom": 0.2, "max_passes": 3})
    check_policy({"scheduling_policy": "fair", "headroom": 0.2, "target_itl": 0.02})


@pytest.mark.parametrize("policy", sorted({*get_args(Policy)} - {"fair"}))
@pytest.mark.parametrize("name", BASELINE)
def test_a_baseline_refuses_what_it_does_without(policy: str, name: str) -> None:
    given: dict[str, Any] = {"target_itl": 0.02, "output_prediction": "learned"}
    with pytest.raises(ConfigError, match=f"{name}: .* has no effect with scheduling_policy {policy}"):
        check_policy({"scheduling_policy": policy, name: given.get(name, 1)})
    check_policy({"scheduling_policy": policy, name: BASELINE[name]})


@pytest.mark.parametrize("name", ["fast_lane_prompt", "fast_lane_output"])
def test_without_a_lane_nothing_is_short(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 8 has no effect with scheduling_policy fcfs"):
        check_policy({"scheduling_policy": "fcfs", name: 8})


def test_one_at_a_time_is_one() -> None:
    check_policy({"scheduling_policy": "static", "max_num_seqs": 8})
    check_policy({"scheduling_policy": "serial", "max_num_seqs": 1})
    with pytest.raises(ConfigError, match="max_num_seqs: 8 has no effect"):
        check_policy({"scheduling_policy": "serial", "max_num_seqs": 8})


def test_what_baselines_do_without_is_allowed() -> None:
    assert EngineConfig(**BASELINE).headroom == 0
