"""Reader of the language model's settings in a config.json, with default values for omitted settings."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.families import FAMILIES
from llmsched.engine.architecture.standard_settings import STANDARD_NAMES, standardise
from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model_files import refuse_lfs_pointer
from llmsched.profiles.toml_files import replace_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

#: Keys under which multimodal models keep the config of their language model.
_NESTED = ("text_config", "language_config", "llm_config", "text_model_config")

#: Keys for which the outer config of a multimodal model overrides the nested text config.
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")

#: Version of ConfigCache's file format. Increase it when the stored values, or the way to compute them, change.
_CACHE_FORMAT = 4

#: Settings of families.py for which null is a value.
_NULLABLE = frozenset(
    {"sliding_window", "q_lora_rank", "num_global_key_value_heads", "quantization_config"}
    | {"hidden_size_per_layer_input", "num_kv_shared_layers"}
)

#: Sizes among the defaults of a family. Files leave out either all of them, or none.
_SIZES = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"})

#: Names of settings that are numbers.
_SIZE = re.compile(r"_(size|dim|rank|heads|layers|experts|embeddings|tok)$")

#: Names of settings that are understood in some family.
UNDERSTOOD = frozenset(STANDARD_NAMES.values()).union(*(family.needs for family in FAMILIES.values()))

#: Beginning of the sentence about settings that may matter but were not read.
UNREAD = "settings that are not understood and not taken into account"

#: Names of settings that change neither KV nor weights, although they contain a word that suggests it.
_HARMLESS = re.compile(
    r"dropout|drop_|pdrop|multiplier|temperature|norm(?!alize_qk)|_eps|epsilon|initializer|scal|softcap|implementation|rope|rotary|output_|use_cache|"
    r"cache_implementation|chunk_size_feed|^id2label|^label2id|_token|_id$|_ids$|beam|_return_|nextn|mtp|_act$|"
    r"activation|_coef|routing|router_|(?<!index_)top_?k|^n_group$|group_topk|score|swiglu_limit|float8|fp8|fused|"
    r"kernels$|parallel|pipeline|gradient|recompute|pretraining|reorder|upcast|_fp32|_type$|method|_class$|"
    r"logits|_bos|_eos|^architectures$|auto_map|^torch_dtype$|^dtype$|^model_type$|_path$|version|mrope|position_|per_tok$|^vocab_size_per_layer_input$|processor|bidirectional|expert_group|^(mamba_)?chunk_size$"
)


class ConfigCache:
    """File that caches values which transformers takes seconds to compute from a config.json."""

    # The file's name is a hash of the config and of the versions of llmsched and transformers. Failures to read or
    # write the file are only logged.

    def __init__(self, content: Mapping[str, Any], directory: Path) -> None:
        self._content = content
        self.directory = directory

    def get(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return the value cached under `name`, or else call `ask()` and cache its result, which must be JSON data."""
        if name not in self._answers:
            self._answers[name] = ask()
            try:
                replace_file(self._path, json.dumps(self._answers))
            except (OSError, TypeError) as problem:
                logger.debug("%s cannot be written: %s", self._path, problem)
        return self._answers[name]

    @cached_property
    def _path(self) -> Path:
        versions = [_CACHE_FORMAT, version("llmsched"), version("transformers")]
        digest = hashlib.sha256(json.dumps([versions, self._content], sort_keys=True, default=str).encode())
        return self.directory / f"{digest.hexdigest()[:32]}.json"

    @cached_property
    def _answers(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            logger.debug("%s cannot be read: %s", self._path, problem)
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Fields:
    """Settings of a language model under standard names, for example num_hidden_layers for GPT-2's n_layer."""

    values: Mapping[str, Any]
    known: bool  # True if `values` includes the defaults of the model_type
    config: PretrainedConfig | Mapping[str, Any] = field(repr=False)  # the whole config, including its vision part
    cache: ConfigCache | None = field(default=None, repr=False)
    stated: frozenset[str] = frozenset()  # settings that config.json has
    unstated: frozenset[str] = frozenset()  # settings that config.json should have, but whose values are assumed
    read: set[str] = field(default_factory=set, repr=False, compare=False)  # names that were passed to `get`

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of `names` that is set and not null, or `default`."""
        self.read.update(names)
        for name in names:
            if (value := self.values.get(name)) is not None:
                return value
        return default

    def size(self, name: str) -> int:
        """Return the value of a setting. Raises ModelError if the value is missing or not a whole number."""
        if not isinstance(value := self.get(name), int):
            raise ModelError(f"config has {name} {value!r}; it must be a whole number")
        return value

    def reread(self) -> Fields:
        return replace(self, read=set())

    def assumed(self) -> Iterator[str]:
        """Yield a sentence for each setting that was read but that config.json omits, so that its value is assumed."""
        for name in sorted(self.read & self.unstated):
            value, counted = self.values.get(name), ""
            if isinstance(value, int | float | str):
                counted = f"; {value} is assumed, the default of {self.model_type}"
            yield f"the config does not state {name}{counted}"

    def unread(self, pattern: re.Pattern[str], irrelevant: Set[str] = frozenset()) -> Iterator[str]:
        """Yield a sentence with the names of settings that may matter but were not read, if there are any.

        A setting may matter if its name matches `pattern`, is not in `irrelevant` and is not known to be harmless.
        """
        names = (name for name in self.stated - self.read - irrelevant if self.values.get(name))
        if unread := sorted(name for name in names if pattern.search(name) and not _HARMLESS.search(name)):
            yield f"{UNREAD}: {', '.join(unread)}"

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the value cached under `name`, or else the result of `question()`."""
        return question() if self.cache is None else self.cache.get(name, question)

    @property
    def content(self) -> Mapping[str, Any]:
        return self.config if isinstance(self.config, Mapping) else self.config.to_dict()

    @property
    def model_type(self) -> str:
        return str(self.get("model_type", default=""))

    @property
    def mlp_size(self) -> Any:
        """Width of a dense MLP. Default: four times hidden_size."""
        return self.get("intermediate_size", default=4 * self.get("hidden_size", default=0))

    @property
    def expert_size(self) -> Any:
        """Width of a routed expert. Default: that of a dense MLP."""
        return self.get("moe_intermediate_size", default=self.mlp_size)


@contextmanager
def size_errors() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as problem:
        raise ModelError(f"config has a value that cannot be a size ({one_line(problem)})") from problem


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config.json, given its path or its directory. Raises ModelError if the file cannot be read."""
    return read_json_object(path / "config.json" if path.is_dir() else path)


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: there is no such file; a model directory has a config.json") from None
    except (OSError, ValueError, RecursionError) as problem:
        refuse_lfs_pointer(file)
        raise ModelError(f"{file}: cannot be read as JSON ({one_line(problem)})") from problem
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds a {type(content).__name__}, not a JSON object")
    return content


@size_errors()
def read_fields(config: PretrainedConfig | Mapping[str, Any], cache: ConfigCache | None = None) -> Fields:
    """Return the language model's settings in a transformers config or in the content of a config.json.

    Raises ModelError for an encoder-decoder and for a config that transformers rejects.
    """
    if not isinstance(config, Mapping):
        return Fields(standardise(_class_values(config)), True, config, cache)
    _refuse_encoder_decoder(config)
    text = nested_text(config) or config
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    outer = {name: value for name, value in config.items() if "quant" in name}
    own = standardise({**outer, **text, **shared})
    for name, value in own.items():
        if isinstance(value, str) and _SIZE.search(name):
            raise ModelError(f"config has {name} {value!r}; it must be a whole number")
    stated = frozenset(own)
    named = {STANDARD_NAMES.get(name, name) for name in text if text[name] is not None or name in _NULLABLE} | stated
    family = FAMILIES.get(str(text.get("model_type")))
    defaults: dict[str, Any] = {}
    lacks: set[str] = set()
    if family is not None:
        defaults = {name: value for name, value in family.defaults.items() if name not in named}
        lacks = {STANDARD_NAMES.get(name, name) for name in family.needs} - named
        if not defaults.keys() >= (sizes := family.defaults.keys() & _SIZES):
            lacks |= defaults.keys() & sizes
        if lacks <= defaults.keys():
            return Fields(defaults | own, True, config, cache, stated, frozenset(lacks))

    def ask_transformers() -> dict[str, Any] | None:
        made = None if text is config else transformers_config(text)
        made = made or transformers_config(config)
        return None if made is None else _class_values(made)

    bare = Fields(own, False, config, cache, stated)
    if (values := bare.ask("values", ask_transformers)) is None:
        return bare
    filled = standardise(values)
    if "head_dim" not in named and filled.get("head_dim") == _quotient(filled):
        filled.pop("head_dim", None)  # geometry.py divides again, and checks the result
    if family is None:
        lacks = filled.keys() - named
    else:
        filled = {name: value for name, value in filled.items() if name in lacks} | defaults
    return Fields(filled | own, True, config, cache, stated, frozenset(lacks))


def _quotient(values: Mapping[str, Any]) -> int | None:
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def nested_text(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the text config inside a multimodal model's config, or None for the config of a text model."""
    return next((content[name] for name in _NESTED if isinstance(content.get(name), Mapping)), None)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars in the `with` block."""
    from transformers.utils import logging as theirs

    verbosity, bar = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if bar:
            theirs.enable_progress_bar()  # type: ignore[no-untyped-call]


def transformers_config(content: Mapping[str, Any]) -> PretrainedConfig | None:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    settings = {name: value for name, value in content.items() if name not in ("model_type", "auto_map")}
    try:
        with quiet_transformers():
            return AutoConfig.for_model(model_type, **settings)
    except Exception as problem:  # config classes raise whatever their arithmetic or validation raises
        raise ModelError(f"config of type {model_type} is invalid: {' '.join(str(problem).split())}") from problem


def _refuse_encoder_decoder(values: Mapping[str, Any]) -> None:
    if values.get("is_encoder_decoder"):
        raise ModelError(
            f"{values.get('model_type', 'this model')} is an encoder-decoder, which keeps a second cache for the "
            "encoder's output; only decoders are served"
        )


def _class_values(config: PretrainedConfig) -> dict[str, Any]:
    """Return the text config's settings under the family's own names (such as n_layer) and under the standard names."""
    outer = config.to_dict()
    _refuse_encoder_decoder(outer)
    text = config.get_text_config(decoder=True)
    own = {name: value for name, value in text.to_dict().items() if value is not None}
    standard = {name: own[alias] for name, alias in text.attribute_map.items() if alias in own}
    shared = {name: outer[name] for name in _SHARED if outer.get(name) is not None}
    return standard | own | shared
