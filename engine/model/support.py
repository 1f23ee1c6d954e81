"""Which architectures are served, and why others are not. Checked on the configuration, before weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmsched.engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_supported(config: PretrainedConfig, spec: str) -> None:
    """Raise ModelError unless the model can be served."""
    if not config.architectures:
        raise ModelError(f"model {spec}: config.json names no architecture")
