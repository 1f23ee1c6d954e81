from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from llmsched.cli.serve.strict_schema import wrong

#: Fields in which some clients put parts of a message that this server cannot pass to the model.
_CONTENT_FIELDS = (
    *("audio", "images", "image", "image_url", "videos", "video", "files", "file", "documents", "attachments", "parts"),
    *("experimental_attachments", "text", "prefix", "partial", "tools", "functions"),
)


class ChatData(BaseModel):
    """Base class for parts of a conversation. It ignores unknown fields, in which clients keep notes."""

    model_config = ConfigDict(strict=True, extra="ignore")


class FunctionCall(ChatData):
    """Function that the assistant has called. `arguments` is JSON text, or already an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(ChatData):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(ChatData):
    """Turn of a chat. `content` is a text or a list of text parts, which render_chat joins."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_form(cls, value: Any) -> Any:
        """Fill in the content that an assistant or a tool may leave out, and convert function calls to tool calls."""
        if not isinstance(value, dict):
            return value
        if lost := next((name for name in _CONTENT_FIELDS if value.get(name)), None):
            raise PydanticCustomError("unknown_field", "field '{field}' is not supported", {"field": lost})
        value = dict(value)
        if value.get("role") == "function":
            value["role"] = "tool"
        if value.get("role") in ("assistant", "tool") and value.get("content") is None:
            refusal = value.get("refusal")
            value["content"] = refusal if isinstance(refusal, str) else ""
        if value.get("role") != "assistant" and value.get("tool_calls"):
            raise wrong("only an assistant message can have tool_calls")
        if not isinstance(value.get("reasoning_content"), str):
            value.pop("reasoning_content", None)
        if function_call := value.get("function_call"):
            value["tool_calls"] = [{"type": "function", "function": function_call}]
        return value
