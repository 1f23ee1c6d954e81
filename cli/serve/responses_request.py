"""Body of POST /v1/responses, and its translation to a chat request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from llmsched.cli.serve.protocol import ChatRequest, Int, ModelRequest, validate
from llmsched.cli.serve.strict_schema import Schema, wrong
from llmsched.engine.errors import RequestError

#: Fields of a chat request -> fields of a response request.
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
#: Paths in the messages of a chat request's errors -> paths of a response request.
_PATHS = (
    (re.compile(r"^(tools\.\d+)\.function\b"), r"\1"),
    (re.compile(r"^response_format\.json_schema\b"), "response_format"),
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
)


def renamed(error: RequestError) -> RequestError:
    """Return the error of a chat request with the names of a response request."""
    if (name := error.param) is None:
        return error
    message = str(error)
    for path, ours in _PATHS:
        message = path.sub(ours, message)
    return RequestError(_NAMES.get(name, name), message.replace(name, _NAMES.get(name, name), 1), error.code)


class TextOptions(Schema):
    format: dict[str, Any] | None = None
    verbosity: Any = None

    @field_validator("verbosity")
    @classmethod
    def _is_unsupported(cls, value: Any) -> None:
        if value is not None:
            raise wrong("is not supported by this server; leave it out")


class EventOptions(Schema):
    include_obfuscation: bool | None = None


class ReasoningOptions(Schema):
    effort: str | None = None
    #: Accepted and ignored: this server returns the reasoning itself, not a summary.
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(ModelRequest):
    """Body of POST /v1/responses: text and functions. The server stores nothing."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "store": False,
        "previous_response_id": None,
        "conversation": None,
        "background": False,
        "prompt": None,
        "include": [],
        "max_tool_calls": None,
        "top_logprobs": 0,
        "truncation": "disabled",
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    # Accepted and ignored: OpenAI's bookkeeping fields and cache hints.
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @cached_property
    def chat(self) -> ChatRequest:
        """The chat request that this request stands for. Raises RequestError, with names of chat fields, if invalid."""
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "response_format": _chat_format(None if self.text is None else self.text.format),
        }
        return validate(ChatRequest, fields)

    def _messages(self) -> list[dict[str, Any]]:
        start = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*start, {"role": "user", "content": self.input}]
        return start + _chat_messages(self.input)


def _chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for position, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "reasoning":
            parts = item.get("content")
            texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
            reasoning += "".join(text for text in texts if isinstance(text, str))
            continue
        else:
            raise RequestError("input", f"input.{position} has the type {str(kind)[:100]!r}, which is not supported")
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise RequestError("tools", f"tools has the type {str(kind)[:100]!r}; only function is supported")
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _chat_format(text_format: dict[str, Any] | None) -> dict[str, Any] | None:
    if text_format is None or text_format.get("type") != "json_schema":
        return text_format
    schema = {name: value for name, value in text_format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
