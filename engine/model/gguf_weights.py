"""Conversion of a GGUF file's tensors to transformers' names, float32 values and order of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from llmsched.engine.errors import ModelError
from llmsched.engine.model.checkpoint import LazyTensor, StateDict, placeholder, some
from llmsched.engine.model.gguf_config import gguf_config, gguf_generation_config
from llmsched.engine.model.gguf_dequantize import dequantized
from llmsched.engine.model.gguf_file import ROPE_TABLES, Array, GGUFFile, read_gguf
from llmsched.engine.model.gguf_packed import EXPERTS, packed, packing_of
from llmsched.engine.model.gguf_tokenizer import gguf_tokenizer
from llmsched.engine.model_files import SAFETENSORS
from llmsched.engine.progress import Progress
from llmsched.kernels.packed_matrix import PackedMatrix

Number = TypeVar("Number", bound=np.generic)

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_DEEPSEEK = _EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "self_attn.kv_b_proj"),
    "exp_probs_b": "mlp.gate.e_score_correction",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_BY_ARCHITECTURE = {
    "gemma2": _SANDWICH_NORMS,
    "gemma3": _SANDWICH_NORMS,
    "deepseek2": _DEEPSEEK,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("llama", "qwen2moe", "qwen3moe", "olmoe"), _EXPERTS),
    "gpt-oss": _EXPERTS
    | {
        "ffn_gate_inp": "mlp.router",
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
}
#: Parts whose names in transformers have no ".weight", and have "_bias" instead of ".bias".
_WITHOUT_SUFFIX = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "attn_sinks", "exp_probs_b"})
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ADDED_ONE = ("gemma", "gemma2", "gemma3")


def gguf_state_dict(
    file: GGUFFile, packed_matrices: dict[str, PackedMatrix] | None = None, dtype: torch.dtype = torch.float32
) -> StateDict:
    """Return all tensors of `file` as float32 under transformers' names. Raises ModelError for an unknown tensor.

    If `packed_matrices` is given, each read of a tensor that can be packed adds the packed matrix to this mapping. The
    read then returns a placeholder of the type `dtype`, which has the right shape but takes no memory.
    """
    names = {name: _name(file, name) for name in sorted(file.tensors) if name not in ROPE_TABLES}
    if unknown := [name for name, target in names.items() if target is None]:
        raise ModelError(f"{file.path}: tensors unknown to architecture {file.architecture}: {some(unknown)}")
    members: dict[str, list[str]] = {}
    for name, target in names.items():
        members.setdefault(str(target), []).append(name)

    def lazy(target: str, names: Sequence[str]) -> LazyTensor:
        def pack() -> torch.Tensor:
            assert packed_matrices is not None
            packed_matrices[target] = _packed(file, names)
            return placeholder(_shape(file, names), dtype)

        if packed_matrices is not None and packing_of(file, names[0]):
            return LazyTensor(pack)
        return LazyTensor(lambda: _dense(file, names))

    return {target: lazy(target, names) for target, names in members.items()}


def _name(file: GGUFFile, name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if (match := _BLOCK.fullmatch(name)) is None:
        return None
    layer, part, kind = match.groups()
    target = (_LAYER | _BY_ARCHITECTURE.get(file.architecture, {})).get(part)
    if target is None:
        return None
    suffix = {"weight": "", "bias": "_bias"}[kind] if part in _WITHOUT_SUFFIX else f".{kind}"
    return f"model.layers.{layer}.{target}{suffix}"


def _shape(file: GGUFFile, names: Sequence[str]) -> tuple[int, ...]:
    """Return the shape of the model's tensor that joins the tensors `names` of the file."""
    shape = file.tensors[names[0]].shape
    if EXPERTS in names[0]:
        shape = (shape[0], len(names) * shape[1], *shape[2:])
        shape = (*shape[:1], *reversed(shape[1:])) if file.architecture == "gpt-oss" else shape
    return shape


