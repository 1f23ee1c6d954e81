"""A tuned profile as settings of an engine: what it sets, what it was found for, what its memory turned out to be."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from llmsched.cli.options import EngineOptions
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.draft import model_name
from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.reconcile import ratios
from llmsched.profiles.tuned import ProfileError, Scalar, TunedProfile, load_profile, store_memory


def with_profile(options: EngineOptions, name_or_path: str | None) -> EngineOptions:
    """The flags, with the profile's settings for those that were left out. Raises ConfigError as `profile_settings`."""
    if name_or_path is None:
        return options
    settings = profile_settings(name_or_path)
    kept = {name: value for name, value in settings.items() if name not in options.automatic}
    return EngineOptions({**kept, **options.given}, options.automatic)


def profile_settings(name_or_path: str) -> dict[str, Any]:
    """Fields of EngineConfig that the profile sets. Raises ConfigError when it cannot be read or sets anything else."""
    profile = _load(name_or_path)
    known, types = {f.name for f in fields(EngineConfig)} - {"model"}, get_type_hints(EngineConfig)
    for name, value in profile.engine.items():
        if name not in known:
            raise ConfigError("--profile", f"{name_or_path} sets {name!r}, which is no setting of the engine")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ConfigError("--profile", f"{name_or_path} sets {name} to {value!r}: {reason}") from error
    return dict(profile.engine)


def found_for_others(name_or_path: str, config: EngineConfig) -> list[str]:
    """Warnings where the profile was found for another model or device than those of `config`, or by simulation.

    What the profile does not say is taken to be the same. Raises ConfigError when it cannot be read.
    """
    profile, device = _load(name_or_path), device_table(config.device)
    pairs = [
        ("model", profile.model.get("name"), model_name(config.model)),
        ("device", profile.device.get("name"), device["name"]),
        ("number of cores", profile.device.get("cores") if device["kind"] == "cpu" else None, device["cores"]),
    ]
    found = [
        f"profile {name_or_path} was found for another {what}: {was}, and this is {now}; `llmsched tune` finds one"
        for what, was, now in pairs
        if was is not None and was != now
    ]
    return [*found, *([] if profile.measured else [f"profile {name_or_path} was simulated, not measured"])]


def device_table(device: str) -> dict[str, Scalar]:
    """This machine's device of a kind ("auto", "cpu" or "cuda"), as profiles name it. Raises ConfigError."""
    memory = device_memory(device)
    return {"kind": memory.kind, "name": memory.name, "cores": os.cpu_count() or 0}


def store_ratios(name_or_path: str, plan: MemoryPlan) -> str | None:
    """Write actual / predicted memory into the profile. Returns why that cannot be done, None if it was."""
    try:
        store_memory(ratios(plan), name_or_path)
    except ProfileError as error:
        return str(error)
    return None


def _load(name_or_path: str) -> TunedProfile:
    try:
        return load_profile(name_or_path)
    except ProfileError as error:
        raise ConfigError("--profile", str(error)) from error
