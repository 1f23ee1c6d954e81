"""Plans of one model for any settings and any device: what kv-budget asks again and again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmsched.engine.architecture.dtypes import DTYPE_BYTES, planned_dtype, planned_kv_dtype
from llmsched.engine.architecture.fields import ConfigCache, read_config_file
from llmsched.engine.architecture.quantization import quantised_config
from llmsched.engine.architecture.shape import ModelShape, model_shape
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ModelError
from llmsched.engine.memory.budget import plan_memory
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.model.demo import cache_directory
from llmsched.engine.model.source import fetch_config, locate
from llmsched.engine.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class ModelPlanner:
    """A model by the content of its config.json, and by its weights: `given`, of files in `directory`, or counted.

    `cache` keeps, for the next planner of the same content, what takes long to find out.
    """

    content: Mapping[str, Any]
    directory: Path | None = None
    given: Weights | None = None
    cache: ConfigCache | None = None
    _shapes: dict[int, ModelShape] = field(default_factory=dict, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Stands for the content of config.json: equal for models of the same shape."""
        text = json.dumps(self.content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def plan(self, config: EngineConfig, device: DeviceMemory) -> MemoryPlan:
        """The plan for these settings on this device, with its `problem` if it does not fit.

        Raises ConfigError for a max_model_len beyond the model's positions, ModelError for a model without attention.
        """
        return plan_memory(
            self.shape(config, device),
            config,
            device,
            dtype_bytes=DTYPE_BYTES[self.dtype(config, device)],
            kv_dtype_bytes=DTYPE_BYTES[self.kv_dtype(config, device)],
        )

    def shape(self, config: EngineConfig, device: DeviceMemory) -> ModelShape:
        """The model in the type that these settings mean. Raises ModelError when its config does not say enough."""
        dtype_bytes = DTYPE_BYTES[self.dtype(config, device)]
        if dtype_bytes not in self._shapes:
            self._shapes[dtype_bytes] = model_shape(
                self.content, dtype_bytes=dtype_bytes, path=self.directory, weights=self.given, cache=self.cache
            )
        return self._shapes[dtype_bytes]

    def dtype(self, config: EngineConfig, device: DeviceMemory) -> str:
        """The type of weights and activations."""
        return planned_dtype(config, computes_bf16=device.computes_bf16)

    def kv_dtype(self, config: EngineConfig, device: DeviceMemory) -> str:
        """The type of KV."""
        dtype = self.dtype(config, device)
        return planned_kv_dtype(config, dtype, checkpoint_fp8=self.shape(config, device).fp8_kv)


def model_name(spec: str) -> str:
    """What a model is called that is not loaded: the name of its directory or file, or the hub id."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return path.resolve().name
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".json", ".gguf") else spec


def open_planner(
    spec: str, progress: Progress = silent, weights: Weights | None = None, quantization: str | None = None
) -> ModelPlanner:
    """The model that `spec` means: a directory, a config.json, a .gguf file, demo, or a hub id, of which only
    config.json is fetched. `weights` are taken as given. With `quantization` it is a checkpoint of the same model in
    one of QUANTIZATIONS, whatever files there are. Raises ModelError, and ConfigError for a form that it cannot have.
    """
    content, directory = _read_model(spec, progress)
    if quantization is not None:
        content, directory = quantised_config(content, quantization), None
    return ModelPlanner(content, directory, weights, ConfigCache(content, cache_directory() / "configs"))


def _read_model(spec: str, progress: Progress) -> tuple[Mapping[str, Any], Path | None]:
    """What config.json says, and the directory in which weights may lie."""
    path = Path(os.path.expanduser(spec))
    if path.suffix == ".json" or path.is_dir():
        return read_config_file(path), path if path.is_dir() else None
    if path.suffix == ".gguf":
        from llmsched.engine.model.gguf_config import gguf_settings
        from llmsched.engine.model.gguf_file import read_gguf

        return gguf_settings(read_gguf(locate(spec).path)), None
    if path.exists():
        raise ModelError(f"model {spec}: is neither a directory, a config.json nor a .gguf file")
    directory = locate(spec, progress).path if spec == "demo" else fetch_config(spec, progress).parent
    return read_config_file(directory), directory