def _dense(file: GGUFFile, names: Sequence[str]) -> torch.Tensor:
    """Return the model's tensor that joins the tensors `names` of the file: gate and up, or a single one."""
    if ".attn_k_b." in names[0]:  # [heads, R, N] and [heads, M, R], see kernels/latents.py
        keys, values = (torch.from_numpy(dequantized(file, name)) for name in names)
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
    if EXPERTS not in names[0]:
        values = torch.from_numpy(_restore(file, names[0])(dequantized(file, names[0])))
        return values[None] if "ffn_gate_inp_shexp" in names[0] and values.ndim == 1 else values
    values = _joined(file, [torch.from_numpy(dequantized(file, name)) for name in names])
    return values.transpose(1, 2).contiguous() if file.architecture == "gpt-oss" and values.ndim == 3 else values


def _joined(file: GGUFFile, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the rows of gate and up, each [experts, rows, ...], for each expert. One part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    if file.architecture == "gpt-oss":  # rows of gate and up alternate
        return torch.stack(list(parts), dim=2).flatten(1, 2)
    return torch.cat(list(parts), dim=1)


def _restore(file: GGUFFile, name: str) -> Callable[[Array], Array]:
    """Return a function that undoes the changes that GGUF converters make to the tensor `name`."""
    if (heads := _permuted_heads(file, name)) is not None:
        return lambda values: _unpermute(values, heads)
    if file.architecture in _ADDED_ONE and name.endswith("norm.weight"):
        return lambda values: values - np.float32(1)
    return lambda values: values


def _permuted_heads(file: GGUFFile, name: str) -> int | None:
    """Return the number of heads whose rows are reordered in the tensor `name`, or None if no rows are reordered."""
    heads = file.require("attention.head_count")
    found = {".attn_q.": heads, ".attn_k.": file.get("attention.head_count_kv", heads)}
    return next((count for part, count in found.items() if file.architecture == "llama" and part in name), None)


def _packed(file: GGUFFile, names: Sequence[str]) -> PackedMatrix:
    """Return the model's packed matrix that joins the tensors `names` of the file: gate and up, or a single one."""
    matrices = [packed(file, name) for name in names]

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        by_expert = [part.view(file.tensors[names[0]].shape[0], -1, part.shape[1]) for part in parts]
        return _joined(file, by_expert).flatten(0, 1)

    matrix = matrices[0]
    if len(matrices) > 1:
        offsets = [each.offsets for each in matrices if each.offsets is not None]
        codes, scales = join([each.codes for each in matrices]), join([each.scales for each in matrices])
        matrix = matrix._replace(codes=codes, scales=scales, offsets=join(offsets) if offsets else None)
    if (heads := _permuted_heads(file, names[0])) is not None:
        matrix = matrix.rows(torch.from_numpy(_unpermute(np.arange(len(matrix.codes)), heads)))
    return matrix


def _unpermute(values: npt.NDArray[Number], heads: int) -> npt.NDArray[Number]:
    """Reorder each head's rows from rope pairs (x0, y0, x1, y1, ...) to halves (x0, x1, ..., y0, y1, ...)."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write the model in a GGUF file to a new Hugging Face directory `target`, with float32 weights.

    Raises ModelError if the file is damaged or not supported.
    """
    file = read_gguf(gguf)
    target.mkdir()
    state = gguf_state_dict(file)
    tensors = {}
    for done, (name, tensor) in enumerate(state.items()):
        progress(f"converting {gguf.name}", done, len(state))
        tensors[name] = tensor.read()
    save_file(tensors, target / SAFETENSORS, metadata={"format": "pt"})
    config = gguf_config(file)
    config.dtype = "float32"
    config.save_pretrained(target)
    generation = json.dumps(gguf_generation_config(file), indent=2)
    (target / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    gguf_tokenizer(file).save_pretrained(target)
    progress(f"converting {gguf.name}", len(state), len(state))
