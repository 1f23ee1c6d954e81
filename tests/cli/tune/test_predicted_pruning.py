"""Settings that a cost model may rule out, given its errors so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulated_machine import made_run

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.predicted_pruning import hopeless
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.engine.goodput import Slo

A, B, C, D = (Setting(tokens, 8) for tokens in (32, 64, 128, 256))


def measured(rates: Mapping[Setting, float], slo: Slo | None = None, **itl: float) -> TrialHistory:
    history = TrialHistory(slo or Slo(), "throughput", A)
    for setting, rate in rates.items():
        history.add(made_run(setting, 10, 0, rate, itl.get(f"at_{setting.max_num_batched_tokens}", 0.02)))
    return history


def said(rates: Mapping[Setting, float], **itl: Any) -> dict[Setting, TrialRun]:
    return {s: made_run(s, 10, 0, rate, itl.get(f"at_{s.max_num_batched_tokens}", 0.02)) for s, rate in rates.items()}


def test_only_settings_far_behind_are_pruned() -> None:
    """Predictions are half of all measurements: 0.84 of the best is then within the margin, 0.7 is not."""
    history = measured({A: 100.0, B: 80.0})
    out = hopeless([C, D], said({A: 50.0, B: 40.0, C: 35.0, D: 43.5}), history)
    assert out == {C: "not measured: predicted 30% less throughput than the best"}


def test_a_larger_model_error_prunes_less() -> None:
    """Predictions are 10 % too high for A and 10 % too low for B: 0.75 of the best may still be as good."""
    history = measured({A: 100.0, B: 80.0})
    assert hopeless([C], said({A: 110.0, B: 72.0, C: 75.0}), history) == {}
    assert hopeless([C], said({A: 200.0, B: 40.0, C: 1.0}), history) == {}, "not believed at all"


def test_one_measured_setting_tells_nothing_of_the_model() -> None:
    assert hopeless([C], said({A: 100.0, C: 1.0}), measured({A: 100.0})) == {}
    assert hopeless([C], {}, measured({A: 100.0, B: 80.0})) == {}


def test_a_predicted_best_counts_as_one() -> None:
    history = measured({A: 100.0, B: 80.0})
    assert list(hopeless([C, D], said({A: 100.0, B: 80.0, C: 100.0, D: 200.0}), history)) == [C]


def test_a_setting_far_above_an_slo_is_pruned() -> None:
    slo = Slo(itl=0.1)
    history = measured({A: 100.0, B: 110.0}, slo, at_32=0.04, at_64=0.08)
    predicted = said({A: 100.0, B: 110.0, C: 120.0, D: 130.0}, at_32=0.02, at_64=0.04, at_128=0.095, at_256=0.105)
    assert hopeless([C, D], predicted, history) == {D: "not measured: predicted P99 ITL 210 ms is far above 100 ms"}


def test_a_setting_within_a_factor_of_two_of_an_slo_is_measured() -> None:
    """A prediction of 1,177 ms is not far above an SLO of 800 ms."""
    slo = Slo(itl=0.8)
    predicted = said({A: 100.0, B: 110.0, C: 120.0}, at_32=0.1, at_64=0.2, at_128=1.177)
    assert hopeless([C], predicted, measured({A: 100.0, B: 110.0}, slo, at_32=0.1, at_64=0.2)) == {}


def test_a_setting_that_misses_an_slo_rules_out_no_other() -> None:
    """B has the most tokens but misses the SLO, so C, far behind it, may still be the choice."""
    slo = Slo(itl=0.1)
    history = measured({A: 40.0, B: 200.0}, slo, at_32=0.02, at_64=0.5)
    predicted = said({A: 40.0, B: 200.0, C: 60.0}, at_32=0.02, at_64=0.5, at_128=0.05)
    assert hopeless([C], predicted, history) == {}
    nobody = measured({A: 100.0, B: 200.0}, slo, at_32=0.3, at_64=0.5)
    assert hopeless([C], said({A: 100.0, B: 200.0, C: 1.0}, at_32=0.3, at_64=0.5), nobody) == {}


def test_settings_are_not_pruned_by_predicted_goodput() -> None:
    """C is predicted to just miss the limit: its goodput would be 0, while its throughput is the highest."""
    history = TrialHistory(Slo(itl=0.1), "goodput", A)
    for setting, rate in ((A, 100.0), (B, 110.0)):
        history.add(made_run(setting, 10, 0, rate, 0.05))
    missed = made_run(C, 10, 0, 120.0, 0.105, met={"itl": 0, "all": 0})
    assert hopeless([C], {**said({A: 100.0, B: 110.0}, at_32=0.05, at_64=0.05), C: missed}, history) == {}
