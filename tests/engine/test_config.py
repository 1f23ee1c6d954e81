"""Settings that can and cannot be combined."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from llmsched.engine.config import BASELINE, MAX_DRAFT_TOKENS, EngineConfig, Policy, check_together
from llmsched.engine.errors import ConfigError


def test_policy_fair_accepts_every_setting() -> None:
    check_together({"headroom": 0.2, "max_passes": 3})
    check_together({"scheduling_policy": "fair", "headroom": 0.2, "target_itl": 0.02})


@pytest.mark.parametrize("policy", sorted({*get_args(Policy)} - {"fair"}))
@pytest.mark.parametrize("name", BASELINE)
def test_a_baseline_refuses_settings_that_it_ignores(policy: str, name: str) -> None:
    given: dict[str, Any] = {"target_itl": 0.02, "output_prediction": "learned"}
    with pytest.raises(ConfigError, match=f"{name}: .* has no effect with scheduling_policy {policy}"):
        check_together({"scheduling_policy": policy, name: given.get(name, 1)})
    check_together({"scheduling_policy": policy, name: BASELINE[name]})


@pytest.mark.parametrize("name", ["fast_lane_prompt", "fast_lane_output"])
def test_without_a_fast_lane_its_limits_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: 8 has no effect with scheduling_policy fcfs"):
        check_together({"scheduling_policy": "fcfs", name: 8})


@pytest.mark.parametrize(
    ("given", "name", "beside"),
    [
        ({"enable_prefix_caching": False, "cache_bonus": 3.0}, "cache_bonus", "enable_prefix_caching off"),
        ({"enable_prefix_caching": False, "max_pinned_share": 0.1}, "max_pinned_share", "enable_prefix_caching off"),
        ({"fast_lane_share": 0.0, "fast_lane_prompt": 8}, "fast_lane_prompt", "fast_lane_share 0.0"),
        ({"fast_lane_share": 0.0, "fast_lane_output": 8}, "fast_lane_output", "fast_lane_share 0.0"),
        ({"scheduling_policy": "static", "swap_space": 1 << 30}, "swap_space", "scheduling_policy static"),
        ({"scheduling_policy": "serial", "preemption_mode": "auto"}, "preemption_mode", "scheduling_policy serial"),
        ({"speculative": "off", "num_speculative_tokens": 4}, "num_speculative_tokens", "speculative off"),
    ],
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any], name: str, beside: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .* has no effect with {beside}; leave one of them out"):
        check_together(given)
    for left_out in given:
        check_together({other: value for other, value in given.items() if other != left_out})


def test_schedule_window_and_min_schedule_batch_need_each_other() -> None:
    EngineConfig(schedule_window=0.01, min_schedule_batch=2)
    with pytest.raises(ConfigError, match="schedule_window: has no effect with min_schedule_batch 1"):
        EngineConfig(schedule_window=0.01)
    with pytest.raises(ConfigError, match="min_schedule_batch: needs time to collect requests; set schedule_window"):
        EngineConfig(min_schedule_batch=2)


def test_policy_serial_needs_max_num_seqs_1() -> None:
    check_together({"scheduling_policy": "static", "max_num_seqs": 8})
    check_together({"scheduling_policy": "serial", "max_num_seqs": 1})
    with pytest.raises(ConfigError, match="max_num_seqs: 8 has no effect"):
        check_together({"scheduling_policy": "serial", "max_num_seqs": 8})


def test_the_shortest_match_is_at_most_the_longest() -> None:
    EngineConfig(prompt_lookup_min=3, prompt_lookup_max=3)
    with pytest.raises(ConfigError, match="prompt_lookup_min: 6 is above prompt_lookup_max 5; raise that too"):
        EngineConfig(prompt_lookup_min=6)


def test_draft_tokens_count_in_the_memory_plan() -> None:
    plain, drafting = EngineConfig(), EngineConfig(speculative="auto")
    assert drafting.most_sampled_rows == plain.most_sampled_rows + MAX_DRAFT_TOKENS


def test_baseline_values_are_allowed() -> None:
    assert EngineConfig(**BASELINE).headroom == 0
