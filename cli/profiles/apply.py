from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from llmsched.cli.options.config_flags import EngineOptions
from llmsched.cli.profiles.this_machine import device_table
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.plan import MemoryPlan, ratios
from llmsched.engine.memory.planner import model_name, open_planner
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.gpus import find_gpu
from llmsched.profiles.toml_files import ProfileError, Scalar, UnknownNameError
from llmsched.profiles.tuned import TunedProfile, load_profile, store_memory
from llmsched.profiles.tuned_match import device_changes, same_model


def with_profile(options: EngineOptions, name_or_path: str | None) -> EngineOptions:
    """Return the options, completed with the settings of a profile. Raises ConfigError for a bad profile."""
    if name_or_path is None:
        return options
    settings = profile_settings(name_or_path)
    kept = {name: value for name, value in settings.items() if name not in options.automatic}
    return EngineOptions({**kept, **options.given}, options.automatic)


def profile_settings(name_or_path: str) -> dict[str, Any]:
    """Return the fields of EngineConfig that a profile sets. Raises ConfigError for a bad profile."""
    profile = _load(name_or_path)
    known, types = {f.name for f in fields(EngineConfig)} - {"model"}, get_type_hints(EngineConfig)
    for name, value in profile.engine.items():
        if name not in known:
            raise ConfigError("profile", f"{name_or_path} sets {name!r}, which is not an engine setting")
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise ConfigError("profile", f"{name_or_path} sets {name} to {value!r}: {reason}") from error
    return dict(profile.engine)


def profile_warnings(name_or_path: str, config: EngineConfig, simulate: str | None = None) -> list[str]:
    """Return warnings if the profile was tuned for another model or device, or in a simulation.

    `config` has the model and device to be used, and `simulate` the value of `--simulate`. Raises ConfigError or
    ModelError if the profile or the model cannot be read.
    """
    profile = _load(name_or_path)
    found = [
        f"profile {name_or_path} was tuned for another {what}: {was}, not {now}; run `llmsched tune` for this one"
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
    if simulate is None or simulate == LOCAL:
        now = device_table(device)
    else:
        try:
            now = {"kind": "cuda", "name": find_gpu(simulate.partition(":")[0]).name}
        except UnknownNameError:  # make_blueprint reports it
            now = {}
    return device_changes(profile.device, now)


def store_ratios(name_or_path: str, plan: MemoryPlan, config: EngineConfig) -> str | None:
    """Write the ratios of actual to predicted memory into a profile, if it was tuned for the same model and device.

    Return None, or the reason why the file cannot be read or written.
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
