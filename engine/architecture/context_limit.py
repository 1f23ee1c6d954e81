"""Longest context in which a model's rotary embeddings are valid."""

from __future__ import annotations

from collections.abc import Mapping

from llmsched.engine.architecture.config_fields import Fields
from llmsched.engine.errors import ModelError

#: Longest context of a model whose memory does not grow with the context and that states no limit.
UNLIMITED_LENGTH = 1 << 20
#: Types of rotary embeddings, in rope_scaling or rope_parameters.
ROPE_TYPES = frozenset(
    {"default", "linear", "dynamic", "ntk", "yarn", "deepseek_yarn", "longrope", "su", "llama3", "mrope"}
    | {"proportional", "xdrope"}
)


def max_position(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    """Return the longest context in tokens (None: unlimited), and notes for the user.

    The longest context is max_position_embeddings or the result of `rotary_limit(...)`, whichever is smaller.
    """
    stated = fields.get("max_position_embeddings")
    limit = min((each for each in (stated, rotary_limit(fields)) if each), default=None)
    if limit == stated:
        return limit, ()
    of = f" of {stated}" if stated else ""
    return limit, (f"context limited to {limit}{of} tokens: beyond it the rotary embeddings change",)


def rotary_limit(fields: Fields) -> int | None:
    """Return the length in tokens beyond which a context has other rotary embeddings; None if there is no such length.

    Raises ModelError for an unknown type of rotary embeddings.
    """
    # Embeddings of the types longrope and dynamic change for the whole batch when its longest sequence exceeds the
    # original context. Then results would depend on other requests, and keys that are already cached would be wrong.
    given = fields.get("rope_parameters", "rope_scaling", default={})
    if not isinstance(given, Mapping):
        raise ModelError(f"config has rope_scaling {given!r}; it must be an object with a type and a factor")
    per_layer_kind = [value for value in given.values() if isinstance(value, Mapping)]
    limits = []
    for rope in per_layer_kind or [given]:
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if kind not in ROPE_TYPES:
            known = ", ".join(sorted(ROPE_TYPES))
            raise ModelError(f"config has rope_scaling of the unknown type {kind!r}; known are {known}")
        original = rope.get("original_max_position_embeddings") if kind == "longrope" else None
        if kind == "longrope" or "dynamic" in kind:
            limits.append(original or fields.get("original_max_position_embeddings", "max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)
