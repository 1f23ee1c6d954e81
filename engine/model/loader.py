"""Loader of a model from disk: config, tokenizer, facts about the model, weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.config_fields import quiet_transformers, read_fields, read_json_object
from llmsched.engine.architecture.context_limit import UNLIMITED_LENGTH, max_position
from llmsched.engine.architecture.dtypes import planned_dtype
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.architecture.online_formats import check_quantisable
from llmsched.engine.architecture.quantization import settings_of, with_quantization_file
from llmsched.engine.architecture.text_part import text_config
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import computes_bf16, resolve_device
from llmsched.engine.errors import ModelError, RequestError, one_line
from llmsched.engine.model.generation_config import ignored_fields, sampling_defaults
from llmsched.engine.model.source import ModelSource, locate
from llmsched.engine.model.support import architecture_of, check_supported
from llmsched.engine.model_files import refuse_lfs_pointer
from llmsched.engine.progress import Progress, silent
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from llmsched.engine.model.checkpoint import StateDict
    from llmsched.engine.model.kv_scales import ScaleName
    from llmsched.kernels.packed_matrix import PackedMatrix

logger = logging.getLogger(__name__)

#: Files that hold a vocabulary. Without one of these, transformers would return an empty tokenizer.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a model that can be read without its weights."""

    name: str
    architecture: str
    vocab_size: int
    max_position: int  # longest context in tokens
    eos_token_ids: frozenset[int]
    #: SamplingParams fields that generation_config.json sets.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Fields of generation_config.json that would change the output but are not supported.
    ignored_defaults: Sequence[str] = ()


def load_config(source: ModelSource) -> PretrainedConfig:
    """Load the model's config. Raises ModelError if the config cannot be read or the model cannot be served."""
    if source.kind == "gguf":
        from llmsched.engine.model.gguf_config import gguf_config
        from llmsched.engine.model.gguf_file import read_gguf

        with _reading(source, "its metadata"):
            config = gguf_config(read_gguf(source.path))
    else:
        from transformers import AutoConfig

        path = source.path / "config.json"
        if not path.is_file():
            beside = sorted(file.name for file in source.path.glob("*.gguf"))
            hint = f"name a file in it, e.g. {beside[0]}" if beside else "expected a Hugging Face model directory"
            raise ModelError(f"model {source.spec}: {source.path} has no config.json; {hint}")
        raw = read_json_object(path)
        described = raw.get("architectures") or raw.get("model_type") or "no architecture"
        text = text_config(raw)
        with _reading(source, f"config.json ({described})"):
            config = (
                AutoConfig.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
                if text is raw
                else AutoConfig.for_model(**text)
            )
        if settings := settings_of(with_quantization_file(raw, source.path)):
            config.quantization_config = dict(settings)
    check_supported(config, source.spec)
    return config


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """Load the model's tokenizer. Raises ModelError if it is missing, cannot be read, or has no fast version."""
    with _reading(source, "its tokenizer"):
        if source.kind == "gguf":
            from llmsched.engine.model.gguf_file import read_gguf
            from llmsched.engine.model.gguf_tokenizer import gguf_tokenizer

            return Tokenizer(gguf_tokenizer(read_gguf(source.path)))
        from transformers import AutoTokenizer

        for file in chain.from_iterable(map(source.path.glob, ("*.json", "*.model", "*.txt", "*.jinja"))):
            refuse_lfs_pointer(file)
        if not any((source.path / name).is_file() for name in VOCABULARIES):
            raise ModelError(f"model {source.spec}: has no tokenizer: none of {', '.join(VOCABULARIES)} exists")
        fast = AutoTokenizer.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
    if not fast.is_fast:
        raise ModelError(
            f"model {source.spec}: {type(fast).__name__} has no fast version; add a tokenizer.json to the directory"
        )
    return Tokenizer(fast)


def load_info(source: ModelSource, config: PretrainedConfig, tokenizer: Tokenizer) -> ModelInfo:
    """Read a ModelInfo from a model's files without loading the weights. Raises ModelError for an invalid value."""
    if source.kind == "gguf":
        from llmsched.engine.model.gguf_config import gguf_generation_config
        from llmsched.engine.model.gguf_file import read_gguf

        generation = gguf_generation_config(read_gguf(source.path))
    else:
        path = source.path / GENERATION_CONFIG
        generation = read_json_object(path) if path.is_file() else {}
    with _reading(source, "eos_token_id"):
        ends = _as_ids(generation.get("eos_token_id")) | _as_ids(config.eos_token_id) | tokenizer.eos_token_ids
    limit, _ = max_position(read_fields(config))
    if limit is None and not kv_geometry(config).caches_kv:
        limit = UNLIMITED_LENGTH
    if limit is None:
        raise ModelError(f"model {source.spec}: config.json states neither max_position_embeddings nor seq_length")
    try:
        defaults = sampling_defaults(generation)
        SamplingParams(**{"max_tokens": int(limit), **defaults})
    except (RequestError, TypeError) as error:
        raise ModelError(f"model {source.spec}: {GENERATION_CONFIG}: {one_line(error)}") from error
    return ModelInfo(
        name=source.name,
        architecture=architecture_of(config),
        vocab_size=config.vocab_size,
        max_position=int(limit),
        eos_token_ids=ends,
        sampling_defaults=defaults,
        ignored_defaults=ignored_fields(generation, int(limit)),
    )


