"""What is tuned: a model on a device, as profiles name them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from llmsched.cli.profiles.apply import device_table
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.memory.plan import ratios
from llmsched.engine.memory.planner import ModelPlanner, model_name
from llmsched.engine.provenance import Provenance
from llmsched.profiles.toml_files import Scalar

if TYPE_CHECKING:
    from llmsched.engine.core import Engine


@dataclass(frozen=True, slots=True)
class Subject:
    """`name` is the model as it was called on the command line, `model` and `device` are as a profile has them.

    `memory` are actual / predicted bytes.
    """

    name: str
    model: Mapping[str, str]
    device: Mapping[str, Scalar]
    memory: Mapping[str, Scalar]
    provenance: Provenance = Provenance("in process")


def subject_of(name: str, planner: ModelPlanner, engine: Engine) -> Subject:
    """The model and device of an engine."""
    return Subject(
        name,
        model={"name": engine.model.name, "architecture": engine.model.architecture, "digest": planner.digest},
        device=device_table(engine.config.device),
        memory={} if engine.plan is None else ratios(engine.plan),
    )


def simulated_subject(name: str, planner: ModelPlanner, blueprint: Blueprint) -> Subject:
    """A model on a device that is simulated."""
    device = blueprint.plan.device
    here = device_table(device.kind) if blueprint.provenance.calibration_error is not None else {}
    return Subject(
        name,
        model={
            "name": model_name(name),
            "architecture": str((planner.content.get("architectures") or [""])[0]),
            "digest": planner.digest,
        },
        device=here or {"kind": device.kind, "name": device.name},
        memory={},
        provenance=blueprint.provenance,
    )


def versions_table() -> dict[str, Scalar]:
    """Versions of what a figure depends on."""
    packages = ("llmsched", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
