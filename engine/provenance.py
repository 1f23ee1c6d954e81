"""Origin of a report's figures: measured or simulated, and the accuracy of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of figures. The fields after `measured` describe a simulation."""

    where: str  # "in process", a URL, or the simulated device
    measured: bool = True
    calibration_error: float | None = None  # median relative error of step times that `llmsched calibrate` fitted
    #: Median relative error of a roofline model's TPOT against published measurements.
    published_error: float | None = None
    refused_by_serve: str | None = None  # why `serve` would refuse the model; None if it would not
    calibrated: datetime | None = None  # time of the calibration

    @property
    def label(self) -> str:
        """First word of every report: MEASURED or SIMULATED."""
        return "MEASURED" if self.measured else "SIMULATED"

    def as_json(self) -> dict[str, Any]:
        names = ("measured", "calibration_error", "published_error", "refused_by_serve", "where")
        return {name: getattr(self, name) for name in names}

    def caveats(self) -> list[str]:
        """Return a sentence about the accuracy of simulated step times, or no sentence for measured figures."""
        if self.measured:
            return []
        if self.calibration_error is not None:
            when = "" if self.calibrated is None else f" on {self.calibrated:%Y-%m-%d}"
            return [
                f"step times: fitted to this device{when}; median error {self.calibration_error:.1%} on steps left out "
                "of the fit"
            ]
        if self.published_error is not None:
            return [f"step times: roofline model; median error {self.published_error:.0%} against published TPOT"]
        return ["step times: roofline model, not validated against measurements on such a GPU"]
