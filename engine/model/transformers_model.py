"""Wrapper that runs a transformers model over the paged KV cache, through transformers' attention interface."""
# The forward pass hands the keyword `paged_context` on to this module's attention function, so there is no global state
# and one process can run several engines.

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Sequence as ListLike
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import AttentionInterface, PreTrainedModel

from llmsched.engine.config import ModelImplementation
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.decoder import FusedDecoder
from llmsched.engine.model.latent_attention import latent_weight
from llmsched.engine.model.modules import UnknownStructureError
from llmsched.engine.model.own_attention import own_attention
from llmsched.engine.model.paged_cache import PagedContext, PagedModel
from llmsched.engine.model.probe import check_keywords, probe, set_attention
from llmsched.engine.model.recurrent_layers import LayerState, RecurrentLayers
from llmsched.kernels.dispatch import backend_name, load_backend
from llmsched.kernels.lora import LoraMatrices

IMPLEMENTATION = "llmsched_paged"

logger = logging.getLogger(__name__)


class TransformersModel:
    """Wrapper that runs a transformers model in evaluation mode over the paged KV cache.

    The wrapper replaces the model's attention function. Raises ModelError if the engine cannot compute the model
    exactly.
    """

    implementation: Literal["fused", "transformers"] = "transformers"
    recordable = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._recurrent = RecurrentLayers(model)
        found, self.vocab_size = probe(model, self._recurrent)
        self.calls = list(found.values())
        self.layers = [call.shape for call in self.calls]
        self.attention = [call.attention for call in self.calls]
        self.states: ListLike[LayerState] = self._recurrent.layers
        #: See PagedContext.
        self._numbers = {layer: number for number, layer in enumerate(found)} if self.states else None
        set_attention(model, IMPLEMENTATION, required=bool(found))
        turn_off_checks(model)
        self._model = model
        self._tokens = _Tokens()
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PagedContext, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        selected = {"logits_to_keep": logit_rows} if self._selects_logits and logit_rows is not None else {}
        self._tokens.lora, self._tokens.count = context.lora, len(input_ids)
        context = context if self._numbers is None else replace(context, numbers=self._numbers)
        try:
            with nullcontext() if context.states is None else self._recurrent.computing(context.states):
                output = self._model(
                    input_ids=input_ids[None],
                    position_ids=positions[None],
                    use_cache=False,
                    paged_context=context,
                    **selected,
                )
        finally:
            self._tokens.lora = ()
        logits: torch.Tensor = output.logits[0]
        return logits if self._selects_logits or logit_rows is None else logits[logit_rows]

    def add_adapters(self, adapters: Adapters) -> None:
        """Hook the adapted modules, so that passes of this wrapper add the LoRA products of their tokens' adapters."""
        kernels: Any = load_backend(backend_name(adapters.device.type))
        for module in adapters.by_module:
            matrices = adapters.matrices([module])
            assert matrices is not None
            handle = module.register_forward_hook(partial(_add_lora, kernels, matrices, self._tokens))
            weakref.finalize(self, handle.remove)


@dataclass(slots=True)
class _Tokens:
    """Tokens of the pass that a model computes now."""

    lora: ListLike[Any] = ()  # see PagedContext; also empty between passes
    count: int = 0


def _add_lora(
    kernels: Any,
    matrices: LoraMatrices,
    tokens: _Tokens,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    """Add the LoRA products to the output of a module, in place."""
    if not tokens.lora:
        return
    rows = inputs[0].flatten(0, -2)
    if len(rows) != tokens.count:
        raise ModelError(f"an adapted {type(module).__name__} does not get every token: it cannot be adapted")
    kernels.add_lora(output.view(len(rows), -1), rows, matrices, tokens.lora[0])


def turn_off_checks(model: PreTrainedModel) -> None:
    """Turn off checks in the model that make every pass wait for the device."""
    # They look for padding tokens, and compare positions with the length at which rotary embeddings change, which no
    # request exceeds (see `rotary_limit`).
    modules: list[Any] = list(model.modules())
    for module in modules:
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layer: _constant(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = _constant(kinds)


def _constant(kind: str) -> str:
    return "default" if kind == "longrope" or "dynamic" in kind else kind


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_context: PagedContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention over the paged cache, with the signature of transformers' attention functions.

    The shapes are: query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, Dv], attention sinks s_aux
    [heads]. Returns [1, T, heads, Dv]. Latent attention has latent vectors [1, 1, T, R] as keys and rotary keys [1, 1,
    T, P] as values. Raises ModelError for a mask or an unknown keyword argument.
    """
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passes an attention mask that it made: the model cannot be served")
    check_keywords(module, others)
    index: Any = module.layer_idx
    layer = index if paged_context.numbers is None else paged_context.numbers[index]
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if (weight := latent_weight(module)) is not None:
        latents, rope_keys = packed(key), packed(value)
        return paged_context.attend_latents(layer, packed(query), latents, rope_keys, weight, scaling)[None], None
    output = paged_context.attend(
        layer,
        packed(query),
        packed(key),
        packed(value),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def packed(states: torch.Tensor) -> torch.Tensor:
    """Convert states [1, heads, T, D] to a contiguous tensor [T, heads, D]."""
    return states[0].transpose(0, 1).contiguous()


AttentionInterface.register(IMPLEMENTATION, attention_forward)


def paged_model(
    model: PreTrainedModel, implementation: ModelImplementation = "auto", adapters: Adapters | None = None
) -> PagedModel:
    """Wrap a transformers model in evaluation mode so that it runs over the paged KV cache.

    "fused" makes a FusedDecoder, "transformers" a TransformersModel, and "auto" a FusedDecoder if possible. Raises
    ConfigError if the requested implementation cannot compute the model exactly, and ModelError if none can.
    """
    name, calls = type(model).__name__, own_attention(model)
    plain = None
    if calls is None:
        plain = TransformersModel(model)
        calls = plain.calls
    if implementation == "transformers" or (plain is not None and plain.states):
        if implementation == "fused":
            raise ConfigError("model_impl", f"fused does not know the recurrent layers of {name}; use auto")
        if plain is None:
            raise ConfigError("model_impl", f"{name} does not use transformers' attention interface; use auto or fused")
        return _adapted(plain, adapters)
    try:
        return FusedDecoder(model, calls, plain, adapters)
    except UnknownStructureError as reason:
        if implementation == "fused":
            raise ConfigError(
                "model_impl", f"fused does not know {name}: {reason}; use auto or transformers"
            ) from reason
        if plain is None:
            raise ModelError(f"{name} cannot be served: {reason}") from reason
        logger.info("%s runs through transformers: %s", name, reason)
        return _adapted(plain, adapters)


def _adapted(model: TransformersModel, adapters: Adapters | None) -> TransformersModel:
    if adapters is not None:
        model.add_adapters(adapters)
    return model
