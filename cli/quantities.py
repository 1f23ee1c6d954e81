"""Parsers of quantities such as "800ms", "24GiB", "8k" and "90%". Each raises LlmschedError for an invalid text."""

from __future__ import annotations

import ipaddress
import math
import re
from contextlib import suppress
from pathlib import Path

from llmsched.engine.errors import LlmschedError

#: Largest number of tokens of a prompt or an answer. A larger number is a typing error and would fill the memory.
MOST_TOKENS = 1 << 24

#: Value of a flag that derives the setting from the model and the memory, and ignores a profile's value.
AUTO = "auto"

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
#: Durations outside this range are typing errors, and charts could not show them.
_SHORTEST_S, _LONGEST_S = 1e-9, 9e8
_BYTES = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_MOST_BYTES = 1 << 60
_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_SWITCH = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_ADDRESS = re.compile(r"(?:\[[\da-fA-F:.]+\]|[\w.-]+):\d+(?:/.*)?")
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


def server_url(text: str) -> str | None:
    """Return the URL of the server at the address `text`, or None for any other text. HOST:PORT is taken as http."""
    scheme, _, rest = text.partition(":")
    is_http = scheme.lower() in ("http", "https") or text.lower().startswith(("http//", "https//"))
    if is_http and rest.startswith("//"):
        return f"{scheme.lower()}:{rest}"
    if is_http or rest.startswith("//"):
        raise LlmschedError(f"{text!r} is not the URL of a server; write http://HOST:PORT or https://HOST:PORT")
    if Path(text).exists():
        return None
    if _ADDRESS.fullmatch(text):
        return f"http://{text}"
    host = text.split("/")[0]
    with suppress(ValueError):
        if host.lower() != "localhost":
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        raise LlmschedError(f"{text!r} is an address without a port; write http://{shown}:PORT")
    return None


def duration(text: str) -> float:
    """Return the seconds of a duration such as "800ms". It must be 0 (with or without a unit) or 1 ns to 250,000 h."""
    number, unit = _split(text, "a duration such as 800ms or 1.5s")
    if not unit and number == 0:
        return 0.0
    if unit not in _SECONDS:
        raise LlmschedError(f"{text!r} needs a unit: us, ms, s, min or h (800ms, 1.5s)")
    if number < 0:
        raise LlmschedError(f"{text!r} is negative; a duration is 0 or more")
    seconds = number * _SECONDS[unit]
    if seconds and not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise LlmschedError(f"{text!r} is out of range; a duration is 0, or 0.001us to 250000h")
    return seconds


def size(text: str) -> int:
    """Return the bytes of a size such as "24GiB" (1024^3 bytes each) or "24GB" (1000^3 bytes each), at least 1 MiB."""
    number, unit = _split(text, "a size such as 24GiB or 512MiB")
    factor = _BYTES.get(unit.lower())
    if number <= 0:
        raise LlmschedError(f"{text!r} is not above zero; write a size such as 24GiB")
    if factor is None and not (not unit and number.is_integer() and number >= 1 << 20):
        raise LlmschedError(f"{text!r} needs a unit: GiB (1024^3 bytes) or GB (1000^3 bytes), likewise K, M, T")
    count = number * (factor or 1)
    if not 1 <= count <= _MOST_BYTES:
        raise LlmschedError(f"{text!r} is out of range; allowed is 1B to {_MOST_BYTES >> 40}TiB")
    return int(count)


def size_or_zero(text: str) -> int:
    """Return the bytes of a size as `size` does, but also accept "0"."""
    return 0 if text == "0" else size(text)


def tokens(text: str) -> int:
    """Return the number of tokens of "8192" or "8k". One k is 1024."""
    number, unit = _split(text, "a number of tokens such as 8192 or 8k")
    count = number * _TOKENS.get(unit.lower(), math.nan)
    if not 1 <= count <= MOST_TOKENS or not count.is_integer():
        raise LlmschedError(
            f"{text!r} is not a whole number of tokens from 1 to {MOST_TOKENS}, such as 8192 or 8k (8 x 1024)"
        )
    return int(count)


def context_length(text: str) -> int | str:
    """Return the number of tokens that the text states, or AUTO if the text is AUTO."""
    return AUTO if text == AUTO else tokens(text)


def fraction(text: str) -> float:
    """Return the share that the text states, such as 0.9 for "0.9" and for "90%"."""
    number, unit = _split(text, "a share such as 0.9 or 90%")
    if unit not in ("", "%"):
        raise LlmschedError(f"{text!r} is not a share such as 0.9 or 90%")
    return number / 100 if unit else number


def switch(text: str) -> bool:
    """Return True for on, true, yes or 1, and False for off, false, no or 0, in upper or lower case."""
    if (value := _SWITCH.get(text.lower())) is None:
        raise LlmschedError(f"{text!r} is neither on nor off")
    return value


def _split(text: str, wanted: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        raise LlmschedError(f"{text!r} is not {wanted}")
    return float(match[1]), match[2]
