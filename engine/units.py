"""Byte counts and times as text. Byte counts are in binary units only, so that GiB and GB are never mixed."""

from __future__ import annotations


def human_bytes(count: int | float) -> str:
    """Return a byte count as text, such as 512 B, 1.50 KiB or 23.4 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{three_figures(value)} {unit}"
        value /= 1024
    return f"{three_figures(value)} TiB"


def human_seconds(seconds: float) -> str:
    """Return a time as text, such as 12.3 ms or 1.50 s."""
    if seconds < 1:
        return f"{three_figures(seconds * 1e3)} ms"
    return f"{three_figures(seconds)} s"


def three_figures(value: float) -> str:
    """Return a number as text, with two decimals below 10, one below 100, else no decimals: 1.50, 23.4, 1,024."""
    size = abs(value)
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:,.0f}"
