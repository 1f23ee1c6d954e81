"""Size of a model's weights, from the headers of safetensors files or computed from the config."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.config_fields import (
    UNDERSTOOD,
    UNREAD,
    Fields,
    nested_text,
    read_json_object,
    transformers_config,
)
from llmsched.engine.architecture.online_formats import ONLINE_FORMATS, format_of
from llmsched.engine.architecture.parameters import Parameters, add_up, count_parameters
from llmsched.engine.architecture.quantised_layouts import joined_experts, read_matrices
from llmsched.engine.architecture.quantised_matrix import EXPANDING, QuantisedMatrix, Stored
from llmsched.engine.architecture.quantization import Quantization, quantization_of, settings_of
from llmsched.engine.architecture.served_formats import refusal_of_format
from llmsched.engine.architecture.standard_settings import standardise
from llmsched.engine.architecture.text_part import text_tensors
from llmsched.engine.architecture.vision import can_be_built, encoder_parameters
from llmsched.engine.errors import ModelError
from llmsched.engine.model_files import SAFETENSORS, SAFETENSORS_INDEX, numbered_shards, refuse_lfs_pointer
from llmsched.engine.units import human_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Floating-point types of weights in safetensors files.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_HEADER = 100_000_000  # limit of the safetensors library

#: Patterns that classify the tensors of a built model by name.
_ENCODER = re.compile(r"vis(ual|ion)|audio|multi_modal_projector")
_EMBEDDING = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b")
_SMALL = re.compile(r"bias|norm|router|conv|\bgate\.")
#: Tensors of multi-token prediction (MTP), which are not loaded: `mtp.*`, and layers from num_hidden_layers on.
_MTP_TENSORS = re.compile(r"^(mtp\.|(model\.)?(language_model\.)?(model\.)?layers\.(?P<layer>\d+)\.)")


#: Names of settings that may change the number of parameters.
_WEIGHS = re.compile(
    r"expert|moe|ffn|mlp|inner|proj|embed|rank|hidden|intermediate|vocab|bias|engram|adapter|lora|dim$|quant"
)
_LAYER = re.compile(r"\b(layers|blk)\.(?P<layer>\d+)\.")
#: Parts of a model by the names of their matrices. Embeddings and lm_head may be one matrix.
_PARTS = (
    ("experts", re.compile(r"\.experts\b|_exps|block_sparse_moe\.(in|out)put_linear")),
    ("lm_head", re.compile(r"lm_head|embed_out|^output\.")),
    ("embeddings", _EMBEDDING),
    ("encoders", _ENCODER),
    ("other matrices", re.compile("")),
)
_BLOCK = 32  # see online_quantization
_BUILT = "weights are those of a model that transformers builds, with its defaults for settings that the config omits"
_DENSE_EXPERTS = "experts are dequantised on loading"
_NO_ENCODERS = "weights of vision and audio encoders are not counted"
#: Settings without which weights may have any size.
_DECISIVE = frozenset({"hidden_size", "num_hidden_layers", "intermediate_size", "num_experts", "moe_intermediate_size"})
_REMEDY = "give the size of the weights with --weights-bytes, or name a directory with the files"


@dataclass(frozen=True, slots=True)
class Weights:
    """Size of a model's weights."""

    count: int  # bytes in the serving type
    source: str  # "safetensors", "gguf", "config", "--weights" or "unknown"
    exact: bool  # False for an estimate
    notes: tuple[str, ...] = ()
    doubt: str | None = None  # why the estimate may be far from the truth; None if it is close
    packed_types: tuple[str, ...] = ()  # types of the matrices that stay quantised
    wide_parts: tuple[str, ...] = ()  # parts with matrices that are not quantised, such as "experts"
    experts: Mapping[int, int] = field(default_factory=dict, hash=False)  # bytes of each layer's routed experts


