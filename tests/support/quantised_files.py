"""Small quantised checkpoints in the layouts that other projects publish, and the same models with dequantised weights.

The writers follow the published layouts number by number and share no code with the readers. compressed-tensors
checkpoints come from the library of that name.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_model, build_tokenizer
from torch import Tensor, nn

#: Tensors of a module by the rest of their names, and the dequantised weight (float32).
Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]

FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: Quantiles of the normal distribution (QLoRA, appendix E).
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def affine(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round to integers. Return codes [M, N], zero points and float16 scales [M, groups], and the dequantised weight.

    `groups` is the group of each column.
    """
    count, top = int(groups.max()) + 1, 2**bits - 1
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(count)], 1).clamp(max=0)
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(count)], 1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / top).half()
        zeros = torch.full_like(scales, (top + 1) // 2).int()
    else:
        scales = ((high - low) / top).half()
        zeros = (-low / scales.float()).round().clamp(1, top).int()  # GPTQ's first version cannot store 0
    codes = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, top).int()
    return codes, zeros, scales, (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def into_words(columns: list[Tensor], bits: int) -> Tensor:
    """Join integers of `bits` bits to int32: columns[0] has the lowest bits."""
    words = np.zeros(columns[0].shape, np.uint32)
    for place, column in enumerate(columns):
        words |= column.numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def in_order(size: int, group: int) -> Tensor:
    return torch.arange(size) // group


def awq(weight: Tensor) -> Written:
    codes, zeros, scales, dense = affine(weight, 4, in_order(weight.shape[1], 32), symmetric=False)

    def words(values: Tensor) -> Tensor:  # [rows, outputs] with eight outputs in a word
        return into_words([values[:, place::8] for place in (0, 2, 4, 6, 1, 3, 5, 7)], 4)

    return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}, dense


def gptq(bits: int = 4, *, symmetric: bool = False, shuffled: bool = False, version: int = 1, size: int = 32) -> Writer:
    def write(weight: Tensor) -> Written:
        columns, per_word = weight.shape[1], 32 // bits
        groups = in_order(columns, size if size > 0 else columns)
        if shuffled:
            groups = groups[torch.randperm(columns)]
        codes, zeros, scales, dense = affine(weight, bits, groups, symmetric=symmetric)
        stored = (zeros.T - (1 if version == 1 else 0)) & (2**bits - 1)
        tensors = {
            "qweight": into_words([codes.T[place::per_word] for place in range(per_word)], bits),
            "qzeros": into_words([stored[:, place::per_word] for place in range(per_word)], bits),
            "scales": scales.T,
            "g_idx": groups.int(),
        }
        return tensors, dense

    return write


