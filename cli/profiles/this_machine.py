"""Device and package versions of this machine, as profiles and calibrations store them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from llmsched.engine.device import device_memory
from llmsched.profiles.toml_files import Scalar


def device_table(device: str) -> dict[str, Scalar]:
    """Return a profile's table [device] for this machine. Raises ConfigError for "cuda" if there is no such GPU."""
    memory = device_memory(device)
    return {"kind": memory.kind, "name": memory.name, "cores": os.cpu_count() or 0}


def versions_table() -> dict[str, Scalar]:
    packages = ("llmsched", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
