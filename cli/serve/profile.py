"""Settings of a tuned profile as defaults for the engine's, and what its memory turned out to be."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.reconcile import ratios
from llmsched.profiles.tuned import ProfileError, load_profile, store_memory


def profile_settings(name_or_path: str) -> dict[str, Any]:
    """Fields of EngineConfig that the profile sets. Raises ConfigError when it cannot be read or sets anything else."""
    try:
        profile = load_profile(name_or_path)
    except ProfileError as error:
        raise ConfigError("profile", str(error)) from error
    known, types = {f.name for f in fields(EngineConfig)} - {"model"}, get_type_hints(EngineConfig)
    for name, value in profile.engine.items():
        if name not in known:
            raise ConfigError("profile", f"{name_or_path} sets {name!r}, which is no setting of the engine")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ConfigError("profile", f"{name_or_path} sets {name} to {value!r}: {reason}") from error
    return dict(profile.engine)


def store_ratios(name_or_path: str, plan: MemoryPlan) -> str | None:
    """Write actual / predicted memory into the profile. Returns why that cannot be done, None if it was."""
    try:
        store_memory(ratios(plan), name_or_path)
    except ProfileError as error:
        return str(error)
    return None
