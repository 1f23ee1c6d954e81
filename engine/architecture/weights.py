"""Size of a model's weights, from the headers of safetensors files or computed from the config."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.config_fields import UNDERSTOOD, UNREAD, Fields, read_json_object, transformers_config
from llmsched.engine.architecture.parameters import Parameters, add_up, count_parameters
from llmsched.engine.architecture.quantization import Quantization, quantization_of
from llmsched.engine.architecture.standard_settings import standardise
from llmsched.engine.architecture.vision import can_be_built, encoder_parameters
from llmsched.engine.errors import ModelError
from llmsched.engine.model_files import SAFETENSORS, SAFETENSORS_INDEX, numbered_shards, refuse_lfs_pointer
from llmsched.engine.units import human_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
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
_BUILT = "weights are those of a model that transformers builds, with its defaults for settings that the config omits"
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


def model_weights(path: Path | None, fields: Fields, dtype_bytes: int) -> Weights:
    """Return the size of a model's weights in a serving type of `dtype_bytes` bytes.

    The size comes from the safetensors headers in the directory `path`, or else from the config. If neither tells the
    size, the result is 0 bytes and a note that says why. Raises ModelError for a damaged file.
    """
    files: list[Path] = []
    if path is not None and (path / SAFETENSORS_INDEX).is_file():
        content = read_json_object(path / SAFETENSORS_INDEX)
        files = [path / name for name in sorted(set(content.get("weight_map", {}).values()))]
    elif path is not None:
        files = numbered_shards(path) or [path / SAFETENSORS]
    if files and all(file.is_file() for file in files):  # without one of the shards the sum would be wrong
        return _from_headers(files, dtype_bytes, fields)
    fields = fields.reread()
    quantization = quantization_of(fields)
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
    sizes = stored_bytes(modules, quantization, dtype_bytes)
    if quantization is not None:
        total = add_up(modules.values())
        parts = (("matrices", sizes.linear, total.linear), ("experts", sizes.experts, total.experts))
        bits = ", ".join(f"{8 * size / count:.3g} bits in {name}" for name, size, count in parts if count)
        counted = f"count as {bits}" if quantization.known else f"count {dtype_bytes} bytes each"
        notes += (f"the checkpoint is quantised ({quantization.method}); without its files weights {counted}",)
    return Weights(sizes.total, "config", exact=not notes, notes=notes, doubt=doubt)


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


def stored_bytes(modules: Mapping[str, Parameters], quantization: Quantization | None, dtype_bytes: int) -> Parameters:
    """Return the bytes of each class of parameters. Unquantised parameters take `dtype_bytes` bytes each."""
    sizes = [0.0] * len(Parameters._fields)
    for name, counted in modules.items():
        for place, (each, count) in enumerate(zip(Parameters._fields, counted, strict=True)):
            bits = None
            if count and quantization is not None and each in ("linear", "experts"):
                bits = quantization.bits(name, expert=each == "experts")
            sizes[place] += count * (dtype_bytes if bits is None else bits / 8)
    return Parameters(*map(round, sizes))


def _from_headers(files: list[Path], dtype_bytes: int, fields: Fields) -> Weights:
    count, left_out, stored = 0, 0, set()
    tied, layers = fields.get("tie_word_embeddings"), fields.get("num_hidden_layers", default=math.inf)
    for file in files:
        for name, tensor in _header(file).items():
            if name == "__metadata__" or (tied and name == "lm_head.weight"):
                continue
            is_float = tensor["dtype"] in _FLOATS
            start, end = tensor["data_offsets"]
            size = math.prod(tensor["shape"]) * dtype_bytes if is_float else end - start
            match = _MTP_TENSORS.match(name)
            if match and (match["layer"] is None or int(match["layer"]) >= layers):
                left_out += size
                continue
            count += size
            if not is_float:
                stored.add(tensor["dtype"])
    notes = [f"tensors of type {', '.join(sorted(stored))} count as stored"] if stored else []
    if left_out:
        notes.append(f"{human_bytes(left_out)} of the files are for multi-token prediction (MTP) and are not loaded")
    return Weights(count, "safetensors", exact=True, notes=tuple(notes))


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as problem:
            refuse_lfs_pointer(file)
            raise ModelError(f"{file}: is not a safetensors file or is cut short ({problem})") from problem
    return header


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