def model_weights(
    path: Path | None, fields: Fields, dtype_bytes: int, *, packed: bool = True, rounding: str | None = None
) -> Weights:
    """Return the size of a model's weights in a serving type of `dtype_bytes` bytes.

    Quantised weights count as `llmsched serve` holds them, or as in the files if `packed` is False or their format is
    not served. If `rounding` (a key of ONLINE_FORMATS) is given, matrices are rounded to this format while they are
    loaded. The size comes from the safetensors headers in the directory `path`, or else from the config. If neither
    tells the size, the result is 0 bytes and a note that says why. Raises ModelError for a damaged file.
    """
    files: list[Path] = []
    if path is not None and (path / SAFETENSORS_INDEX).is_file():
        content = read_json_object(path / SAFETENSORS_INDEX)
        files = [path / name for name in sorted(set(content.get("weight_map", {}).values()))]
    elif path is not None:
        files = numbered_shards(path) or [path / SAFETENSORS]
    if files and all(file.is_file() for file in files):  # without one of the shards the sum would be wrong
        return _from_headers(files, dtype_bytes, fields, packed=packed, rounding=rounding)
    fields = fields.reread()
    quantization = quantization_of(fields)
    packed = packed and not refusal_of_format(_settings(fields))
    modules, notes = modules_of(fields)
    if not modules:
        named = fields.model_type or "no model_type"
        reason = f"weights are not counted, because the layout of {named} is not known"
        unknown = "; ".join((reason, *notes, _REMEDY))
        return Weights(0, "unknown", exact=False, notes=(unknown,), doubt=unknown)
    doubts = [note for note in notes if note.startswith((UNREAD, _NO_ENCODERS))]
    if missing := sorted(_DECISIVE & fields.unstated):
        doubts.append(f"the config does not state {', '.join(missing)}")
    doubt = "; ".join((*doubts, _REMEDY)) if doubts else None
    if rounding is not None:
        return _rounded_weights(modules, rounding, dtype_bytes, fields, notes, doubt)
    sizes = stored_bytes(modules, quantization, dtype_bytes, packed=packed)
    if quantization is not None:
        total = add_up(modules.values())
        parts = (("matrices", sizes.linear, total.linear), ("experts", sizes.experts, total.experts))
        bits = ", ".join(f"{8 * size / count:.3g} bits in {name}" for name, size, count in parts if count)
        counted = f"count as {bits}" if quantization.known else f"count {dtype_bytes} bytes each"
        dequantised = packed and total.experts and not quantization.keeps_experts
        if dequantised and any(quantization.bits(name, expert=True) for name in modules):
            notes += (_DENSE_EXPERTS,)
        notes += (f"the checkpoint is quantised ({quantization.method}); without its files weights {counted}",)
    of_experts = {
        name: stored_bytes({name: each}, quantization, dtype_bytes, packed=packed).experts
        for name, each in modules.items()
    }
    experts = experts_by_layer(of_experts)
    if quantization is None or not packed:
        return Weights(sizes.total, "config", exact=not notes, notes=notes, doubt=doubt, experts=experts)
    wide = wide_parts(f"{name}.weight" for name, counted in modules.items() if _is_wide(name, counted, quantization))
    notes += wide_note(wide, dtype_bytes)
    return Weights(sizes.total, "config", False, notes, doubt, (quantization.method,), wide, experts)


def _rounded_weights(
    modules: Mapping[str, Parameters],
    rounding: str,
    dtype_bytes: int,
    fields: Fields,
    notes: tuple[str, ...],
    doubt: str | None,
) -> Weights:
    count = round(_rounded_bytes(modules, rounding, dtype_bytes, fields))
    shape, kind = (_BLOCK, _BLOCK), fields.model_type
    routed = (f"{name}.weight" for name, counted in modules.items() if counted.experts)
    wide = wide_parts(name for name in routed if format_of(name, shape, rounding, kind) is None)
    experts = experts_by_layer(
        {
            name: _rounded_bytes({name: Parameters(experts=each.experts)}, rounding, dtype_bytes, fields)
            for name, each in modules.items()
        }
    )
    notes += wide_note(wide, dtype_bytes)
    return Weights(count, "config", False, notes, doubt, (rounding,), wide, experts)


def _is_wide(name: str, counted: Parameters, quantization: Quantization) -> bool:
    """Return True if a module has matrices that `llmsched serve` does not hold quantised."""
    if counted.experts and not (quantization.keeps_experts and quantization.bits(name, expert=True)):
        return True
    dense = quantization.bits(name) is None or name.endswith(EXPANDING)
    return bool(counted.embeddings) or (counted.linear > 0 and dense)


def modules_of(fields: Fields) -> tuple[Mapping[str, Parameters], tuple[str, ...]]:
    """Return the number of parameters of each module by name, and notes for the user.

    The mapping is empty if the parameters cannot be counted.
    """
    counted = count_parameters(fields)
    encoders = encoder_parameters(fields.content)
    if counted is not None and (encoders is not None or not can_be_built(fields.content)):
        notes = [*fields.assumed(), *fields.unread(_WEIGHS)]
        if encoders is None:
            notes.append(f"{_NO_ENCODERS}: the config does not describe them")
        return counted | {"encoders": Parameters(encoders=encoders or 0)}, tuple(notes)
    built = fields.ask("modules", lambda: _built_modules(fields.config))
    if built:
        notes = [_BUILT, *fields.unread(_WEIGHS, frozenset(built["understood"]))]
        return {name: Parameters(*each) for name, each in built["modules"].items()}, tuple(notes)
    notes = [*fields.unread(_WEIGHS, UNDERSTOOD)]
    if counted is not None:
        named = fields.content.get("model_type")
        notes.append(f"{_NO_ENCODERS}: {named} cannot be built here")
    return counted or {}, tuple(notes)


