"""Probe of a transformers model: how its layers call attention, and whether the engine can compute the model."""
# The probe replaces attention with a function that records its arguments and returns zeros, and runs two tiny forward
# passes. It checks three things:
#
# - Every layer calls attention exactly once. The probe records the number of KV heads and their widths.
# - The mask is causal and has the same sliding window that attention is given. transformers makes masks from a function
#   of (query, key) positions, so the probe calls this function for positions that are far apart.
# - Tokens do not influence each other outside attention and known recurrent layers. While these return zeros, a change
#   of earlier tokens must not change the last token's logits.
#
# It also finds the layers whose queries do not depend on positions, and those that attend to another layer's KV.

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from llmsched.engine.errors import ModelError
from llmsched.engine.model.latent_attention import keep_latents, latent_weight
from llmsched.engine.model.paged_cache import LayerShape
from llmsched.engine.model.recurrent_layers import RecurrentLayers
from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.reference import AttentionShape

IMPLEMENTATION = "llmsched_probe"

#: Keywords that models pass to attention, but that do not change its result.
NEUTRAL_KEYWORDS = frozenset(
    {"position_ids", "cache", "past_key_values", "cache_position", "use_cache", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"}
)

#: Query positions at which masks are checked: the first few, and some near powers of two, where chunks may end.
TRIED_POSITIONS = (0, 1, 2, 3, 1023, (1 << 20) - 1, 1 << 20, (1 << 20) + 777)
#: Number of tokens in a pass. With so many, attention over compressed or selected keys has fewer keys than queries.
NUM_TOKENS = 33
#: Difference of the positions in the two passes, if the model has rotary embeddings.
SHIFT = 7
#: Largest difference of numbers that count as equal, relative to the largest of them.
TOLERANCE = 1e-2
#: Values of window_of for a causal mask without a window, and for any other mask.
FULL, UNKNOWN = 0, -1


class AttentionCall(NamedTuple):
    """Shape and options of one layer's attention."""

    shape: LayerShape
    scale: float  # factor of the scores
    softcap: float | None
    sinks: torch.Tensor | None  # see `paged_attention`
    heads: int  # of the query
    item_size: int  # bytes of an element of the query
    slopes: torch.Tensor | None = None
    rotates: bool = True  # False if the layer has no rotary embedding
    latent: LatentWidths | None = None  # of latent attention

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, *self.shape[:4], self.item_size, self.latent)


class Recording(NamedTuple):
    """Calls of attention in one pass, by layer, with the last token's queries and with all keys."""

    calls: dict[int, AttentionCall]
    queries: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]


