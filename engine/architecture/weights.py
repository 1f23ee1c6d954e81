"""How many bytes a model's weights take once loaded: from the files' headers, else counted from the config."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.fields import Fields, read_fields, transformers_config
from llmsched.engine.architecture.parameters import Parameters, count_parameters
from llmsched.engine.architecture.quantised import weight_bytes, weight_format
from llmsched.engine.architecture.vision import tower_parameters
from llmsched.engine.errors import ModelError
from llmsched.engine.units import human_bytes

if TYPE_CHECKING:
    import torch

    from llmsched.engine.architecture.fields import ConfigCache

logger = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_HEADER = 100_000_000  # safetensors' own limit

#: Tensors of a built model by their names.
_TOWER = re.compile(r"vis(ual|ion)|audio|multi_modal_projector")
_EMBEDDING = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b")
_SMALL = re.compile(r"bias|norm|router|conv|\bgate\.")
#: Tensors of a checkpoint that predict further tokens at once, which is not served.
_FURTHER_TOKENS = re.compile(r"^(mtp\.|(model\.)?(language_model\.)?(model\.)?layers\.(?P<layer>\d+)\.)")


@dataclass(frozen=True, slots=True)
class Weights:
    """`count` bytes in the serving type; `source` tells where from, `exact` whether nothing had to be assumed."""

    count: int
    source: str
    exact: bool
    notes: tuple[str, ...] = ()


def model_weights(path: Path | None, config: Any, dtype_bytes: int, cache: ConfigCache | None = None) -> Weights:
    """Bytes of the weights of the model at `path` (a directory) when served in a type of `dtype_bytes`.

    `config` is a transformers config or the content of a config.json. Floating-point tensors are converted on
    loading and count dtype_bytes per number; quantised ones count as stored. Without safetensors files the parameters
    are counted from the config, tied embeddings once; `cache` keeps the count where that takes building the model.
    Where neither is possible the count is 0 and a note says so.

    Raises ModelError for a damaged file.
    """
    fields = read_fields(config, cache)
    files = _safetensors_files(path) if path is not None and path.is_dir() else []
    if files:
        return _from_headers(files, dtype_bytes, fields)
    parameters, notes = parameters_of(config, fields, cache)
    if not parameters.total:
        named = fields.model_type or "no model_type"
        reason = f"weights are not counted ({named}: neither files nor a known layout); give their size with --weights"
        return Weights(0, "unknown", exact=False, notes=(reason,))
    if quantised := fields.get("quantization_config"):
        return _quantised(parameters, quantised, dtype_bytes)
    return Weights(parameters.total * dtype_bytes, "config", exact=not notes, notes=notes)


def parameters_of(config: Any, fields: Fields, cache: ConfigCache | None = None) -> tuple[Parameters, tuple[str, ...]]:
    """Counted from the table of families, else by building the model; and what was left out. None of it: zeros."""
    counted = count_parameters(fields)
    content = config if isinstance(config, Mapping) else config.to_dict()
    if counted is not None and (tower := tower_parameters(content)) is not None:
        return counted + Parameters(tower=tower), ()
    built = _built_parameters(config) if cache is None else cache.get("parameters", lambda: _built_parameters(config))
    if built:
        return Parameters(**built), ()
    partial = (f"{content.get('model_type')} cannot be built here: what sees or hears is not counted in its weights",)
    return counted or Parameters(), partial if counted else ()


def _quantised(parameters: Parameters, settings: Any, dtype_bytes: int) -> Weights:
    """Bytes of a quantised checkpoint whose files are not there: worked out from the format, so an estimate."""
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
    form = weight_format(settings) if isinstance(settings, Mapping) else None
    if form is None:
        note = f"the checkpoint is quantised ({method}); without its files weights count {dtype_bytes} bytes each"
        return Weights(parameters.total * dtype_bytes, "config", exact=False, notes=(note,))
    bits = ", ".join(
        f"{name} {size:.3g} bits" for name, size in (("matrices", form.linear), ("experts", form.experts)) if size
    )
    note = f"the checkpoint is quantised ({method}); without its files its numbers count as {bits} each"
    return Weights(weight_bytes(parameters, form, dtype_bytes), "config", exact=False, notes=(note,))


def _safetensors_files(directory: Path) -> list[Path]:
    """The weight files that are there; a download that lacks shards counts as none, since the sum would be wrong."""
    if (directory / _INDEX).is_file():
        content = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        files = [directory / name for name in sorted(set(content.get("weight_map", {}).values()))]
    else:
        files = [directory / _SINGLE]
    return files if all(file.is_file() for file in files) else []


def _from_headers(files: list[Path], dtype_bytes: int, fields: Fields) -> Weights:
    count, left_out, stored = 0, 0, set()
    tied, layers = fields.get("tie_word_embeddings"), fields.get("num_hidden_layers", default=math.inf)
    for file in files:
        for name, tensor in _header(file).items():
            if name == "__metadata__" or (tied and name == "lm_head.weight"):
                continue
            size = _loaded_bytes(tensor, dtype_bytes)
            match = _FURTHER_TOKENS.match(name)
            if match and (match["layer"] is None or int(match["layer"]) >= layers):
                left_out += size
                continue
            count += size
            if tensor["dtype"] not in _FLOATS:
                stored.add(tensor["dtype"])
    notes = [f"tensors of type {', '.join(sorted(stored))} count as stored"] if stored else []
    if left_out:
        notes.append(f"{human_bytes(left_out)} of the files predict several tokens at once (MTP) and are not loaded")
    return Weights(count, "safetensors", exact=True, notes=tuple(notes))


def _loaded_bytes(tensor: Mapping[str, Any], dtype_bytes: int) -> int:
    """Floating-point numbers in the serving type, others as they are."""
    if tensor["dtype"] in _FLOATS:
        return int(math.prod(tensor["shape"])) * dtype_bytes
    start, end = tensor["data_offsets"]
    return int(end - start)


def _header(file: Path) -> dict[str, Any]:
    """A safetensors header: eight bytes of length (little-endian), then that much JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as problem:
            raise ModelError(f"{file}: is no safetensors file or is cut short ({problem})") from problem
    return header


def _built_parameters(config: Any) -> dict[str, int] | None:
    """Parameters by building the model without memory (torch's meta device), which takes seconds; None if that fails.

    Models whose parts need packages that are not installed, or whose config has a value that only building shows to
    be wrong, cannot be built.
    """
    made = transformers_config(config) if isinstance(config, Mapping) else config
    if made is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = copy.deepcopy(made)
    made.quantization_config = None
    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if getattr(made, "vision_config", None) is not None:
        autos.reverse()  # the text class of such a model would leave out what sees
    for auto in (auto for auto in autos if type(made) in auto._model_mapping):
        try:
            with torch.device("meta"):
                model = auto.from_config(made)
            model.tie_weights()
        except Exception as problem:  # model classes raise whatever their arithmetic or imports raise
            logger.info("%s cannot be built: %s", type(made).__name__, problem)
            continue
        return asdict(sum((_sorted(name, tensor) for name, tensor in model.named_parameters()), Parameters()))
    return None


def _sorted(name: str, tensor: torch.Tensor) -> Parameters:
    """One tensor of a built model, by what its name and shape say it is."""
    count = int(tensor.numel())
    if _TOWER.search(name):
        return Parameters(tower=count)
    if tensor.dim() < 2 or _SMALL.search(name):
        return Parameters(other=count)
    if _EMBEDDING.search(name):
        return Parameters(embeddings=count)
    return Parameters(experts=count) if ".experts" in name else Parameters(linear=count)
