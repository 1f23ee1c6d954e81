"""Request schemas of the OpenAI API and the fields that llmsched adds to it.

The schemas are strict: they do not convert types, and reject unknown fields. A field that is null counts as left out.
Ranges are checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import from_json

from llmsched.cli.serve.chat_messages import Message
from llmsched.cli.serve.output_format import ResponseFormat, StructuredOutputs
from llmsched.cli.serve.strict_schema import Schema, wrong
from llmsched.cli.serve.tool_fields import NamedFunction, Tool, ToolChoice, check_tools
from llmsched.engine.errors import RequestError
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.sampling_params import MAX_LOGPROBS, SamplingParams

#: Most choices (prompts x n) of a request, by default.
MAX_CHOICES = 1024
#: Most messages of a chat. Each costs time, even if it is empty.
MAX_MESSAGES = 4096
#: Most JSON values (token ids, messages, fields) of a request, besides those that the context has room for.
MAX_VALUES = 1 << 18
#: Longest time in seconds that a request may allow for its answer.
MAX_TIMEOUT_S = 86_400
#: Bytes of a body that are searched at once; meanwhile, no other thread runs.
_SLICE_BYTES = 16 << 10
_INT64 = 1 << 63

#: OpenAI's codes for pydantic's kinds of error.
_CODES = {"missing": "missing_required_parameter", "unknown_field": "unknown_parameter"}

Prompt = str | list[int]
R = TypeVar("R", bound="Schema")


def _prompts(value: Any) -> list[Prompt]:
    """Return a list of prompts, each a text or a list of token ids.

    Raises a single error, even if several prompts are invalid.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("must be a text, or a list of texts, of token ids or of lists of token ids that is not empty")
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise wrong("must be a text, a list of texts, a list of token ids or a list of such lists")


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
        return value
    raise wrong("must be a text or a list of token ids")


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS_SCHEMA]}
_PROMPTS_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS_SCHEMA, {"type": "array", "items": _PROMPT_SCHEMA}]}

#: List of texts. A text stands for a list of one text.
_Texts = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _int64(value: int) -> int:
    if not -_INT64 <= value < _INT64:
        text = str(value)
        shown = text if len(text) <= 24 else f"{text[:24]}... ({len(text)} characters)"
        raise wrong(f"{shown} is out of range; allowed are 64-bit integers")
    return value