def probe(model: PreTrainedModel, recurrent: RecurrentLayers) -> tuple[dict[int, AttentionCall], int]:
    """Return the AttentionCall of each layer with attention, in order, and the width of the logits.

    The probe records the states of `recurrent`, the model's recurrent layers. If there are none, each layer must have
    attention. The probe replaces the model's attention function, so the caller must set another one afterwards. Raises
    ModelError if the engine cannot compute the model exactly.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    extra = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not extra or ("position_ids" not in parameters and not recurrent):
        raise ModelError(f"{name} takes no position_ids or no extra keywords, so it cannot compute a packed batch")
    keep_latents(model)
    set_attention(model, IMPLEMENTATION, required=not recurrent)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, NUM_TOKENS + 1, device=model.device)
    other_tokens = torch.cat([tokens[:-1] + NUM_TOKENS, tokens[-1:]])
    rotary = any("rotary" in name for name, _ in model.named_modules())
    with recurrent.silenced():
        first, logits = silenced_pass(model, tokens % vocab_size)
    with recurrent.silenced():
        other, other_logits = silenced_pass(model, other_tokens % vocab_size, SHIFT if rotary else 0)
    layers = first.calls
    num_layers = model.config.get_text_config().num_hidden_layers
    if not recurrent and (unlike := set(range(num_layers)) ^ set(layers)):
        raise ModelError(
            f"{name}: of {num_layers} layers, {len(layers)} use transformers' attention interface; "
            f"layer {min(unlike)} does not match, so the model cannot be served"
        )
    if not _are_close(logits, other_logits):
        raise ModelError(f"{name} mixes tokens outside attention and known recurrent layers: it cannot be served")
    turned = {layer: not rotary or not _are_close(first.queries[layer], other.queries[layer]) for layer in layers}
    return {layer: layers[layer]._replace(rotates=turned[layer]) for layer in sorted(layers)}, logits.shape[0]


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE * float(one.abs().max()), equal_nan=True)


def silenced_pass(model: PreTrainedModel, token_ids: torch.Tensor, start: int = 0) -> tuple[Recording, torch.Tensor]:
    """Run the model with attention that returns zeros. Return the recording, and the last token's logits.

    `start` is the position of the first token.
    """
    recording = Recording({}, {}, {})
    with torch.inference_mode():
        output = model(
            input_ids=token_ids[None],
            position_ids=torch.arange(start, start + len(token_ids), device=model.device)[None],
            use_cache=False,
            paged_context=recording,
        )
    return recording, output.logits[0, -1].float()


def set_attention(model: PreTrainedModel, implementation: str, *, required: bool = True) -> None:
    """Set the attention function of `model`.

    Raises ModelError if the attention interface of transformers is `required` and the model lacks it.
    """
    if required or model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)
    if required and model.config._attn_implementation != implementation:
        raise ModelError(f"{type(model).__name__} does not use transformers' attention interface: it cannot be served")


def recording_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_context: Recording | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Record the layer's call in `paged_context`, and return zeros [1, T, heads, Dv].

    Raises ModelError for attention that the engine does not support.
    """
    layer: Any = module.layer_idx
    name = f"{type(module).__name__} of layer {layer}"
    if paged_context is None:
        raise ModelError(f"{name} does not receive the keywords passed to the model: the model cannot be served")
    if layer in paged_context.calls:
        raise ModelError(f"{name} computes attention twice in one pass: the model cannot be served")
    if key.shape[2] != query.shape[2]:
        raise ModelError(f"{name} attends to keys that are not tokens of its input: the model cannot be served")
    check_keywords(module, keywords)
    if attention_mask is not None:
        window = int(attention_mask.flatten()[0]) if attention_mask.dtype == torch.int64 else UNKNOWN
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", None) or TRIED_POSITIONS[-1]
        window = FULL if window >= longest else window  # it never limits what a token sees (Phi-3.5-MoE)
        fits = sliding_window is not None and sliding_window <= min(TRIED_POSITIONS[-1], longest - 1)
        given_window = sliding_window if fits else FULL
        if window == UNKNOWN:
            raise ModelError(
                f"{name} has a mask that is neither causal nor a sliding window: the model cannot be served"
            )
        if window != given_window:
            raise ModelError(
                f"{name} gets a sliding window of {given_window or 'no'} tokens but its mask has {window or 'none'}: "
                "the model cannot be served"
            )
    source = next((other for other, keys in paged_context.keys.items() if keys.data_ptr() == key.data_ptr()), None)
    shape, width = LayerShape(key.shape[1], key.shape[3], value.shape[3], sliding_window, source), value.shape[3]
    scale, latent = query.shape[3] ** -0.5 if scaling is None else scaling, None
    if (weight := latent_weight(module)) is not None:
        if sliding_window is not None or softcap is not None or s_aux is not None:
            raise ModelError(f"{name} is latent attention with a window, soft-capping or sinks: it cannot be served")
        latent = LatentWidths.of(query[0].transpose(0, 1), key, value, weight)
        width = latent.value
    paged_context.keys[layer], paged_context.queries[layer] = key, query[0, :, -1].float()
    paged_context.calls[layer] = AttentionCall(
        shape, scale, softcap, s_aux, query.shape[1], query.element_size(), latent=latent
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], width), None


def check_keywords(module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """Raise ModelError if one of the keyword arguments of attention may change its result."""
    for keyword, given in keywords.items():
        harmless = given is None or keyword in NEUTRAL_KEYWORDS
        harmless |= (keyword == "dropout" and given == 0) or (keyword == "is_causal" and given is True)
        if not harmless:
            raise ModelError(
                f"{type(module).__name__} passes {keyword!r} to attention, which is not supported: "
                "the model cannot be served"
            )


def describing_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], device: torch.device, **_: Any
) -> torch.Tensor:
    """Return a tensor with the shape of the mask, in which every entry is the result of `window_of(...)`."""
    return torch.full((1, 1, q_length, kv_length), window_of(mask_function, device), device=device)


def window_of(mask_function: Callable[..., torch.Tensor], device: torch.device) -> int:
    """Return the sliding window of a mask in tokens, FULL for a causal mask without one, UNKNOWN for any other mask."""
    firsts: dict[int, int] = {}
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for position in TRIED_POSITIONS:
        keys = torch.arange(position + 4, device=device)
        try:
            seen = mask_function(zero, zero, zero + position, keys).expand(keys.shape)
        except (IndexError, RuntimeError):  # the function also reads a table of this batch
            return UNKNOWN
        first = int(seen.int().argmax())
        if not torch.equal(seen, (keys >= first) & (keys <= position)):
            return UNKNOWN
        firsts[position] = first
    last = TRIED_POSITIONS[-1]
    window = last - firsts[last] + 1 if firsts[last] else FULL
    fits = all(first == (max(0, position - window + 1) if window else 0) for position, first in firsts.items())
    return window if fits else UNKNOWN


AttentionInterface.register(IMPLEMENTATION, recording_attention)
AttentionMaskInterface.register(IMPLEMENTATION, describing_mask)