def stored_bytes(
    modules: Mapping[str, Parameters], quantization: Quantization | None, dtype_bytes: int, *, packed: bool = False
) -> Parameters:
    """Return the bytes of each class of parameters. Unquantised parameters take `dtype_bytes` bytes each.

    If `packed` is True, the bytes are those in the memory of `llmsched serve`.
    """
    keeps_experts = not packed or (quantization is not None and quantization.keeps_experts)
    quantised = ("linear", "experts") if keeps_experts else ("linear",)
    sizes = [0.0] * len(Parameters._fields)
    for name, counted in modules.items():
        for place, (each, count) in enumerate(zip(Parameters._fields, counted, strict=True)):
            bits = None
            kept = each in quantised and not (packed and name.endswith(EXPANDING))
            if count and quantization is not None and kept:
                bits = quantization.bits(name, expert=each == "experts", packed=packed)
            sizes[place] += count * (dtype_bytes if bits is None else bits / 8)
    return Parameters(*map(round, sizes))


def _rounded_bytes(modules: Mapping[str, Parameters], rounding: str, dtype_bytes: int, fields: Fields) -> float:
    """Estimate the bytes of a model whose matrices are rounded.

    Rows outside of experts are assumed to have hidden_size numbers.
    """
    hidden, inner = fields.get("hidden_size") or 0, fields.expert_size

    def saved(name: str, count: int, width: int, chosen: str) -> float:
        shape = (_BLOCK, max(_BLOCK, width // _BLOCK * _BLOCK))
        if not count or format_of(f"{name}.weight", shape, rounding, fields.model_type) is None:
            return 0.0
        return count * (dtype_bytes - ONLINE_FORMATS[chosen].num_bytes(shape) / math.prod(shape))

    total = 0.0
    for name, counted in modules.items():
        of_expert = inner if isinstance(inner, int) and name.endswith("down_proj") else hidden
        total += sum(counted) * dtype_bytes - saved(name, counted.linear, hidden, rounding)
        total -= saved(name, counted.embeddings, hidden, "int8") + saved(name, counted.experts, of_expert, rounding)
    return total


def wide_parts(names: Iterable[str]) -> tuple[str, ...]:
    """Return the parts of a model to which the matrices `names` belong, without routers and convolutions."""
    found = (
        next((part for part, sign in _PARTS if sign.search(name)), "") for name in names if not _SMALL.search(name)
    )
    return tuple(dict.fromkeys(sorted(found, key=[part for part, _ in _PARTS].index)))


def experts_by_layer(sizes: Mapping[str, float]) -> dict[int, int]:
    """Add up the sizes of tensors or modules of experts, by layer. The keys of `sizes` are names."""
    found: Counter[int] = Counter()
    for name, size in sizes.items():
        if (match := _LAYER.search(name)) is not None and _PARTS[0][1].search(name):
            found[int(match["layer"])] += round(size)
    return dict(sorted(found.items()))


def wide_note(parts: Sequence[str], dtype_bytes: int) -> tuple[str, ...]:
    """Return a note that matrices of these parts are not quantised, or no note if there are no parts."""
    return (f"not quantised: {', '.join(parts)} ({8 * dtype_bytes} bits)",) if parts else ()


def _settings(fields: Fields) -> Mapping[str, Any]:
    return settings_of({"quantization_config": fields.get("quantization_config")})


def _from_headers(
    files: list[Path], dtype_bytes: int, fields: Fields, *, packed: bool, rounding: str | None
) -> Weights:
    stored = {name: tensor for file in files for name, tensor in safetensors_header(file).items()}
    of_files = sum(tensor.size for tensor in stored.values())
    if nested_text(fields.content) is None:
        stored = text_tensors(stored)
    of_encoders = of_files - sum(tensor.size for tensor in stored.values())
    settings, matrices = _settings(fields), list[QuantisedMatrix]()
    if settings and packed and refusal_of_format(settings) is None:
        found, parts = read_matrices(stored, settings, str(files[0].parent))
        stored = {name: tensor for name, tensor in stored.items() if name not in parts}
        matrices = [*found.values()]
    kept = [matrix for matrix in matrices if matrix.is_kept]
    by_name = {each.weight: each for each in matrices}
    kept += chain.from_iterable(joined_experts(by_name, stored, fields.model_type).values())
    packed_names = {each.weight for each in kept}
    wide = [matrix.weight for matrix in matrices if matrix.weight not in packed_names]
    dense_experts = any(".experts." in name for name in wide)
    sizes = {matrix.weight: math.prod(matrix.shape) * dtype_bytes for matrix in matrices}
    sizes |= {matrix.weight: matrix.packed_bytes for matrix in kept}
    for name, tensor in stored.items():
        is_float = tensor.dtype in FLOATS
        chosen = format_of(name, tensor.shape, rounding, fields.model_type) if rounding and is_float else None
        sizes[name] = tensor.size if not is_float else math.prod(tensor.shape) * dtype_bytes
        if chosen is not None:
            sizes[name] = chosen.num_bytes(tensor.shape)
        elif len(tensor.shape) > 1:
            wide.append(name)
    tied, layers = fields.get("tie_word_embeddings"), fields.get("num_hidden_layers", default=math.inf)
    count = left_out = 0
    for name, size in list(sizes.items()):
        match = _MTP_TENSORS.match(name)
        if match and (match["layer"] is None or int(match["layer"]) >= layers):
            left_out += sizes.pop(name)
        elif not (tied and name == "lm_head.weight"):
            count += size
    codes = tuple(sorted({matrix.code for matrix in kept}))
    notes = [f"matrices in {', '.join(codes)} stay quantised"] if kept else []
    if dense_experts:
        notes.append(_DENSE_EXPERTS)
    if other := sorted({tensor.dtype for tensor in stored.values()} - FLOATS):
        notes.append(f"tensors of type {', '.join(other)} count as stored")
    if of_encoders:
        notes.append(f"{human_bytes(of_encoders)} of the files are for images and sound and are not loaded")
    if left_out:
        notes.append(f"{human_bytes(left_out)} of the files are for multi-token prediction (MTP) and are not loaded")
    packed_types = codes if rounding is None else (rounding,)
    of_wide = wide_parts(name for name in wide if not (tied and name == "lm_head.weight")) if packed_types else ()
    notes += wide_note(of_wide, dtype_bytes)
    more: dict[str, Any] = {"packed_types": packed_types, "wide_parts": of_wide, "experts": experts_by_layer(sizes)}
    return Weights(count, "safetensors", True, tuple(notes), **more)


def safetensors_header(file: Path) -> dict[str, Stored]:
    """Return the tensors in a safetensors file. Raises ModelError if it is damaged."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as problem:
            refuse_lfs_pointer(file)
            raise ModelError(f"{file}: is not a safetensors file or is cut short ({problem})") from problem

    def read(start: int, end: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(8 + length + start)
            return stream.read(end - start)

    header.pop("__metadata__", None)
    return {
        name: Stored(tensor["dtype"], tuple(tensor["shape"]), partial(read, start, end), end - start)
        for name, tensor in header.items()
        for start, end in [tensor["data_offsets"]]
    }


def _built_modules(config: Any) -> dict[str, Any] | None:
    """Count parameters by building the model on torch's meta device, or return None if that fails."""
    # Building takes seconds but no memory. The result has, as JSON, the numbers of Parameters for each module, and the
    # settings that the model's class understands.
    made = transformers_config(config) if isinstance(config, Mapping) else config
    if made is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text = made.get_text_config(decoder=True)
    known = {"model_type", *type(text)().to_dict(), *text.attribute_map, *text.attribute_map.values()}
    understood = [*standardise({name: value for name, value in text.to_dict().items() if name in known}), *known]
    made = copy.deepcopy(made)
    made.quantization_config = None
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if getattr(made, "vision_config", None) is not None:
        autos.reverse()  # the text-only class would leave out the encoders
    for auto in (auto for auto in autos if type(made) in auto._model_mapping):
        try:
            with torch.device("meta"):
                model = auto.from_config(made)
            model.tie_weights()
        except Exception as problem:  # model classes raise whatever their arithmetic or imports raise
            logger.info("%s cannot be built: %s", type(made).__name__, problem)
            continue
        modules = {name: _classified(name, tensor) for name, tensor in model.named_parameters()}
        return {"modules": modules, "understood": understood}
    return None


def _classified(name: str, tensor: torch.Tensor) -> Parameters:
    count = int(tensor.numel())
    if _ENCODER.search(name):
        return Parameters(encoders=count)
    if tensor.dim() < 2 or _SMALL.search(name):
        return Parameters(other=count)
    if _EMBEDDING.search(name):
        return Parameters(embeddings=count)
    return Parameters(experts=count) if ".experts" in name else Parameters(linear=count)
