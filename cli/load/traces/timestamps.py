"""Timestamps of traces: their unit, and their conversion to seconds after the first request.

The first of these rules that applies decides the unit of timestamps that are numbers:

1. The unit is given (`--timestamp-unit`).
2. The field's name ends in a unit.
3. In one of the units, all numbers are Unix timestamps from 2001 to 2099.
4. The format has a usual unit. If it makes the mean gap between requests implausible, and not all files of the format
   have the same unit, the unit that makes the gap plausible and closest to 1 s is taken instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from llmsched.cli.load.traces.file_rows import Row, TraceError, shown
from llmsched.engine.errors import setting

TimestampUnit = Literal["s", "ms", "us", "ns"]

#: Units per second.
UNITS: dict[TimestampUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

#: Numbers between these, as seconds since 1970, look like Unix timestamps: 2001-09-09 to 2099-12-03.
_EPOCH = (1e9, 4.1e9)

#: Plausible mean gaps between requests in seconds: of fractions, which milliseconds seldom have, and of whole numbers.
_GAPS, _WHOLE_GAPS = (0.01, 300.0), (0.001, 300.0)


@dataclass(frozen=True, slots=True)
class Timestamp:
    value: float  # as in the file or, for a date, microseconds since 1970
    is_date: bool = False
    unit: TimestampUnit | None = None  # unit in which the field's name ends, as in timestamp_ms


def read_timestamp(row: Row, name: str) -> Timestamp:
    """Return the timestamp in the field `name`, which must be a date or a number of 0 or more. Raises TraceError."""
    value = row.values.get(name)
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    stamp = Timestamp(math.nan)
    unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), None)
    try:
        stamp = Timestamp(float(text), unit=unit)
    except ValueError:
        with suppress(ValueError):
            moment = datetime.fromisoformat(text)
            since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
            stamp = Timestamp(float(since // timedelta(microseconds=1)), is_date=True)
    if not 0 <= stamp.value < math.inf:
        raise row.wrong(f"{name} is {shown(value)}; allowed is a time: a number of 0 or more, or ISO 8601")
    return stamp


def offsets(
    stamps: Sequence[Timestamp], unit: TimestampUnit | None, stated: TimestampUnit, fixed: bool, where: str
) -> tuple[list[float], str | None]:
    """Return the seconds from the earliest timestamp to each, and a note that names the unit unless the user chose it.

    `unit` is the user's choice, `stated` the format's unit, and `fixed` is True if all files of the format have that
    unit. `where` names the file in errors. Raises TraceError for a mix of dates and numbers.
    """
    values = [stamp.value for stamp in stamps]
    dates = sum(stamp.is_date for stamp in stamps)
    if 0 < dates < len(stamps):
        raise TraceError(f"{where}: {dates} of {len(stamps)} timestamps are dates, the others numbers")
    if dates and unit is not None:
        raise TraceError(f"{where}: {setting('timestamp_unit')} {unit} is given, but the timestamps are dates")
    taken = "us" if dates else unit or stamps[0].unit or _likely_unit(values, stated, fixed)
    note = None if dates or unit else f"timestamps in {taken}"
    if note and taken != (stamps[0].unit or stated):
        note += f", as their size shows (--timestamp-unit {stated} overrides)"
    low = min(values)
    return [(value - low) / UNITS[taken] for value in values], note


def _likely_unit(values: Sequence[float], stated: TimestampUnit, fixed: bool) -> TimestampUnit:
    """Return the likeliest unit of the timestamps `values`, by rules 3 and 4 at the top of this file."""
    low, high = min(values), max(values)
    for unit, per_second in UNITS.items():
        if _EPOCH[0] <= low / per_second and high / per_second <= _EPOCH[1]:
            return unit
    gap = (high - low) / max(1, len(values) - 1)
    least, most = _WHOLE_GAPS if all(value.is_integer() for value in values) else _GAPS
    if fixed or gap == 0 or least <= gap / UNITS[stated] <= most:
        return stated
    likely: list[TimestampUnit] = [u for u, n in UNITS.items() if least <= gap / n <= most]
    return min(likely, key=lambda u: abs(math.log(gap / UNITS[u])), default=stated)
