"""A tuned profile as settings of an engine: what it sets, what it was found for, what its memory turned out to be."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from llmsched.cli.options.engine import EngineOptions
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.plan import MemoryPlan, ratios
from llmsched.engine.memory.planner import model_name, open_planner
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.gpus import find_gpu, same_gpu
from llmsched.profiles.toml_files import ProfileError, Scalar, UnknownNameError
from llmsched.profiles.tuned import TunedProfile, load_profile, same_model, store_memory


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
            raise ConfigError("profile", f"{name_or_path} sets {name!r}, which is no setting of the engine")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ConfigError("profile", f"{name_or_path} sets {name} to {value!r}: {reason}") from error
    return dict(profile.engine)


def found_for_others(name_or_path: str, config: EngineConfig, simulate: str | None = None) -> list[str]:
    """Warnings where the profile was found for another model or device than those of `config`, or by simulation.

    `simulate` is the device that is simulated, as `--simulate` takes it, None if it is this machine's. What the profile
    does not say is taken to be the same. Raises ConfigError when it cannot be read, ModelError without such a model.
    """
    profile = _load(name_or_path)
    found = [
        f"profile {name_or_path} was found for another {what}: {was}, and this is {now}; `llmsched tune` finds one"
        for what, was, now in (*_other_model(profile, config.model), *_other_device(profile, config.device, simulate))
    ]
    if not profile.measured and simulate is None:
        found.append(f"profile {name_or_path} was simulated, not measured")
    return found


def _other_model(profile: TunedProfile, model: str) -> list[tuple[str, Scalar, Scalar]]:
    was, now = profile.model.get("name"), {"name": model_name(model)}
    if was is None:
        return []
    if "digest" in profile.model:
        now["digest"] = open_planner(model).digest
    if same_model(profile.model, now):
        return []
    return [("model" if was != now["name"] else "model of this name", was, now["name"])]


def _other_device(profile: TunedProfile, device: str, simulate: str | None) -> list[tuple[str, Scalar, Scalar]]:
    was, now = profile.device, device_table(device) if simulate in (None, LOCAL) else _gpu_table(str(simulate))
    found = []
    if "name" in was and now and not same_gpu(str(was["name"]), str(now["name"])):
        found.append(("device", was["name"], now["name"]))
    if "cores" in was and now.get("kind") == "cpu" and was["cores"] != now["cores"]:
        found.append(("number of cores", was["cores"], now["cores"]))
    return found


def _gpu_table(simulate: str) -> dict[str, Scalar]:
    """A simulated GPU as profiles name it; empty for one that is not known, which is refused elsewhere."""
    try:
        return {"kind": "cuda", "name": find_gpu(simulate.partition(":")[0]).name}
    except UnknownNameError:
        return {}


def device_table(device: str) -> dict[str, Scalar]:
    """This machine's device of a kind ("auto", "cpu" or "cuda"), as profiles name it. Raises ConfigError."""
    memory = device_memory(device)
    return {"kind": memory.kind, "name": memory.name, "cores": os.cpu_count() or 0}


def store_ratios(name_or_path: str, plan: MemoryPlan, config: EngineConfig) -> str | None:
    """Write actual / predicted memory into the profile, unless it was found for another model or device than those of
    `config`. Returns why that cannot be done, None if it can.
    """
    try:
        profile = load_profile(name_or_path)
        if not _other_model(profile, config.model) and not _other_device(profile, config.device, None):
            store_memory(ratios(plan), name_or_path)
    except ProfileError as error:
        return str(error)
    return None


def _load(name_or_path: str) -> TunedProfile:
    try:
        return load_profile(name_or_path)
    except ProfileError as error:
        raise ConfigError("profile", str(error)) from error
