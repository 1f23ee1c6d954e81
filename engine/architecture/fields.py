"""A model's config as one flat dictionary: the text part of it, with the class defaults of transformers filled in."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.families import FAMILIES
from llmsched.engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Where multimodal models keep the config of their language model.
_NESTED = ("text_config", "language_config", "llm_config", "text_model_config")

#: Keys in which the whole model goes before its nested text config.
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True, slots=True)
class Fields:
    """`values` are the language model's settings; `known` tells whether its class defaults could be filled in."""

    values: Mapping[str, Any]
    known: bool

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set and not null."""
        for name in names:
            if (value := self.values.get(name)) is not None:
                return value
        return default

    @property
    def model_type(self) -> str:
        return str(self.get("model_type", default=""))


def read_config_file(path: Path) -> dict[str, Any]:
    """The config.json at `path` (the file, or the directory it lies in). Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: there is no such file; a model directory has a config.json") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{file}: cannot be read as JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds a {type(content).__name__}, not the settings of a model")
    return content


def read_fields(config: PretrainedConfig | Mapping[str, Any], cache: ConfigCache | None = None) -> Fields:
    """Flatten a transformers config or the content of a config.json; `cache` keeps what transformers is asked.

    What the file says wins; what it leaves out is the class default where transformers knows the model_type. The
    language model of a multimodal config is taken from its nested part only: the outer numbers describe the vision
    part. Raises ModelError for an encoder-decoder and for a config that transformers finds invalid.
    """
    if not isinstance(config, Mapping):
        _refuse_encoder_decoder(config.to_dict())
        return Fields(_class_values(config), known=True)
    _refuse_encoder_decoder(config)
    outer = dict(config)
    text = nested_text(outer) or outer
    shared = {name: outer[name] for name in _SHARED if outer.get(name) is not None}
    stated = {name: value for name, value in text.items() if value is not None} | shared
    defaults = _plain_defaults(text)
    if defaults is not None:
        return Fields(defaults | stated, known=True)
    added = _asked_values(outer) if cache is None else cache.get("values", lambda: _asked_values(outer))
    return Fields((added or {}) | stated, known=added is not None)


def _asked_values(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers' class makes of a config, None where it does not know the model_type."""
    made = transformers_config(content)
    if made is None:
        return None
    _refuse_encoder_decoder(made.to_dict())
    return _class_values(made)


def nested_text(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the language model inside a multimodal one's; None where there is no such part."""
    return next((content[name] for name in _NESTED if isinstance(content.get(name), Mapping)), None)


def _refuse_encoder_decoder(values: Mapping[str, Any]) -> None:
    if values.get("is_encoder_decoder"):
        raise ModelError(
            f"{values.get('model_type', 'this model')} is an encoder-decoder, which keeps a second cache for the "
            "encoder's output; only decoders are served"
        )


def _plain_defaults(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the class of a well-known family adds to `text`; None where transformers must be asked."""
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None or not text.keys() >= family.needs or text.get("use_sliding_window"):
        return None
    if any(isinstance(text[name], str) for name in family.needs - {"hybrid_override_pattern"}):
        return None
    return {name: value for name, value in family.defaults.items() if name not in text}


def transformers_config(content: Mapping[str, Any]) -> PretrainedConfig | None:
    """The config that transformers makes of a config.json's content, None where it does not know the model_type.

    Raises ModelError for content that the config class refuses.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    settings = {name: value for name, value in content.items() if name not in ("model_type", "auto_map")}
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as problem:  # config classes raise whatever their arithmetic or validation raises
        raise ModelError(f"config of type {model_type} is invalid: {' '.join(str(problem).split())}") from problem


def _class_values(config: PretrainedConfig) -> dict[str, Any]:
    """What the text config sets, under its own names and under the standard ones (n_layer -> num_hidden_layers)."""
    text = config.get_text_config(decoder=True)
    own = {name: value for name, value in text.to_dict().items() if value is not None}
    standard = {name: own[alias] for name, alias in text.attribute_map.items() if alias in own}
    outer = config.to_dict()
    shared = {name: outer[name] for name in _SHARED if outer.get(name) is not None}
    return standard | own | shared


logger = logging.getLogger(__name__)

#: Changes when what is kept, or how it is worked out, does.
FORMAT = 1


class ConfigCache:
    """The kept answers about one config.json, in a file of `directory`."""

    def __init__(self, content: Mapping[str, Any], directory: Path) -> None:
        self._content = content
        self._directory = directory
        self._answers: dict[str, Any] | None = None

    def get(self, name: str, ask: Callable[[], Any]) -> Any:
        """The answer of that name: the kept one, else what `ask` returns, which must be plain JSON. Raises as `ask`."""
        answers = self._load()
        if name not in answers:
            answers[name] = ask()
            self._save(answers)
        return answers[name]

    @cached_property
    def _path(self) -> Path:
        versions = [FORMAT, version("llmsched"), version("transformers")]
        digest = hashlib.sha256(json.dumps([versions, self._content], sort_keys=True, default=str).encode())
        return self._directory / f"{digest.hexdigest()[:32]}.json"

    def _load(self) -> dict[str, Any]:
        if self._answers is None:
            self._answers = {}
            try:
                found = json.loads(self._path.read_text(encoding="utf-8"))
                self._answers = found if isinstance(found, dict) else {}
            except (OSError, ValueError) as problem:
                logger.debug("nothing is kept in %s: %s", self._path, problem)
        return self._answers

    def _save(self, answers: Mapping[str, Any]) -> None:
        try:
            text = json.dumps(answers)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".part", encoding="utf-8", delete=False
            ) as part:
                part.write(text)
            os.replace(part.name, self._path)
        except (OSError, TypeError) as problem:
            logger.debug("%s cannot be kept: %s", self._path, problem)
