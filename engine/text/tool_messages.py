"""Conversion of tool messages to forms that chat templates accept. Templates without tools get text as in Hermes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def describe_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Add a description of `tools` to the system message at the beginning."""
    text = _INSTRUCTIONS.format(tools="\n".join(_json(tool) for tool in tools))
    if messages and messages[0].get("role") in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Turn tool calls into text of the assistant, and tool messages into user messages."""
    turns: list[Message] = []
    after_result = False
    for message in messages:
        content, is_result = message["content"], message.get("role") == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        elif message.get("tool_calls"):
            functions = [call["function"] for call in with_objects(message)["tool_calls"]]
            calls = [{"name": each["name"], "arguments": each.get("arguments", {})} for each in functions]
            texts = [content] * bool(content) + [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = "\n".join(texts)
        if after_result and message.get("role") == "user":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{message['content']}"}
        else:
            turns.append(message)
        after_result = is_result
    return turns


def with_objects(message: Message) -> Message:
    """Parse the arguments of tool calls from JSON, because most templates expect objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(TypeError, ValueError):
            if isinstance(arguments := json.loads(function.get("arguments") or "{}"), dict):
                function["arguments"] = arguments
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def with_short_ids(message: Message) -> Message:
    """Replace the ids of tool calls by 9 letters and digits, which the templates of Mistral demand."""

    def short(call_id: Any) -> str:
        return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]

    if message.get("role") == "tool":
        return {**message, "tool_call_id": short(message.get("tool_call_id"))}
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
    return message


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