def load_model(
    source: ModelSource,
    config: PretrainedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    attn_implementation: str = "eager",
    packed: bool = False,
    quantization: str | None = None,
    host_layers: Collection[int] = (),
    progress: Progress = silent,
) -> PreTrainedModel:
    """Load the model in evaluation mode on `device`. Tied parameters share memory.

    If `packed` is True, quantised matrices stay quantised, and PackedModules replace the modules that use these
    matrices. If `quantization` (a key of ONLINE_FORMATS) is given, the matrices of an unquantised checkpoint are
    rounded to this format, and replaced in the same way. Experts of `host_layers` stay in host memory. Raises
    ModelError if a file is missing or damaged, or a tensor is missing, unknown or of the wrong shape.
    """
    import transformers

    from llmsched.engine.model.checkpoint import with_progress
    from llmsched.engine.model.host_experts import keep_on_host

    matrices: dict[str, PackedMatrix] = {}
    settings, config = _without_quantization(config)
    weights = _open_weights(source, config, settings, dtype, matrices if packed else None)
    if quantization is not None:
        from llmsched.engine.model.online_quantization import quantised_state_dict

        weights = quantised_state_dict(weights, quantization, matrices, dtype, config.model_type)
    state = with_progress(weights, f"loading {source.name}", progress)
    name = architecture_of(config)
    if name == "FalconForCausalLM":  # its eager attention adds ALiBi biases twice
        attn_implementation = "sdpa"
    model_class = getattr(transformers, name)
    with quiet_transformers():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attn_implementation,
            ignore_mismatched_sizes=True,  # _check_complete raises an error with the names
            output_loading_info=True,
        )
    _check_complete(source, report)
    _check_tied(source, model)
    if matrices:
        from llmsched.engine.model.packed_experts import pack_experts
        from llmsched.engine.model.packed_modules import pack_modules

        pack_experts(model, matrices)
        pack_modules(model, matrices)
    model.requires_grad_(False)
    _move(model, device, progress, keep_on_host(model, host_layers, device) if host_layers else ())
    loaded: PreTrainedModel = model.eval()
    return loaded


def _open_weights(
    source: ModelSource,
    config: PretrainedConfig,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    matrices: dict[str, PackedMatrix] | None,
) -> StateDict:
    """Return the tensors of a model, which are read when they are used. `settings` are its quantization_config.

    If `matrices` is given, quantised matrices are added to it, and have placeholders in the result. None: they are
    dequantised.
    """
    from llmsched.engine.model.checkpoint import check_unquantised, open_checkpoint
    from llmsched.engine.model.kv_scales import without_scales

    if source.gguf is not None and (matrices is not None or source.kind == "gguf"):
        from llmsched.engine.model.gguf_file import read_gguf
        from llmsched.engine.model.gguf_weights import gguf_state_dict

        return gguf_state_dict(read_gguf(source.gguf), matrices, dtype)
    stored, subject = without_scales(open_checkpoint(source.path)), f"model {source.spec}"
    if not settings:
        check_unquantised(stored, subject)
        return stored
    from llmsched.engine.model.quantised_weights import dequantised_state_dict

    return dequantised_state_dict(stored, settings, subject, matrices, dtype, model_type=config.model_type)


def _without_quantization(config: PretrainedConfig) -> tuple[Mapping[str, Any], PretrainedConfig]:
    """Return the quantization_config, and a copy of the config without it, so that transformers does not act on it."""
    settings: Any = getattr(config, "quantization_config", None)
    if not settings:
        return {}, config
    config = copy.deepcopy(config)
    del config.quantization_config
    return settings if isinstance(settings, Mapping) else settings.to_dict(), config


def _check_complete(source: ModelSource, report: dict[str, Any]) -> None:
    from llmsched.engine.model.checkpoint import some

    if missing := report["missing_keys"]:
        raise ModelError(f"model {source.spec}: its weights lack tensors: {some(missing)}")
    if unexpected := report["unexpected_keys"]:
        raise ModelError(f"model {source.spec}: its weights have tensors that the model lacks: {some(unexpected)}")
    if mismatched := report["mismatched_keys"]:
        shapes = [f"{name} {tuple(found)} instead of {tuple(wanted)}" for name, found, wanted in mismatched]
        raise ModelError(f"model {source.spec}: tensors whose shapes differ from config.json: {some(shapes)}")
    if errors := report.get("error_msgs") or report.get("conversion_errors"):
        raise ModelError(f"model {source.spec}: weights cannot be converted: {some([str(error) for error in errors])}")


