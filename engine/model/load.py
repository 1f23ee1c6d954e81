"""From a model on disk to what serving needs: configuration, tokenizer, facts, and the model itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.errors import ModelError, RequestError
from llmsched.engine.model.info import ModelInfo
from llmsched.engine.model.source import ModelSource, one_line, locate
from llmsched.engine.model.support import architecture_of, check_supported
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import SamplingParams
from llmsched.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from llmsched.engine.model.checkpoint import StateDict

__all__ = ["ModelSource", "load_config", "load_info", "load_model", "load_tokenizer", "locate"]

#: Any of these means that the directory brings a vocabulary (without one, transformers makes up an empty tokenizer).
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
GENERATION_CONFIG = "generation_config.json"
#: SamplingParams fields that generation_config.json may set; all but the last only apply where it samples.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
PENALTY_FIELD = "repetition_penalty"


def load_config(source: ModelSource) -> PretrainedConfig:
    """The model's configuration, known to be one that can be served. Raises ModelError."""
    from transformers import AutoConfig

    if source.kind == "gguf":
        from llmsched.engine.model.gguf import read_gguf
        from llmsched.engine.model.gguf_config import gguf_config

        config = gguf_config(read_gguf(source.path))
    else:
        with _quiet_transformers():
            try:
                config = AutoConfig.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # configuration classes check themselves with many types of exception
                raise ModelError(_config_failure(source, error)) from error
    check_supported(config, source.spec)
    return config


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. Raises ModelError if there is none or it cannot run on the tokenizers library."""
    if source.kind == "gguf":
        from llmsched.engine.model.gguf import read_gguf
        from llmsched.engine.model.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(gguf_tokenizer(read_gguf(source.path)))
    from transformers import AutoTokenizer

    if not any((source.path / name).is_file() for name in VOCABULARIES):
        raise ModelError(f"model {source.spec}: no tokenizer: none of {', '.join(VOCABULARIES)} is in {source.path}")
    with _quiet_transformers():
        try:
            fast = AutoTokenizer.from_pretrained(source.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # damaged files raise whatever the parser raises
            raise ModelError(f"model {source.spec}: its tokenizer cannot be read: {one_line(error)}") from error
    if not fast.is_fast:
        raise ModelError(
            f"model {source.spec}: {type(fast).__name__} has no fast version; add a tokenizer.json to the directory"
        )
    return Tokenizer(fast)


def load_info(source: ModelSource, config: PretrainedConfig, tokenizer: Tokenizer) -> ModelInfo:
    """Facts about the model, from its configuration, tokenizer and generation_config.json. Raises ModelError."""
    generation = _generation_config(source)
    ends = _as_ids(generation.get("eos_token_id")) | _as_ids(config.eos_token_id) | tokenizer.eos_token_ids
    return ModelInfo(
        name=source.name,
        architecture=architecture_of(config),
        vocab_size=config.vocab_size,
        max_position=_max_position(source, config),
        eos_token_ids=ends,
        sampling_defaults=_sampling_defaults(source, generation),
    )


def load_model(
    source: ModelSource,
    config: PretrainedConfig,
    *,
    device: str,
    dtype: torch.dtype,
    attn_implementation: str,
    progress: Progress = silent,
) -> PreTrainedModel:
    """The model in evaluation mode on `device`, every parameter read from disk exactly once, tied ones shared.

    Raises ModelError naming files that are missing or damaged, and tensors that are missing, unknown or misshapen.
    """
    import transformers

    from llmsched.engine.model.checkpoint import with_progress

    state = with_progress(_open_weights(source), f"loading {source.name}", progress)
    model_class = getattr(transformers, architecture_of(config))
    with _quiet_transformers():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=attn_implementation,
            ignore_mismatched_sizes=True,  # reported below, with the names
            output_loading_info=True,
        )
    _check_complete(source, report)
    model.requires_grad_(False)
    _move(model, device, progress)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _open_weights(source: ModelSource) -> StateDict:
    if source.kind == "gguf":
        from llmsched.engine.model.gguf import read_gguf
        from llmsched.engine.model.gguf_weights import gguf_state_dict

        return gguf_state_dict(read_gguf(source.path))
    from llmsched.engine.model.checkpoint import open_checkpoint

    return open_checkpoint(source.path)


def _check_complete(source: ModelSource, report: dict[str, Any]) -> None:
    """Raise ModelError unless transformers' report says that weights and model match one to one."""
    from llmsched.engine.model.checkpoint import some

    if missing := report["missing_keys"]:
        raise ModelError(f"model {source.spec}: {len(missing)} tensors missing from its weights: {some(missing)}")
    if unexpected := report["unexpected_keys"]:
        raise ModelError(
            f"model {source.spec}: {len(unexpected)} tensors that {source.name}'s architecture has no place for: "
            f"{some(unexpected)}"
        )
    if mismatched := report["mismatched_keys"]:
        shapes = [f"{name} {tuple(found)} instead of {tuple(wanted)}" for name, found, wanted in mismatched]
        raise ModelError(f"model {source.spec}: tensors of another shape than config.json says: {some(shapes)}")
    if errors := report.get("error_msgs") or report.get("conversion_errors"):
        raise ModelError(f"model {source.spec}: weights cannot be converted: {some([str(error) for error in errors])}")


