from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.load import Load
from llmsched.engine.goodput import Slo
from llmsched.engine.provenance import Provenance


@dataclass(frozen=True, slots=True)
class Experiment:
    """Setup of a run: target, load, SLOs and warm-up."""

    name: str
    provenance: Provenance
    workload: Load
    slo: Slo
    warmup: int = 0  # number of warm-up requests
    engine: Mapping[str, Any] = field(default_factory=dict)  # settings, as far as known

    def headline(self) -> str:
        work, origin = self.workload, self.provenance
        return (
            f"{origin.label} {self.name} ({origin.where}): {work.describe_requests()}, {work.describe()}, "
            f"seed {work.seed}" + (f", prompt seed {work.prompt_seed}" if work.prompt_seed else "")
        )


class MeasuredRun(NamedTuple):
    experiment: Experiment
    figures: Measurement
