"""Conversion of chat messages to the token ids of a prompt with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmsched.engine.errors import RequestError
from llmsched.engine.text.tokenizer import Tokenizer, check_unicode

Message = Mapping[str, Any]

#: Arguments of apply_chat_template that it does not pass to the template. Requests may not set them.
_RESERVED = frozenset(
    {"conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
)


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
    """Return the token ids of `messages`, followed by the start of the assistant's turn.

    `template_kwargs` (tools, enable_thinking, ...) are passed to the chat template, which transformers runs in a
    sandbox. The template writes all special tokens itself. Raises RequestError if the model has no chat template, the
    template rejects the messages, or a keyword is reserved.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise RequestError(
            "messages", "this model has no chat template, so it cannot chat; send text to /v1/completions instead"
        )
    if refused := _RESERVED & template_kwargs.keys():
        raise RequestError("chat_template_kwargs", f"{', '.join(sorted(refused))} cannot be set by a request")
    flat = [_flatten(message, position) for position, message in enumerate(messages)]
    options = {"add_generation_prompt": True, **template_kwargs}
    try:
        text = str(tokenizer.fast.apply_chat_template(flat, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        reason = str(error).strip().splitlines()
        raise RequestError(
            "messages",
            f"the model's chat template refuses these messages: {reason[0] if reason else type(error).__name__}; "
            "change the messages, or send the whole prompt as text to /v1/completions",
        ) from error
    check_unicode(text, "messages")
    return tokenizer.encode(text, add_special_tokens=False)


def _flatten(message: Message, position: int) -> dict[str, Any]:
    """Return the message with its text parts joined. Raises RequestError for a part of another type."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                "messages", f"messages[{position}].content has a part of type {kind}; only text parts are supported"
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}