def _check_tied(source: ModelSource, model: PreTrainedModel) -> None:
    """Raise ModelError if config.json ties lm_head to the embeddings but the files have a different lm_head."""
    # transformers would then load both matrices, of which the memory plan counts only one.
    if not model._tied_weights_keys or not model.config.get_text_config().tie_word_embeddings:
        return
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = model.get_input_embeddings()
    if head is None or head.weight.data_ptr() == embeddings.weight.data_ptr():
        return
    differing, total = int((head.weight != embeddings.weight).sum()), head.weight.numel()
    raise ModelError(
        f"model {source.spec}: config.json has tie_word_embeddings true, but lm_head.weight differs from the "
        f"embeddings in {differing:,} of {total:,} values; set tie_word_embeddings to false, or remove lm_head.weight"
    )


def _check_vocabulary(source: ModelSource, info: ModelInfo, tokenizer: Tokenizer) -> None:
    """Raise ModelError if the tokenizer has no tokens, or if ordinary tokens, BOS or EOS lack an embedding."""
    ordinary = tokenizer.backend.get_vocab(with_added_tokens=False).values()
    if not ordinary:
        raise ModelError(f"model {source.spec}: its tokenizer has no tokens; download its tokenizer files again")
    size = info.vocab_size
    needed = max(*ordinary, tokenizer.bos_token_id or 0, *tokenizer.eos_token_ids) + 1
    text = f"model {source.spec}: config.json has vocab_size {size:,}, but the tokenizer has token ids up to"
    if needed > size:
        raise ModelError(f"{text} {needed - 1:,}; the tokenizer belongs to another model, or vocab_size is wrong")
    if tokenizer.vocab_size > size:
        logger.warning("%s %s; prompts with the added tokens above are refused", text, f"{tokenizer.vocab_size - 1:,}")


def _move(model: PreTrainedModel, device: str, progress: Progress, kept: Sequence[torch.Tensor]) -> None:
    # nn.Module.to would not report progress, and would copy buffers once for each module that has them.
    if device == "cpu":
        return
    stay = set(map(id, kept))
    tensors = [each for each in (*model.parameters(), *model.buffers()) if id(each) not in stay]  # each one once
    for done, tensor in enumerate(tensors, start=1):
        tensor.data = tensor.data.to(device)
        progress(f"moving to {device}", done, len(tensors))


def _as_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(token_id) for token_id in (value if isinstance(value, list | tuple) else [value]))


@contextmanager
def _reading(source: ModelSource, what: str) -> Iterator[None]:
    """Convert each error of a library to a ModelError which says that `what` cannot be read."""
    with quiet_transformers():
        try:
            yield
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"model {source.spec}: {what} cannot be read: {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class OpenModel:
    """Model whose weights are not loaded yet."""

    source: ModelSource
    config: PretrainedConfig
    tokenizer: Tokenizer
    info: ModelInfo
    device: str  # where `load` puts the weights
    dtype: torch.dtype  # type in which `load` puts them there
    quantization: str | None = None  # format to which `load` rounds matrices

    @property
    def packed(self) -> bool:
        """True if matrices in the files are quantised, and stay so."""
        return self.quantization is None and (
            self.source.gguf is not None or hasattr(self.config, "quantization_config")
        )

    def load(
        self, progress: Progress = silent, *, packed: bool = True, host_layers: Collection[int] = ()
    ) -> PreTrainedModel:
        """Load the weights as `load_model(...)` does. If `packed` is False, no matrix is quantised."""
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "progress": progress}
        options["host_layers"] = host_layers
        options["quantization"] = self.quantization if packed else None
        return load_model(self.source, self.config, packed=packed and self.packed, **options)

    def kv_scales(self) -> Mapping[ScaleName, torch.Tensor]:
        """Read the scales of an fp8 KV cache from the checkpoint; {} if it has no scales."""
        from llmsched.engine.model.kv_scales import checkpoint_scales

        return {} if self.source.gguf is not None else checkpoint_scales(self.source.path)


def open_model(config: EngineConfig, progress: Progress = silent) -> OpenModel:
    """Find the model `config.model` and read all of its files except the weights.

    Raises ModelError for a model that cannot be found or served, and ConfigError for an unusable device or a
    quantization that the model cannot have.
    """
    source = locate(config.model, progress)
    progress("importing torch and transformers", 0, 1)
    import torch

    model_config = load_config(source)
    if config.quantization is not None:
        check_quantisable(model_config.to_dict(), config.quantization, gguf=source.kind == "gguf")
    progress("importing torch and transformers", 1, 1)
    tokenizer = load_tokenizer(source)
    info = load_info(source, model_config, tokenizer)
    _check_vocabulary(source, info, tokenizer)
    device = resolve_device(config.device)
    dtype = getattr(torch, planned_dtype(config, computes_bf16=computes_bf16(device)))
    return OpenModel(source, model_config, tokenizer, info, device, dtype, config.quantization)