def _token_biases(value: Any) -> dict[int, float]:
    """Return logit_bias with its keys, which are strings in JSON, as integer token ids."""
    if not isinstance(value, dict):
        raise wrong('must be an object such as {"464": -100}')
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key):
            raise wrong(f"{key[:40]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise wrong(f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


Int = Annotated[int, AfterValidator(_int64)]
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIAS_SCHEMA = WithJsonSchema(
    {"type": "object", "propertyNames": {"pattern": "^[0-9]+$"}, "additionalProperties": _BIAS}
)


class StreamOptions(Schema):
    include_usage: bool | None = None
    #: vLLM's field: every chunk states the token counts so far.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ModelRequest(Schema):
    """Request to a model. A request without `model` goes to the served model."""

    model: str | None = None


class GenerationRequest(ModelRequest):
    """Fields that completions and chat share."""

    renamed: ClassVar[Mapping[str, str]] = {
        f"guided_{name}": f"structured_outputs.{name}" for name in ("json", "regex", "choice", "grammar")
    }

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int | None = None
    stop: _Texts | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_token_biases), _BIAS_SCHEMA] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Int], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    return_token_ids: bool | None = None
    #: Keep at most this many tokens of a prompt, the last ones; -1: as many as the context has room for.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    #: Seconds from the arrival of the request by which its answer must be complete.
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Accepted and ignored: OpenAI's bookkeeping fields and cache hints.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of output tokens: max_completion_tokens or max_tokens; None if neither is given."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def grammar_spec(self) -> tuple[str, GrammarSpec] | None:
        """Return the name of the field that restricts outputs, and the GrammarSpec that they must match, or None."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs.spec()
        if self.response_format is not None and (spec := self.response_format.spec()) is not None:
            return "response_format", spec
        return None

    def sampling_fields(self) -> dict[str, Any]:
        names = {f.name for f in fields_of(SamplingParams)} - {"max_tokens"}
        given = self.model_dump(include=names & GenerationRequest.model_fields.keys(), exclude_none=True)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, Any]] = {"suffix": ""}
    #: max_tokens of a request without this field; less if the context has less room after the prompt.
    default_max_tokens: ClassVar[int] = 16

    prompt: Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema(_PROMPTS_SCHEMA)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    #: Accepted only if it equals n, because then it changes nothing.
    best_of: Int | None = None
    #: Special tokens in a prompt become these tokens. Default: true.
    parse_special: bool | None = None


class TemplateOptions(Schema):
    """Fields that say how messages become a prompt."""

    #: Special tokens in messages become these tokens. Default: false.
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    #: Functions that the model may call.
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None

    def template_kwargs(self) -> dict[str, Any]:
        """Return the options of render_chat. Raises RequestError if a field contradicts chat_template_kwargs."""
        names = ("add_generation_prompt", "continue_final_message", "parse_special")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.tools:
            given["tools"] = [tool.shown() for tool in self.tools]
        options = self.chat_template_kwargs or {}
        for name in given.keys() & options.keys():
            if given[name] != options[name]:
                raise RequestError(name, f"{name} and chat_template_kwargs.{name} differ; give one of them")
        return {**options, **given}


class ChatRequest(TemplateOptions, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "audio": None,
        "prediction": None,
        "verbosity": None,
        "web_search_options": None,
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: ToolChoice = None
    #: False: at most one call.
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def forces_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    def callable_tools(self) -> list[Tool]:
        """Return the tools that the model may call."""
        tools = self.tools or []
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedFunction):
            return [tool for tool in tools if tool.function.name == self.tool_choice.name]
        return tools

    def template_kwargs(self) -> dict[str, Any]:
        """Return the options of render_chat. With tool_choice "none", the model sees no tools."""
        options = super().template_kwargs()
        if self.tools and self.tool_choice == "none":
            del options["tools"]
        return options


class PrefixRequest(ModelRequest):
    """Body of POST /v1/prefixes: the beginning of prompts, as text, token ids or the first messages of chats."""

    prompt: Annotated[Prompt, PlainValidator(_one_prompt), WithJsonSchema(_PROMPT_SCHEMA)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    ttl: float | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None


def parse(schema: type[R], body: bytes, max_choices: int = MAX_CHOICES, max_values: int = MAX_VALUES) -> R:
    """Parse the request in `body`. Raises RequestError with the field, its value and the allowed values."""
    _check_size(body, max_values)
    try:
        fields = from_json(body)
    except ValueError as error:
        raise RequestError(None, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(None, f"the body must be a JSON object, not {type(fields).__name__}")
    return validate(schema, fields, max_choices)


def validate(schema: type[R], fields: dict[str, Any], max_choices: int = MAX_CHOICES) -> R:
    """Return the request with these fields. Raises RequestError like `parse`."""
    for name, harmless in schema.unsupported.items():
        if (value := fields.pop(name, None)) is not None and value != harmless:
            raise RequestError(name, f"{name} is not supported by this server; leave it out")
    if isinstance(messages := fields.get("messages"), list) and len(messages) > MAX_MESSAGES:
        raise RequestError("messages", f"messages has {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    try:
        request = schema.model_validate(fields)
    except ValidationError as error:
        raise _request_error(error) from error
    if isinstance(request, GenerationRequest):
        _check_combinations(request, max_choices)
    if isinstance(request, PrefixRequest) and (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt", "give the prefix either as prompt or as messages")
    return request


def _check_size(body: bytes, most: int) -> None:
    """Raise RequestError if the body has more JSON values than `most`. Parsing them would block the other threads."""
    starts = range(0, len(body), _SLICE_BYTES)
    if len(body) <= most or sum(_num_values(body, start, start + _SLICE_BYTES) for start in starts) <= most:
        return
    num_values, in_text, rest = 0, 0, b""
    for start in starts:  # again, without the contents of texts
        part = (rest + body[start : start + _SLICE_BYTES]).replace(b"\\\\", b"")
        rest = b"\\" if part.endswith(b"\\") else b""  # it belongs to the next character
        pieces = part.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        num_values += _num_values(b"".join(pieces[in_text::2]))
        in_text ^= (len(pieces) - 1) & 1
        if num_values > most:
            raise RequestError(
                None, f"the request has more than {most} JSON values (token ids, messages, fields); send fewer"
            )


def _num_values(text: bytes, start: int = 0, end: int | None = None) -> int:
    return sum(text.count(mark, start, end) for mark in (b",", b"[", b"{"))


def _request_error(error: ValidationError) -> RequestError:
    """Return the error of the first bad field."""
    details = error.errors(include_url=False)
    first = details[0]["loc"][:1]
    detail = max((d for d in details if d["loc"][:1] == first), key=lambda d: len(d["loc"]))
    kind, path = detail["type"], [str(part) for part in detail["loc"]]
    # pydantic also names the member of a union, which is not a field.
    where = ".".join(part for part in path if part not in ("str", "int", "none") and "[" not in part)
    param = str(first[0]) if first else detail.get("ctx", {}).get("field")
    message = detail["msg"][0].lower() + detail["msg"][1:]
    if kind == "missing":
        message = "this field is required"
    elif kind not in ("unknown_field", "wrong_value"):
        value = detail["input"]
        text = repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
        message = f"{message}; got {text if len(text) <= 60 else text[:57] + '...'}"
    return RequestError(param, f"{where}: {message}" if where else message, _CODES.get(kind))


def _check_combinations(request: GenerationRequest, max_choices: int) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", "stream_options is only allowed when stream is true")
    if len({request.max_tokens, request.max_completion_tokens} - {None}) > 1:
        raise RequestError("max_completion_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    if request.structured_outputs is not None and request.response_format not in (None, ResponseFormat(type="text")):
        raise RequestError("structured_outputs", "give either structured_outputs or response_format")
    n = request.n or 1
    prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
    if prompts * n > max_choices:
        product = f"n ({n}) x {prompts} prompts = {prompts * n} choices"
        raise RequestError("n" if n > 1 else "prompt", f"{product}; at most {max_choices} are allowed")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, n):
        raise RequestError("best_of", f"best_of is {request.best_of}; it must be equal to n ({n})")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    if isinstance(request, ChatRequest):
        check_tools(request.tools or [], request.tool_choice)
