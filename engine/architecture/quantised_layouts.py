"""Layouts of quantised matrices in checkpoints."""
# kv-budget finds the matrices in the headers of safetensors files, and serving in the opened files. The layouts are
# those of DeepSeek-V3 and vLLM (fp8), AutoAWQ ("gemm"), GPTQ ("gptq" and "gptq_v2"), compressed-tensors, bitsandbytes,
# NVIDIA ModelOpt, and gpt-oss (mxfp4).

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from llmsched.engine.architecture.quantised_matrix import MatrixTensors, QuantisedMatrix, Stored
from llmsched.engine.architecture.quantization import JOINED_EXPERTS, method_of
from llmsched.engine.architecture.served_formats import own_values

#: Bytes of a scale in memory, by its type in the file. The exponents become bfloat16.
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
_EXPONENTS = {"U8": 2, "F8_E8M0": 2}  # of powers of two, in 8 bits
_EXPERT = re.compile(
    r"(?P<layer>.+)\.(mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\.(?P<role>(gate|up|down)_proj|w[123])\.weight"
)
_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names
STATE = "weight.quant_state.bitsandbytes__"
#: Last parts of names of tensors that only products with quantised inputs, or a quantised KV cache, need.
UNUSED = frozenset(
    f"{what}_{kind}"
    for what in ("input", "output", "activation", "q", "k", "v", "kv", "prob")
    for kind in ("scale", "zero_point", "global_scale", "scale_ub")
) | {"weight_format"}


def read_matrices(
    stored: Mapping[str, Stored], settings: Mapping[str, Any], where: str
) -> tuple[dict[str, QuantisedMatrix], frozenset[str]]:
    """Find the quantised matrices among the tensors of a checkpoint.

    Returns the matrices by the names that their dequantised weights would have, and the names of all tensors that are
    parts of matrices or are not used. `settings` is the quantization_config, and `where` names the checkpoint in
    messages. Raises ModelError if a tensor is missing or has a wrong shape or type.
    """
    found: dict[str, QuantisedMatrix] = {}
    names = {name for name in stored if name.rpartition(".")[2] in UNUSED}
    for name, tensor in stored.items():
        if (read := _reader(name, tensor, stored, settings)) is None:
            continue
        part = "blocks" if name.endswith("_blocks") else name.rpartition(".")[2]
        matrix = read(MatrixTensors(stored, settings, where, name.removesuffix(part)))
        found[matrix.weight] = matrix
        names |= {matrix.prefix + each for each in matrix.parts}
    return found, frozenset(names)


class ExpertMatrix(NamedTuple):
    """Place of one expert's matrix in a tensor of the model that joins the matrices of all experts."""

    target: str  # name of the joined tensor
    number: int  # of the expert
    role: str  # "gate_proj", "up_proj" or "down_proj"


def expert_matrix(name: str, model_type: str | None) -> ExpertMatrix | None:
    """Return the place of the checkpoint's tensor `name` in a joined tensor, or None if it is not joined."""
    if model_type not in JOINED_EXPERTS or (match := _EXPERT.fullmatch(name)) is None:
        return None
    role = _ROLES.get(match["role"], match["role"])
    target = "down_proj" if role == "down_proj" else "gate_up_proj"
    return ExpertMatrix(f"{match['layer']}.mlp.experts.{target}", int(match["number"]), role)


def joined_experts(
    matrices: Mapping[str, QuantisedMatrix], stored: Iterable[str], model_type: str | None
) -> dict[str, list[QuantisedMatrix]]:
    """Return the matrices of single experts that stay quantised, by the name of the model's tensor that joins them.

    `stored` are the names of the checkpoint's tensors. The joined matrix has the rows of the matrices in the list, in
    this order. Matrices are joined if all matrices of a layer's experts are quantised and alike, and if gate and up of
    each expert have their columns in the same order.
    """
    found: dict[str, list[tuple[int, str, QuantisedMatrix]]] = {}
    for name, matrix in matrices.items():
        if (place := expert_matrix(name, model_type)) is not None:
            own = replace(matrix, shares_order=place.role == "up_proj")
            found.setdefault(place.target, []).append((place.number, place.role, own))
    joined = {name: [matrix for *_, matrix in sorted(each, key=lambda one: one[:2])] for name, each in found.items()}
    unlike = set()
    for name, members in joined.items():
        pairs = zip(members[::2], members[1::2], strict=False) if name.endswith("gate_up_proj") else ()
        if len({(each.kind, each.shape) for each in members}) > 1 or any(one.order != two.order for one, two in pairs):
            unlike.add(name.rpartition(".")[0])
    dense = (expert_matrix(name, model_type) for name in stored if name not in matrices)
    unlike |= {place.target.rpartition(".")[0] for place in dense if place is not None}
    return {name: members for name, members in joined.items() if name.rpartition(".")[0] not in unlike}


