"""Timestamps of traces: their unit, and their conversion to seconds after the first request.

If `--timestamp-unit` is given, timestamps that are numbers are in this unit. Otherwise they are in the format's unit,
unless they look like Unix timestamps (2001 to 2099) in another unit. If the other unit is finer, they are in that unit.
If it is coarser, the trace is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from llmsched.cli.load.traces.rows import Row, TraceError, shown
from llmsched.engine.errors import setting

TimestampUnit = Literal["s", "ms", "us", "ns"]

#: Units per second.
UNITS: dict[TimestampUnit, float] = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}

#: Numbers between these, as seconds since 1970, look like Unix timestamps: 2001-09-09 to 2099-12-03.
_EPOCH = (1e9, 4.1e9)


@dataclass(frozen=True, slots=True)
class Timestamp:
    """Timestamp of a record: the number in the file or, for a date (by default in UTC), the microseconds since 1970."""

    value: float
    is_date: bool = False


def read_timestamp(row: Row, name: str) -> Timestamp:
    """Return the timestamp in the field `name`. Raises TraceError unless it is a number of 0 or more, or a date."""
    value = row.values.get(name)
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    stamp = Timestamp(math.nan)
    try:
        stamp = Timestamp(float(text))
    except ValueError:
        with suppress(ValueError):
            moment = datetime.fromisoformat(text)
            since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
            stamp = Timestamp(float(since // timedelta(microseconds=1)), is_date=True)
    if not 0 <= stamp.value < math.inf:
        raise row.wrong(f"{name} is {shown(value)}; allowed is a time: a number of 0 or more, or ISO 8601")
    return stamp


def offsets(stamps: Sequence[Timestamp], unit: TimestampUnit | None, stated: TimestampUnit, where: str) -> list[float]:
    """Return the seconds from the earliest timestamp to each.

    `unit` is the user's choice, `stated` the format's unit. `where` names the file in errors. Raises TraceError if
    dates and numbers are mixed, if a unit is given for dates, or if the unit is ambiguous.
    """
    values = [stamp.value for stamp in stamps]
    dates = sum(stamp.is_date for stamp in stamps)
    if 0 < dates < len(stamps):
        raise TraceError(f"{where}: {dates} of {len(stamps)} timestamps are dates, the others numbers")
    if dates and unit is not None:
        raise TraceError(f"{where}: {setting('timestamp_unit')} {unit} is given, but the timestamps are dates")
    low, high = min(values), max(values)
    # The unit in which the numbers are Unix timestamps, else the stated unit.
    seen = next((u for u, n in UNITS.items() if _EPOCH[0] <= low / n and high / n <= _EPOCH[1]), stated)
    if unit is None and not dates and UNITS[seen] < UNITS[stated]:
        raise TraceError(
            f"{where}: timestamps from {low:.15g} to {high:.15g} are in {stated} in this format, but look like {seen} "
            f"since 1970; give {setting('timestamp_unit')} s, ms, us or ns"
        )
    per_second = UNITS["us" if dates else unit or seen]
    return [(value - low) / per_second for value in values]
