"""Opening a model: what is known of it before its weights are read, and reading them then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmsched.engine.config import EngineConfig
from llmsched.engine.model.info import ModelInfo
from llmsched.engine.model.load import ModelSource, load_config, load_info, load_model, load_tokenizer, locate
from llmsched.engine.model.placement import resolve_device, resolve_dtype
from llmsched.engine.progress import Progress, silent

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from llmsched.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model without its weights, and the device and type that they will have."""

    source: ModelSource
    config: PretrainedConfig
    tokenizer: Tokenizer
    info: ModelInfo
    device: str
    dtype: torch.dtype

    def load(self, progress: Progress = silent) -> PreTrainedModel:
        """The model with its weights, in evaluation mode on its device. Raises ModelError."""
        return load_model(
            self.source,
            self.config,
            device=self.device,
            dtype=self.dtype,
            attn_implementation="eager",
            progress=progress,
        )


def open_model(config: EngineConfig, progress: Progress = silent) -> OpenModel:
    """Find `config.model` and read all but its weights. Raises ModelError, ConfigError."""
    source = locate(config.model, progress)
    model_config = load_config(source)
    tokenizer = load_tokenizer(source)
    info = load_info(source, model_config, tokenizer)
    device = resolve_device(config.device)
    return OpenModel(source, model_config, tokenizer, info, device, resolve_dtype(config.dtype, device))