def _read_awq(parts: MatrixTensors) -> QuantisedMatrix:
    weight, scales = parts.need("qweight", ("I32",), 2), parts.need("scales", _FLOATS, 2)
    (columns, words), (count, _) = weight.shape, scales.shape
    parts.check("scales", scales, (count, 8 * words))
    parts.check("qzeros", parts.need("qzeros", ("I32",)), (count, words))
    size = _FLOATS[scales.dtype]
    span = parts.groups(columns, count)
    return parts.made("awq", (8 * words, columns), "int4", span=span, scale_bytes=size, has_zeros=True)


def _read_gptq(parts: MatrixTensors) -> QuantisedMatrix:
    weight, scales = parts.need("qweight", ("I32",), 2), parts.need("scales", _FLOATS, 2)
    zeros, (count, rows) = parts.need("qzeros", ("I32",), 2), scales.shape
    bits = 32 * zeros.shape[1] // rows
    if bits not in (4, 8):
        raise parts.error(f"qzeros has shape {zeros.shape}, which does not fit scales of shape {scales.shape}")
    columns = weight.shape[0] * 32 // bits
    parts.check("qzeros", zeros, (count, rows * bits // 32))
    parts.check("qweight", weight, (columns * bits // 32, rows))
    symmetric = parts.settings.get("sym") and all(own_values(parts.settings, "sym"))
    span, size = parts.groups(columns, count), _FLOATS[scales.dtype]
    return parts.made(
        "gptq",
        (rows, columns),
        f"int{bits}",
        span=span,
        scale_bytes=size,
        has_zeros=not symmetric,
        order=parts.order("g_idx", columns, count),
    )


def _read_int32(parts: MatrixTensors) -> QuantisedMatrix:
    """Read codes that compressed-tensors has packed into int32 along rows."""
    weight, scales = parts.need("weight_packed", ("I32",), 2), parts.need("weight_scale", _FLOATS)
    stated = parts.need("weight_shape", ("I64", "I32"))
    parts.check("weight_shape", stated, (2,))
    rows, columns = array("q" if stated.dtype == "I64" else "i", stated.read())
    bits = 32 * weight.shape[1] // max(columns, 1)
    if bits not in (4, 8):
        raise parts.error(f"weight_packed has shape {weight.shape}, which does not fit weight_shape {(rows, columns)}")
    parts.check("weight_packed", weight, (rows, -(-columns * bits // 32)))
    span, size = parts.span("weight_scale", scales, (rows, columns)), _FLOATS[scales.dtype]
    if (zeros := parts.find("weight_zero_point")) is not None:
        count = scales.shape[-1]
        parts.check(
            "weight_zero_point", zeros, (rows, count) if zeros.dtype == "I8" else (-(-rows * bits // 32), count)
        )
    order = parts.order("weight_g_idx", columns, columns // span[1])
    more = {"scale_bytes": size, "has_zeros": zeros is not None, "order": order}
    return parts.made("int32", (rows, columns), f"int{bits}", span=span, **more)


def _read_int8(parts: MatrixTensors) -> QuantisedMatrix:
    """Read codes of compressed-tensors, or of bitsandbytes (its scales of 127 are named SCB)."""
    shape = parts.need("weight", ("I8",), 2).shape
    scales = parts.need("SCB weight_scale", _FLOATS)
    zeros = parts.find("weight_zero_point")
    if zeros is not None:
        parts.check("weight_zero_point", zeros, scales.shape)
    more = {"scale_bytes": _FLOATS[scales.dtype], "has_zeros": zeros is not None}
    return parts.made("int8", shape, "int8", span=parts.span("weight_scale", scales, shape), **more)


def _read_fp8(parts: MatrixTensors) -> QuantisedMatrix:
    shape = parts.need("weight", ("F8_E4M3",), 2).shape
    scales = parts.need("weight_scale_inv weight_scale", _FLOATS | _EXPONENTS)
    span = parts.span("weight_scale", scales, shape)
    return parts.made("fp8", shape, "fp8", span=span, scale_bytes=(_FLOATS | _EXPONENTS)[scales.dtype])


def _read_fp4(parts: MatrixTensors) -> QuantisedMatrix:
    """Read nvfp4, whose scales for 16 weights are in fp8, or mxfp4, whose scales for 32 weights are powers of two."""
    rows, half = parts.need("weight_packed weight", ("U8",), 2).shape
    scales = parts.need("weight_scale", ("F8_E4M3", *_EXPONENTS), 2)
    nv = scales.dtype == "F8_E4M3"
    group = 16 if nv else 32
    parts.check("weight_scale", scales, (rows, 2 * half // group))
    if nv:
        whole = parts.need("weight_global_scale weight_scale_2", ("F32",))
        parts.check("weight_scale_2", whole, (), (1,))
    code, size = ("nvfp4", 4) if nv else ("mxfp4", 2)
    return parts.made("fp4", (rows, 2 * half), code, span=(1, group), scale_bytes=size)


def _read_bitsandbytes(parts: MatrixTensors) -> QuantisedMatrix:
    weight, scales = parts.need("weight", ("U8",)), parts.need("weight.absmax", ("F32", "U8"), 1)
    state = parts.need(f"{STATE}nf4 {STATE}fp4", ("U8",))
    try:
        found = json.loads(state.read())
        (rows, columns), size, code = found["shape"], int(found["blocksize"]), str(found["quant_type"])
    except (ValueError, KeyError, TypeError) as problem:
        raise parts.error(f"its quant_state cannot be read ({problem!r})") from problem
    if 2 * math.prod(weight.shape) != rows * columns or scales.shape != (-(-rows * columns // size),):
        raise parts.error(f"weight {weight.shape} and absmax {scales.shape} do not fit {rows} x {columns}")
    parts.check("weight.quant_map", parts.need("weight.quant_map", ("F32",)), (16,))
    if scales.dtype == "U8":
        parts.check("weight.nested_quant_map", parts.need("weight.nested_quant_map", ("F32",)), (256,))
        nested = -(-scales.shape[0] // int(found.get("nested_blocksize", 256)))
        parts.check("weight.nested_absmax", parts.need("weight.nested_absmax", ("F32",)), (nested,))
    return parts.made("bitsandbytes", (rows, columns), code, span=(1, size), scale_bytes=4)


def _read_experts(parts: MatrixTensors) -> QuantisedMatrix:
    """Read the mxfp4 matrices of all experts of gpt-oss, which the model holds transposed."""
    blocks, scales = parts.need("blocks", ("U8",), 4), parts.need("scales", ("U8",), 3)
    experts, rows, groups, half = blocks.shape
    parts.check("scales", scales, (experts, rows, groups))
    parts.check("blocks", blocks, (experts, rows, groups, 16))
    shape = (experts, groups * half * 2, rows)
    return QuantisedMatrix(
        parts.prefix.removesuffix("_"), "experts", parts.prefix, frozenset(parts.used), shape, "mxfp4", (1, 32), 2
    )


def _reader(
    name: str, tensor: Stored, stored: Mapping[str, Stored], settings: Mapping[str, Any]
) -> Callable[[MatrixTensors], QuantisedMatrix] | None:
    """Return the reader of the matrix whose codes are the tensor `name`, or None if it does not have such codes."""
    last = name.rpartition(".")[2]
    if last == "qweight":
        return _read_awq if method_of(settings) == "awq" else _read_gptq
    if last == "weight_packed":
        return _read_fp4 if tensor.dtype == "U8" else _read_int32
    if last.endswith("_blocks") and method_of(settings) == "mxfp4":
        return _read_experts
    if last != "weight":
        return None
    if tensor.dtype == "U8":
        return _read_bitsandbytes if method_of(settings) == "bitsandbytes" else _read_fp4
    return {"F8_E4M3": _read_fp8, "I8": _read_int8}.get(tensor.dtype)
