"""Search for the tuned profile that suits a model and a device."""

from __future__ import annotations

from collections.abc import Mapping

from llmsched.profiles.gpus import gpus
from llmsched.profiles.toml_files import ProfileError, Scalar
from llmsched.profiles.tuned import list_profiles, load_profile


def same_model(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> bool:
    """Return True if two [model] tables have the same digest, or the same name if one of them has no digest."""
    key = "digest" if "digest" in one and "digest" in other else "name"
    return one.get(key) == other.get(key)


def device_changes(before: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> list[tuple[str, Scalar, Scalar]]:
    """Compare two [device] tables. Return (property in words, value before, value now) for each difference."""
    # A property that one of the tables lacks counts as equal. The number of cores matters only for a CPU.
    words = {"name": "device", **({"cores": "number of cores"} if now.get("kind") == "cpu" else {})}
    both = [(text, before[key], now[key]) for key, text in words.items() if key in before and key in now]
    return [(text, was, is_now) for text, was, is_now in both if not _same_gpu(str(was), str(is_now))]


def latest_profile(model: Mapping[str, Scalar], device: Mapping[str, Scalar]) -> str | None:
    """Return the name of the newest valid profile for this model and device, or None."""
    found: dict[str, float] = {}
    for name in list_profiles():
        try:
            profile = load_profile(name)
        except ProfileError:
            continue
        if same_model(profile.model, model) and not device_changes(profile.device, device):
            found[name] = profile.created.timestamp()
    return max(found, key=lambda name: found[name], default=None)


def _same_gpu(one: str, other: str) -> bool:
    """Return True if two device names are equal, or are the product name and the driver name of the same GPU."""
    return one == other or any({one, other} == {spec.name, spec.driver_name} for spec in gpus().values())