def _move(model: PreTrainedModel, device: str, progress: Progress) -> None:
    """Move to `device`, one tensor after the other so that it can be watched; shared ones stay shared."""
    if device == "cpu":
        return
    tensors = [*model.parameters(), *model.buffers()]
    for done, tensor in enumerate(tensors, start=1):
        tensor.data = tensor.data.to(device)
        progress(f"moving to {device}", done, len(tensors))


def _config_failure(source: ModelSource, error: Exception) -> str:
    path = source.path / "config.json"
    if not path.is_file():
        return f"model {source.spec}: {source.path} has no config.json; expected a Hugging Face model directory"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return f"model {source.spec}: {path} is no valid JSON"
    if not isinstance(raw, dict):
        return f"model {source.spec}: {path} is no JSON object"
    named = raw.get("architectures") or raw.get("model_type") or "no architecture"
    return f"model {source.spec}: config.json ({named}) is not supported by transformers: {one_line(error)}"


def _generation_config(source: ModelSource) -> dict[str, Any]:
    """generation_config.json as written (its absence is no fault), or what a GGUF file says instead."""
    if source.kind == "gguf":
        from llmsched.engine.model.gguf import read_gguf
        from llmsched.engine.model.gguf_config import gguf_generation_config

        return gguf_generation_config(read_gguf(source.path))
    path: Path = source.path / GENERATION_CONFIG
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model {source.spec}: {path} is no valid JSON ({one_line(error)})") from error
    if not isinstance(loaded, dict):
        raise ModelError(f"model {source.spec}: {path} is no JSON object")
    return loaded


def _as_ids(value: Any) -> frozenset[int]:
    """Token ids written as nothing, one number or a list."""
    if value is None:
        return frozenset()
    return frozenset(int(token_id) for token_id in (value if isinstance(value, list | tuple) else [value]))


def _sampling_defaults(source: ModelSource, generation: dict[str, Any]) -> dict[str, float | int]:
    """What requests that leave these fields out get.

    A file that says do_sample: false leaves only its repetition_penalty, the one of these fields that transformers
    then uses; requests still sample at the API's own default temperature.
    """
    fields = (PENALTY_FIELD,) if generation.get("do_sample") is False else (*SAMPLING_FIELDS, PENALTY_FIELD)
    defaults = {field: generation[field] for field in fields if generation.get(field) is not None}
    try:
        SamplingParams(**defaults)
    except (RequestError, TypeError) as error:
        raise ModelError(f"model {source.spec}: {GENERATION_CONFIG}: {one_line(error)}") from error
    return defaults


def _max_position(source: ModelSource, config: PretrainedConfig) -> int:
    """Tokens of the longest sequence that is computed as the model was trained, whatever shares its batch."""
    from llmsched.engine.model.probe import position_limit

    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise ModelError(f"model {source.spec}: config.json does not say max_position_embeddings")
    return int(min(limit, position_limit(config) or limit))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and bars: what matters is raised as ModelError, progress is reported here."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
