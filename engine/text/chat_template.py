"""Conversion of chat messages to prompt tokens with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from inspect import signature
from typing import Any

from llmsched.engine.errors import RequestError
from llmsched.engine.text.tokenizer import Tokenizer, check_unicode
from llmsched.engine.text.tool_messages import Message, calls_as_text, describe_tools, with_objects, with_short_ids

#: Arguments of apply_chat_template that are for the template. The server sets all others itself.
_FOR_TEMPLATE = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message", "kwargs"})
#: Roles that every chat template shows to the model.
_PLAIN_ROLES = ("user", "assistant")
#: Types of content parts -> the key of their text.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: Tool with which `shows_tools` tries a template.
PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_function",
        "description": "A function.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "An argument."}},
            "required": ["probe_argument"],
        },
    },
}


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    check: Callable[[str], None] = lambda text: None,
    /,
    *,
    parse_special: bool = False,
    **template_kwargs: Any,
) -> list[int]:
    """Return the token ids of `messages`, followed by the start of the assistant's turn.

    `template_kwargs` (tools, enable_thinking, ...) are passed to the chat template. Tools, calls and results that it
    does not show become text, see tool_messages. If `continue_final_message` is True, the token ids end with the text
    of the last message. Special tokens in messages and in `template_kwargs` are encoded as plain text, unless
    `parse_special` is True. `check` gets the rendered text before it is encoded, and may raise an exception to refuse
    it.

    Raises RequestError if the model has no chat template, if the template rejects or omits a message, or if
    `template_kwargs` has a keyword that requests may not set.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages", "this model has no chat template, so it cannot chat; send text to /v1/completions instead"
        )
    if refused := _reserved() & template_kwargs.keys():
        raise RequestError("chat_template_kwargs", f"{', '.join(sorted(refused))} cannot be set by a request")
    continues = bool(template_kwargs.get("continue_final_message"))
    options = {"add_generation_prompt": not continues, **template_kwargs}
    if continues and options["add_generation_prompt"]:
        raise RequestError(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true; only one of them can be",
        )
    flat: list[Message] = [_flatten(message, position) for position, message in enumerate(messages)]
    if "message.thinking" in tokenizer.chat_template:
        flat = [_with_thinking(message) for message in flat]
    if (tools := options.get("tools")) and not shows_tools(tokenizer):
        flat = describe_tools(calls_as_text(flat), tools)
        del options["tools"]
    shown = _shown(tokenizer, flat, options)
    if not parse_special:
        shown = [_escaped(tokenizer, message, message.get("role", "user")) for message in shown]
        options = _escaped(tokenizer, options)
    text = render_text(tokenizer, shown, options)
    check_unicode(text, "messages")
    check(text)
    return tokenizer.encode(text, add_special_tokens=False, escaped=not parse_special)


@lru_cache(maxsize=8)
def shows_tools(tokenizer: Tokenizer) -> bool:
    """Return True if the model's chat template shows the tools of a request to the model."""
    try:
        text = render_text(tokenizer, [{"role": "user", "content": "x"}], {"tools": [PROBE_TOOL]})
    except RequestError:
        return False
    return str(PROBE_TOOL["function"]["name"]) in text