def fp8(rows: int = 0, columns: int = 0, *, name: str = "weight_scale", dtype: torch.dtype = torch.float32) -> Writer:
    """Return the writer of fp8 weights with a scale for each block; 0 rows or columns means all of them."""

    def write(weight: Tensor) -> Written:
        height, width = rows or weight.shape[0], columns or weight.shape[1]
        blocks = [(top, left) for top in range(0, len(weight), height) for left in range(0, weight.shape[1], width)]
        scales = torch.empty(-(-len(weight) // height), -(-weight.shape[1] // width), dtype=dtype)
        codes, dense = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
        for top, left in blocks:
            block = (slice(top, top + height), slice(left, left + width))
            scale = (weight[block].abs().max() / 448).to(dtype)
            scales[top // height, left // width] = scale
            rounded = (weight[block] / scale.float()).to(torch.float8_e4m3fn)
            codes[block] = rounded
            dense[block] = rounded.float() * scale.float()
        found = scales.reshape(()) if not rows and not columns else scales
        return {"weight": codes, name: found, "input_scale": torch.ones(())}, dense

    return write


def bitsandbytes_4bit(code: str, table: Tensor, *, nested: bool) -> Writer:
    def write(weight: Tensor) -> Written:
        flat = weight.reshape(-1, 64)
        maxima = flat.abs().amax(1)
        extra: dict[str, Tensor] = {}
        state: dict[str, Any] = {"quant_type": code, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        stored = maxima
        if nested:  # maxima are quantised too
            steps, offset = torch.linspace(-1, 1, 256), float(maxima.mean())
            largest = torch.stack([part.abs().max() for part in (maxima - offset).split(256)])
            spread = largest.repeat_interleave(256)[: len(maxima)]
            stored = ((maxima - offset) / spread)[:, None].sub(steps).abs().argmin(1).to(torch.uint8)
            maxima = steps[stored.int()] * spread + offset
            extra = {"weight.nested_absmax": largest, "weight.nested_quant_map": steps}
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
        codes = (flat / maxima[:, None])[..., None].sub(table).abs().argmin(-1)
        dense = (table[codes] * maxima[:, None]).view_as(weight)
        pairs = codes.reshape(-1, 2)
        tensors = {
            "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
            "weight.absmax": stored,
            "weight.quant_map": table.clone(),
            f"weight.quant_state.bitsandbytes__{code}": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }
        return tensors | extra, dense

    return write


def bitsandbytes_8bit(weight: Tensor) -> Written:
    maxima = weight.abs().amax(1)
    codes = (weight / maxima[:, None] * 127).round().to(torch.int8)
    dense = codes.float() * (maxima[:, None] * (1 / 127))
    return {"weight": codes, "SCB": maxima, "weight_format": torch.zeros((), dtype=torch.uint8)}, dense


def nvfp4(weight: Tensor) -> Written:
    """Write weights as NVIDIA ModelOpt does."""
    whole = weight.abs().max() / (6 * 448)
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    wide = (scales.float() * whole).repeat_interleave(16, 1)
    codes = (weight / wide)[..., None].sub(FP4).abs().argmin(-1)
    pairs = codes.unflatten(1, (-1, 2))
    tensors = {"weight": (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), "weight_scale": scales}
    return tensors | {"weight_scale_2": whole, "input_scale": torch.ones(())}, FP4[codes] * wide


def compressed(scheme: dict[str, Any]) -> Writer:
    """Return the writer that uses the compressor of the library compressed-tensors for a config group."""

    def write(weight: Tensor) -> Written:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        made = QuantizationScheme(**scheme)
        compressor: Any = BaseCompressor.get_value_from_registry(scheme["format"])
        stored = compressor.compress({"weight": weight, **_parameters(weight, made.weights)}, made)
        if "fp4" in scheme["format"]:  # the library would compute the weight in bfloat16
            codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, torch.float32)
            scale = compressor._decompress_scale(stored["weight_scale"], torch.float32)
            whole = stored.get("weight_global_scale")
            dense = dequantize(codes, scale, args=made.weights, global_scale=whole)
        else:
            scale = stored["weight_scale"].float()  # the type in which the library computes the weight
            dense = compressor.decompress(stored | {"weight_scale": scale}, made)["weight"].float()
        return {name: tensor.contiguous() for name, tensor in stored.items()}, dense

    return write


def _parameters(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Return scales and zero points as the library's calibration makes them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "block":
            height, width = args.block_structure
            parts = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
        case _:
            parts = weight.unflatten(1, (-1, args.group_size))
    whole = 6 * 448 / weight.abs().max().reshape(1) if args.strategy == "tensor_group" else None
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args, whole)
    if args.num_bits == 4 and args.type == "float":
        return {"weight_scale": scales} | ({} if whole is None else {"weight_global_scale": whole})
    found = {"weight_scale": scales.to(torch.bfloat16)}
    return found if args.symmetric else found | {"weight_zero_point": zeros.round().to(torch.int8)}


def compressed_with_order(weight: Tensor) -> Written:
    """Write the older layout of compressed-tensors in which `weight_g_idx` has the group of each column."""
    groups = in_order(weight.shape[1], 32)[torch.randperm(weight.shape[1])]
    codes, zeros, scales, dense = affine(weight, 4, groups, symmetric=False)
    tensors = {
        "weight_packed": into_words([codes[:, place::8] for place in range(8)], 4),
        "weight_zero_point": into_words([zeros[place::8] for place in range(8)], 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": groups.int(),
    }
    return tensors, dense


def group(weights: dict[str, Any], layout: str, **more: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors with one config group for all linear layers."""
    scheme = {"targets": ["Linear"], "weights": weights, "format": layout, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
DYNAMIC = {"input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}
FP8_INPUTS = {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def _library(weights: dict[str, Any], layout: str, **more: Any) -> tuple[dict[str, Any], Writer]:
    settings = group(weights, layout, **more)
    return settings, compressed(settings["config_groups"]["group_0"])


#: quantization_config and writer of each format.
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8()),
    "fp8 row": ({"quant_method": "fbgemm_fp8"}, fp8(1, 0)),
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
        fp8(32, 32, name="weight_scale_inv"),
    ),
    "fp8 block 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        fp8(128, 128, name="weight_scale_inv", dtype=torch.bfloat16),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "gptq": (GPTQ, gptq()),
    "gptq sym": (GPTQ | {"sym": True}, gptq(symmetric=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(version=2)),
    "gptq order": (GPTQ | {"desc_act": True}, gptq(shuffled=True)),
    "gptq int8": (GPTQ | {"bits": 8}, gptq(8)),
    "gptq int8 sym order": (GPTQ | {"bits": 8, "sym": True, "desc_act": True}, gptq(8, symmetric=True, shuffled=True)),
    "gptq rows": (GPTQ | {"group_size": -1, "sym": True}, gptq(symmetric=True, size=-1)),
    "int4 group": _library(INT4, "pack-quantized"),
    "int4 asym": _library(INT4 | {"symmetric": False}, "pack-quantized"),
    "int4 channel": _library({"num_bits": 4, "type": "int", "strategy": "channel"}, "pack-quantized"),
    "int4 order": (group(INT4 | {"symmetric": False, "actorder": "group"}, "pack-quantized"), compressed_with_order),
    "int8 packed": _library({"num_bits": 8, "type": "int", "strategy": "channel"}, "pack-quantized"),
    "w8a8": _library({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized", **DYNAMIC),
    "w8a16 asym": _library({"num_bits": 8, "strategy": "channel", "symmetric": False}, "int-quantized"),
    "ct fp8": _library({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized", **FP8_INPUTS),
    "ct fp8 channel": _library({"num_bits": 8, "type": "float", "strategy": "channel"}, "naive-quantized"),
    "ct fp8 block": _library(
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "32x32"}, "float-quantized"
    ),
    "ct nvfp4": _library(
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "float8_e4m3fn"},
        "nvfp4-pack-quantized",
    ),
    "ct mxfp4": _library(
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
        "mxfp4-pack-quantized",
    ),
    "nf4": (BNB, bitsandbytes_4bit("nf4", NF4, nested=False)),
    "nf4 nested": (BNB | {"bnb_4bit_use_double_quant": True}, bitsandbytes_4bit("nf4", NF4, nested=True)),
    "bnb fp4": (BNB | {"bnb_4bit_quant_type": "fp4"}, bitsandbytes_4bit("fp4", FP4 / 6, nested=False)),
    "bnb int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_8bit),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8()),
}


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    model: Any  # with dequantised weights
    dense: dict[str, Tensor]  # dequantised weights by name


def save_quantised(
    path: Path, case: str, arch: str = "llama", *, only: str = "", vocabulary: bool = False, **overrides: Any
) -> Checkpoint:
    """Write a small model of `arch` whose linear layers are quantised, except for lm_head, with its tokenizer.

    If `only` is given, only layers whose names contain this text are quantised. If `vocabulary` is True, embeddings and
    lm_head are quantised too.
    """
    settings, write = FORMATS[case]
    model, tensors, dense = build_model(arch, **{"num_hidden_layers": 2, **overrides}), {}, {}
    torch.manual_seed(1)
    for name, module in model.named_modules():
        chosen = vocabulary or (isinstance(module, nn.Linear) and name != "lm_head")
        if chosen and isinstance(module, nn.Linear | nn.Embedding) and only in name:
            parts, weight = write(module.weight.detach())
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
            dense[f"{name}.weight"] = module.weight.data = weight
    plain = {name: tensor for name, tensor in model.state_dict().items() if name not in dense}
    if model.config.tie_word_embeddings:
        del plain["lm_head.weight"]
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in (plain | tensors).items()}, path / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    build_tokenizer().save_pretrained(path)
    return Checkpoint(path, model, dense)


def save_experts(path: Path, case: str) -> Checkpoint:
    """Write a small model of experts: "olmoe awq" has all matrices in the format awq, "gpt_oss mxfp4" only experts.

    In the format "gptq order", gate and up of an expert have their columns in the same order, unless the case ends in
    "apart".
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    arch, _, name = case.removesuffix(" apart").partition(" ")
    settings, write = FORMATS.get(name, FORMATS["awq"])
    model = build_model(arch)
    model.save_pretrained(path)
    torch.manual_seed(1)
    plain, tensors, dense = load_file(path / "model.safetensors"), {}, {}
    matrices = ("proj.weight", "mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    for name, weight in plain.items():
        if arch == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = weight.shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, blocks.shape[:3], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        elif arch != "gpt_oss" and name.endswith(matrices):
            shared = name if case.endswith("apart") else re.sub(r"(up|gate)_proj|w[13]", "", name)
            torch.manual_seed(zlib.crc32(shared.encode()))
            parts, dense[name] = write(weight)
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    save_file({**plain, **dense}, path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    stored = {name: tensor for name, tensor in plain.items() if name not in dense} | tensors
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}), encoding="utf-8")
    build_tokenizer().save_pretrained(path)
    return Checkpoint(path, model, dense)