def render_text(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Return the text that the chat template makes of `messages`. Raises RequestError if it refuses them."""
    from jinja2 import TemplateError

    conversation: Any = list(messages)
    try:
        return str(tokenizer.fast.apply_chat_template(conversation, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        tools = "" if all(map(_is_plain, messages)) else " (it may not support tool messages)"
        raise RequestError(
            "messages",
            f"the model's chat template refuses these messages{tools}: {reason}; "
            "change the messages, or send the whole prompt as text to /v1/completions",
        ) from error


@cache
def _reserved() -> frozenset[str]:
    """Return the keywords that transformers itself uses, so that requests may not pass them to a template."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    arguments = {name for function in functions for name in signature(function).parameters}
    return frozenset(arguments | {"messages", "tokenizer"}) - _FOR_TEMPLATE


def _escaped(tokenizer: Tokenizer, value: Any, role: str = "user") -> Any:
    """Escape special tokens in all strings of `value`, and the template's turn tokens unless `role` is assistant."""
    # In messages of the assistant, only special tokens are escaped, because the model itself wrote the others.
    if isinstance(value, str):
        return tokenizer.escape(value, () if role == "assistant" else _turn_tokens(tokenizer))
    if isinstance(value, Mapping):
        return {_escaped(tokenizer, key, role): _escaped(tokenizer, each, role) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(tokenizer, each, role) for each in value]
    return value


@lru_cache(maxsize=8)
def _turn_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens, except special tokens, that the chat template writes around the content of messages."""
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    for messages in (chat, chat[1:]):
        with suppress(RequestError):
            return tokenizer.written_tokens(render_text(tokenizer, messages, {"add_generation_prompt": True}))
    return []


def _is_plain(message: Message) -> bool:
    return message.get("role") != "tool" and not message.get("tool_calls")


def _shown(tokenizer: Tokenizer, messages: list[Message], options: Mapping[str, Any]) -> list[Message]:
    """Return the messages in a form that the chat template renders completely.

    Raises RequestError if there is no such form.
    """
    if all(message.get("role") in (None, *_PLAIN_ROLES) and _is_plain(message) for message in messages):
        return messages
    problem: RequestError | None = None
    for form in _forms(messages, knows_developers="developer" in (tokenizer.chat_template or "")):
        for variant in _variants(form):
            try:
                _check_shown(tokenizer, variant, options)
                return variant
            except RequestError as error:
                problem = error
    assert problem is not None
    raise problem


def _variants(form: list[Message]) -> Iterator[list[Message]]:
    """Yield versions of `form` for templates that expect the arguments or the ids of tool calls in another form."""
    if all(map(_is_plain, form)):
        yield form
        return
    objects = [with_objects(message) for message in form]
    yield objects
    yield form
    yield [with_short_ids(message) for message in objects]


def _forms(messages: list[Message], *, knows_developers: bool) -> Iterator[list[Message]]:
    """Yield versions of `messages` for templates that support fewer and fewer roles, and at last no tools.

    If `knows_developers` is True, the first version is `messages` itself.
    """
    # In the second form, developer messages have become system messages. If the template does not name the developer
    # role, this form comes first, because many templates write any role although the model knows only some. In the last
    # two forms, system messages are joined to the user messages beside them: first all except a system message at the
    # beginning, then all.
    as_system = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
    if knows_developers:
        yield messages
    yield as_system
    if any(message.get("role") == "system" for message in as_system):
        if as_system[0].get("role") == "system":
            yield [as_system[0], *_in_user_turns(as_system[1:])]
        yield _in_user_turns(as_system)
    if not all(map(_is_plain, messages)):
        yield from _forms(calls_as_text(messages), knows_developers=knows_developers)


def _in_user_turns(messages: Sequence[Message]) -> list[Message]:
    """Join each system message to the user message before or after it, or turn it into a user message."""
    turns: list[Message] = []
    after_system = False
    for message in messages:
        role = message.get("role")
        is_system = role == "system"
        if turns and turns[-1].get("role") == "user" and (is_system or (after_system and role == "user")):
            joined = f"{turns[-1]['content']}\n\n{message['content']}"
            turns[-1] = {**turns[-1], **message, "role": "user", "content": joined}
        else:
            turns.append({**message, "role": "user"} if is_system else message)
        after_system = is_system
    return turns


def _check_shown(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
    """Raise RequestError if the template leaves out a tool call, or the content of a message not from the assistant."""
    # The check renders the messages with a made-up word in place of each content and of each function name in a tool
    # call, and looks for these words in the result.
    words: dict[str, str] = {}
    marked: list[Message] = []
    for position, message in enumerate(messages):
        changes: dict[str, Any] = {}
        if (role := message.get("role")) != "assistant" and message["content"]:
            changes["content"] = f"content{position}word"
            words[changes["content"]] = f"{role} messages"
        if calls := message.get("tool_calls"):
            names = [f"call{position}of{index}word" for index in range(len(calls))]
            words.update(dict.fromkeys(names, "tool messages (tool_calls of the assistant)"))
            changes["tool_calls"] = [
                {**call, "function": {**call["function"], "name": name}}
                for call, name in zip(calls, names, strict=True)
            ]
        marked.append({**message, **changes})
    text = render_text(tokenizer, marked, options)
    for word, what in words.items():
        if word not in text:
            raise RequestError(
                "messages",
                f"this model's chat template does not support {what}: it leaves them out of the prompt; "
                "send their content in a user message",
            )


def _with_thinking(message: Message) -> Message:
    """Rename reasoning_content to `thinking` for gpt-oss's template, or drop it from a message with content."""
    renamed = dict(message)
    reasoning = renamed.pop("reasoning_content", None)
    return {**renamed, "thinking": reasoning} if reasoning and not message["content"] else renamed


def _flatten(message: Message, position: int) -> dict[str, Any]:
    """Join the text parts of a message's content. Raises RequestError for content that is not text."""
    content, calls = message.get("content"), message.get("tool_calls") or ()
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "messages", f"messages[{position}].tool_calls has a call without a function and its name"
            )
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise RequestError(
                "messages", f"messages[{position}].content has a part of type {kind}; only text parts are supported"
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}
